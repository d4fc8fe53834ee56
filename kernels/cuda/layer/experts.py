"""Launches the kernels of a decode step's mixtures of experts: routing.cu, and experts.cuh, which products.cu includes.

Functions launch on the current stream, can be captured in a CUDA graph and read nothing back. Tensors are contiguous and on
the kernels' GPU. The kernels are compiled for models with experts alone, whose numbers have 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvseek.core.config import WEIGHT_GROUP
from kvseek.core.errors import KernelError
from kvseek.core.weight_only import INT8_ASYMMETRIC, NONE
from kvseek.kernels.arguments import aligned_address, checked_address
from kvseek.kernels.structs import c_struct

from .products import ALIGNMENT, MOST_ROWS, WARP, Format, Formats, Shape

if TYPE_CHECKING:
    from kvseek.core.config import EngineConfig
    from kvseek.core.cuda import CudaKernels
    from kvseek.core.model_config import ExpertsConfig

# As in routing.cu and experts.cuh.
GATE_UP_WARPS, GATE_UP_CHANNELS = 4, 8
DOWN_WARPS, DOWN_CHANNELS = (16, 8, 4), 16
ROUTE_WARPS, COMBINE_THREADS = 32, 256
MOST_SHARED_BYTES = 99 << 10  # of a block, the least of all architectures: sm_89 and sm_120

RouteArguments = c_struct("kernels/cuda/layer/routing.cu", "RouteArguments")
CombineArguments = c_struct("kernels/cuda/layer/routing.cu", "CombineArguments")
ExpertGateUpArguments = c_struct("kernels/cuda/layer/experts.cuh", "ExpertGateUpArguments")
ExpertDownArguments = c_struct("kernels/cuda/layer/experts.cuh", "ExpertDownArguments")


@dataclass(frozen=True)
class Routes:
    """Which experts the rows of a step have, and which rows the experts have.

    Attributes
    ----------
    weights : Tensor, float32 [rows, chosen]
    slots : Tensor, int32 [slots]
        The experts that some row has chosen, ascending; -1 behind the last.
    starts : Tensor, int32 [slots + 1]
        The first of each slot's `pairs`; behind the last slot their number.
    pairs : Tensor, int32 [rows * chosen]
        row * chosen + place, by expert and then by row.
    """

    weights: Tensor
    slots: Tensor
    starts: Tensor
    pairs: Tensor


class ExpertKernels:
    """The kernels of one model's mixtures, or of a rank's part of them.

    Parameters
    ----------
    dtype : torch.dtype
        bfloat16 or float16: of x and results.
    precision, weight_group : str, int
        Of the weights, as EngineConfig's fields.
    asymmetric : bool
        Whether there are weights of int8_asymmetric beside them.

    Attributes
    ----------
    most_rows : int
        Most rows that the methods take.
    """

    def __init__(
        self,
        kernels: CudaKernels,
        dtype: torch.dtype,
        config: ExpertsConfig,
        precision: str = NONE,
        weight_group: int = WEIGHT_GROUP,
        *,
        asymmetric: bool = False,
    ) -> None:
        self._kernels, self.dtype, self.config = kernels, dtype, config
        self._precision = precision
        self.formats = Formats(precision, weight_group, dtype, (INT8_ASYMMETRIC,) if asymmetric else ())
        left = MOST_SHARED_BYTES - DOWN_WARPS[-1] * max(map(_warp_bytes, self.formats))
        self.most_rows = min(MOST_ROWS, left // (config.num_experts_per_tok * DOWN_CHANNELS * 4))

    def route(self, logits: Tensor) -> Routes:
        """Choose the experts of rows by the router's logits [rows, experts], as `route` of engine/model/experts.py does.

        Raises KernelError if there are more than `most_rows` rows.
        """
        (rows, experts), chosen = logits.shape, self.config.num_experts_per_tok
        if rows > self.most_rows:
            raise KernelError(f"rows = {rows}: must be <= {self.most_rows}; compute them in parts")
        if experts != self.config.num_experts:
            raise KernelError(
                f"logits {tuple(logits.shape)}: must be of {self.config.num_experts} experts; give the router's"
            )
        count = min(experts, rows * chosen)
        slots, starts, pairs = (
            torch.empty(size, dtype=torch.int32, device=logits.device) for size in (count, count + 1, rows * chosen)
        )
        weights = torch.empty(rows, chosen, dtype=torch.float32, device=logits.device)
        arguments = RouteArguments(
            logits=checked_address("logits", logits, self.dtype, self._kernels.device),
            weights=weights.data_ptr(),
            slots=slots.data_ptr(),
            starts=starts.data_ptr(),
            pairs=pairs.data_ptr(),
            rows=rows,
            experts=experts,
            chosen=chosen,
            normalised=self.config.norm_topk_prob,
            slot_count=count,
        )
        self._kernels.launch("kvseek_route", (1, 1, 1), min(rows, ROUTE_WARPS) * WARP, arguments, overlap=True)
        return Routes(weights, slots, starts, pairs)

    def gate_up(self, x: Tensor, weight: Tensor, scale: Tensor | None, routes: Routes) -> Tensor:
        """Compute silu(gate) * up of x [rows, hidden] and each row's experts: [rows * chosen, I], by pair.

        `weight` [experts * 2 I, hidden] has the gates of an expert before its ups; it and `scale` are as they are stored. Raises
        KernelError as `down`.
        """
        hidden, chosen = x.shape[1], self.config.num_experts_per_tok
        intermediate = weight.shape[0] // (2 * self.config.num_experts)
        out, form = x.new_empty(x.shape[0] * chosen, intermediate), self.formats.of(weight, scale)
        arguments = ExpertGateUpArguments(
            x=self._aligned("x", x, self.dtype),
            **self._matrix(form, weight, scale, 2 * intermediate, hidden),
            slots=routes.slots.data_ptr(),
            starts=routes.starts.data_ptr(),
            pairs=routes.pairs.data_ptr(),
            out=out.data_ptr(),
            chosen=chosen,
            hidden=hidden,
            intermediate=intermediate,
        )
        grid = (-(-intermediate // GATE_UP_CHANNELS), routes.slots.shape[0], 1)
        shared = GATE_UP_WARPS * _warp_bytes(form)
        name = f"{self._kernel(form)}_gate_up"
        self._kernels.launch(name, grid, GATE_UP_WARPS * WARP, arguments, shared, overlap=True)
        return out

    def down(self, x: Tensor, weight: Tensor, scale: Tensor | None, routes: Routes) -> Tensor:
        """Compute the sums [rows, hidden] of the rows' experts, by what `gate_up` gave and `weight` [experts * hidden, I].

        It must follow `gate_up` directly, as it reads routes before that has ended. Sums are in float32, in the order of a row's
        experts, and rounded once.

        Raises
        ------
        KernelError
            If the kernels cannot read a tensor.
        """
        (pairs, intermediate), chosen = x.shape, self.config.num_experts_per_tok
        rows, hidden = pairs // chosen, weight.shape[0] // self.config.num_experts
        form, products = self.formats.of(weight, scale), pairs * DOWN_CHANNELS * 4
        warp_bytes = _warp_bytes(form)
        warps = next(warps for warps in DOWN_WARPS if warps * warp_bytes + products <= MOST_SHARED_BYTES)
        out = x.new_empty(rows, hidden)
        arguments = ExpertDownArguments(
            x=self._aligned("x", x, self.dtype),
            **self._matrix(form, weight, scale, hidden, intermediate),
            weights=routes.weights.data_ptr(),
            slots=routes.slots.data_ptr(),
            starts=routes.starts.data_ptr(),
            pairs=routes.pairs.data_ptr(),
            out=out.data_ptr(),
            rows=rows,
            chosen=chosen,
            slot_count=routes.slots.shape[0],
            warp_bytes=warp_bytes,
            hidden=hidden,
            intermediate=intermediate,
        )
        grid, shared = (-(-hidden // DOWN_CHANNELS), 1, 1), warps * warp_bytes + products
        name = f"{self._kernel(form)}_down_{warps}"
        self._kernels.launch(name, grid, warps * WARP, arguments, shared, overlap=True)
        return out

    def combine(self, products: Tensor, weights: Tensor, places: Tensor) -> Tensor:
        """Sum the products of a prompt's rows: [rows, hidden], each row's times its `weights`, float32 [rows, chosen].

        The product of a row with the expert of a place is that of number `places` int64 [rows * chosen] in `products`
        [rows * chosen, hidden]. Sums are those of `down`.
        """
        (rows, chosen), hidden = weights.shape, products.shape[1]
        if products.shape[0] != rows * chosen or hidden % 8:
            expected = f"{rows * chosen} rows of a multiple of 8 channels"
            raise KernelError(f"products {tuple(products.shape)}: must be {expected}; give one for each pair")
        out = products.new_empty(rows, hidden)
        arguments = CombineArguments(
            products=self._aligned("products", products, self.dtype),
            weights=checked_address("weights", weights, torch.float32, self._kernels.device),
            places=checked_address("places", places, torch.int64, self._kernels.device),
            out=out.data_ptr(),
            chosen=chosen,
            hidden=hidden,
        )
        self._kernels.launch("kvseek_combine", (rows, 1, 1), COMBINE_THREADS, arguments, overlap=True)
        return out

    def _kernel(self, form: Format) -> str:
        """Beginning of the names of a format's kernels."""
        return "kvseek_expert" if form.precision == self._precision else "kvseek_asymmetric_expert"

    def _matrix(self, form: Format, weight: Tensor, scale: Tensor | None, rows: int, inputs: int) -> dict[str, int]:
        """Addresses of the experts' matrices, of so many rows each, and of their scales."""
        count = rows * self.config.num_experts
        multiple = max(8, form.group, ALIGNMENT // form.weight.itemsize)
        if (weight.shape[0], form.inputs(weight)) != (count, inputs) or inputs % multiple or rows % 8:
            expected = f"{count} rows, a multiple of 8, of {inputs} inputs, a multiple of {multiple}"
            raise KernelError(f"weight {tuple(weight.shape)}: must be {expected}; build with --device cpu")
        shape = form.scale_shape(weight) if form.group > 1 else (count,)
        if scale is not None and tuple(scale.shape) != shape:
            raise KernelError(f"scale {tuple(scale.shape)}: must be {shape}; give what the engine stores")
        addresses = {"weight": self._aligned("weight", weight, form.weight)}
        return addresses | {"scale": checked_address("scale", scale, form.scale, self._kernels.device)}

    def _aligned(self, name: str, tensor: Tensor, dtype: torch.dtype) -> int:
        return aligned_address(name, tensor, dtype, self._kernels.device, ALIGNMENT)


def _warp_bytes(form: Format) -> int:
    """Bytes of shared memory for the blocks of a warp."""
    return Shape(8, 1, 1).shared_bytes(form.scale_words)


def expert_kernels(config: EngineConfig, kernels: CudaKernels, experts: ExpertsConfig) -> ExpertKernels:
    """Make the kernels for the experts of an engine, whose products have 16 bits."""
    dtype, precision, group = getattr(torch, config.dtype), config.weight_only_precision, config.weight_group
    asymmetric = precision != INT8_ASYMMETRIC and INT8_ASYMMETRIC in config.weight_formats.values()
    return ExpertKernels(kernels, dtype, experts, precision, group, asymmetric=asymmetric)
