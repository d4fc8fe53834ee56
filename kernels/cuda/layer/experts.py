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
from kvseek.core.weight_only import NONE
from kvseek.kernels.arguments import aligned_address, checked_address
from kvseek.kernels.structs import c_struct

from .products import ALIGNMENT, MOST_ROWS, WARP, Format, Shape

if TYPE_CHECKING:
    from kvseek.core.config import ExpertsConfig
    from kvseek.core.cuda import CudaKernels

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
    """

    def __init__(
        self,
        kernels: CudaKernels,
        dtype: torch.dtype,
        config: ExpertsConfig,
        precision: str = NONE,
        weight_group: int = WEIGHT_GROUP,
    ) -> None:
        self._kernels, self.dtype, self.config = kernels, dtype, config
        self.format = Format.of(precision, weight_group, dtype)
        self._warp_bytes = Shape(8, 1, 1).shared_bytes(self.format.scale_words)

    def route(self, logits: Tensor) -> Routes:
        """Choose the experts of rows by the router's logits [rows, experts], as `route` of engine/model/experts.py does.

        Raises KernelError if there are more than MOST_ROWS rows.
        """
        (rows, experts), chosen = logits.shape, self.config.num_experts_per_tok
        if rows > MOST_ROWS:
            raise KernelError(f"rows = {rows}: must be <= {MOST_ROWS}; read them as a prompt")
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
        out = x.new_empty(x.shape[0] * chosen, intermediate)
        arguments = ExpertGateUpArguments(
            x=self._aligned("x", x, self.dtype),
            **self._matrix(weight, scale, 2 * intermediate, hidden),
            slots=routes.slots.data_ptr(),
            starts=routes.starts.data_ptr(),
            pairs=routes.pairs.data_ptr(),
            out=out.data_ptr(),
            chosen=chosen,
            hidden=hidden,
            intermediate=intermediate,
        )
        grid = (-(-intermediate // GATE_UP_CHANNELS), routes.slots.shape[0], 1)
        shared = GATE_UP_WARPS * self._warp_bytes
        self._kernels.launch("kvseek_expert_gate_up", grid, GATE_UP_WARPS * WARP, arguments, shared, overlap=True)
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
        products = pairs * DOWN_CHANNELS * 4
        fitting = [warps for warps in DOWN_WARPS if warps * self._warp_bytes + products <= MOST_SHARED_BYTES]
        if not fitting:
            raise KernelError(
                f"rows = {rows}, of {chosen} experts each: must need less shared memory; lower max_batch_size"
            )
        out = x.new_empty(rows, hidden)
        arguments = ExpertDownArguments(
            x=self._aligned("x", x, self.dtype),
            **self._matrix(weight, scale, hidden, intermediate),
            weights=routes.weights.data_ptr(),
            slots=routes.slots.data_ptr(),
            starts=routes.starts.data_ptr(),
            pairs=routes.pairs.data_ptr(),
            out=out.data_ptr(),
            rows=rows,
            chosen=chosen,
            slot_count=routes.slots.shape[0],
            warp_bytes=self._warp_bytes,
            hidden=hidden,
            intermediate=intermediate,
        )
        warps, grid = fitting[0], (-(-hidden // DOWN_CHANNELS), 1, 1)
        shared = warps * self._warp_bytes + products
        self._kernels.launch(f"kvseek_expert_down_{warps}", grid, warps * WARP, arguments, shared, overlap=True)
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

    def _matrix(self, weight: Tensor, scale: Tensor | None, rows: int, inputs: int) -> dict[str, int]:
        """Addresses of the experts' matrices, of so many rows each, and of their scales."""
        form, count = self.format, rows * self.config.num_experts
        multiple = max(8, form.group, ALIGNMENT // form.weight.itemsize)
        if (weight.shape[0], form.inputs(weight)) != (count, inputs) or inputs % multiple or rows % 8:
            expected = f"{count} rows, a multiple of 8, of {inputs} inputs, a multiple of {multiple}"
            raise KernelError(f"weight {tuple(weight.shape)}: must be {expected}; build with --device cpu")
        shape = form.scale_shape(weight) if form.group > 1 else (count,)
        if (scale is None) != (form.precision == NONE) or (scale is not None and tuple(scale.shape) != shape):
            raise KernelError("scale: must be that of the weight, or None without one; give what the engine stores")
        addresses = {"weight": self._aligned("weight", weight, form.weight)}
        return addresses | {"scale": checked_address("scale", scale, form.scale, self._kernels.device)}

    def _aligned(self, name: str, tensor: Tensor, dtype: torch.dtype) -> int:
        return aligned_address(name, tensor, dtype, self._kernels.device, ALIGNMENT)
