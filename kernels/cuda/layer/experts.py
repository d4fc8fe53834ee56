"""Launches the kernels of a decode step's mixtures of experts: routing.cu, and experts.cuh, which products.cu includes.

Functions launch on the current stream, can be captured in a CUDA graph and read nothing back. Tensors are contiguous and on
the kernels' GPU. The kernels are compiled for models with experts alone, whose numbers have 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvseek.core.errors import KernelError
from kvseek.kernels.arguments import checked_address
from kvseek.kernels.structs import c_struct

from .products import ALIGNMENT, MOST_ROWS, WARP

if TYPE_CHECKING:
    from kvseek.core.config import ExpertsConfig
    from kvseek.core.cuda import CudaKernels

# As in routing.cu and experts.cuh.
GATE_UP_WARPS, GATE_UP_CHANNELS = 4, 8
DOWN_WARPS, DOWN_CHANNELS = (16, 8), 16
ROUTE_WARPS, COMBINE_THREADS = 32, 256
BLOCK_BYTES = 4096  # of a warp's two blocks of weights
FEW_BYTES = 32 << 10  # of products, beside which there is room for the most warps on every architecture

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
        bfloat16 or float16: of x, weights and results.
    """

    def __init__(self, kernels: CudaKernels, dtype: torch.dtype, config: ExpertsConfig) -> None:
        self._kernels, self.dtype, self.config = kernels, dtype, config

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
            logits=self._address("logits", logits),
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

    def gate_up(self, x: Tensor, weight: Tensor, routes: Routes) -> Tensor:
        """Compute silu(gate) * up of x [rows, hidden] and each row's experts: [rows * chosen, I], by pair.

        `weight` [experts * 2 I, hidden] has the gates of an expert before its ups. Raises KernelError as `down`.
        """
        hidden, chosen = x.shape[1], self.config.num_experts_per_tok
        intermediate = weight.shape[0] // (2 * self.config.num_experts)
        self._check(weight, (2 * intermediate * self.config.num_experts, hidden))
        out = x.new_empty(x.shape[0] * chosen, intermediate)
        arguments = ExpertGateUpArguments(
            x=self._aligned("x", x),
            weight=self._aligned("weight", weight),
            slots=routes.slots.data_ptr(),
            starts=routes.starts.data_ptr(),
            pairs=routes.pairs.data_ptr(),
            out=out.data_ptr(),
            chosen=chosen,
            hidden=hidden,
            intermediate=intermediate,
        )
        grid = (-(-intermediate // GATE_UP_CHANNELS), routes.slots.shape[0], 1)
        shared = GATE_UP_WARPS * BLOCK_BYTES
        self._kernels.launch("kvseek_expert_gate_up", grid, GATE_UP_WARPS * WARP, arguments, shared, overlap=True)
        return out

    def down(self, x: Tensor, weight: Tensor, routes: Routes) -> Tensor:
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
        self._check(weight, (hidden * self.config.num_experts, intermediate))
        out = x.new_empty(rows, hidden)
        arguments = ExpertDownArguments(
            x=self._aligned("x", x),
            weight=self._aligned("weight", weight),
            weights=routes.weights.data_ptr(),
            slots=routes.slots.data_ptr(),
            starts=routes.starts.data_ptr(),
            pairs=routes.pairs.data_ptr(),
            out=out.data_ptr(),
            rows=rows,
            chosen=chosen,
            slot_count=routes.slots.shape[0],
            hidden=hidden,
            intermediate=intermediate,
        )
        products = pairs * DOWN_CHANNELS * 4
        warps = DOWN_WARPS[products > FEW_BYTES]
        shared, grid = warps * BLOCK_BYTES + products, (-(-hidden // DOWN_CHANNELS), 1, 1)
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
            products=self._aligned("products", products),
            weights=checked_address("weights", weights, torch.float32, self._kernels.device),
            places=checked_address("places", places, torch.int64, self._kernels.device),
            out=out.data_ptr(),
            chosen=chosen,
            hidden=hidden,
        )
        self._kernels.launch("kvseek_combine", (rows, 1, 1), COMBINE_THREADS, arguments, overlap=True)
        return out

    def _check(self, weight: Tensor, shape: tuple[int, int]) -> None:
        if tuple(weight.shape) != shape or shape[1] % 8 or shape[0] % 8:
            raise KernelError(f"weight {tuple(weight.shape)}: must be {shape}, multiples of 8; build with --device cpu")

    def _address(self, name: str, tensor: Tensor) -> int:
        return checked_address(name, tensor, self.dtype, self._kernels.device)

    def _aligned(self, name: str, tensor: Tensor) -> int:
        address = self._address(name, tensor)
        if address % ALIGNMENT:
            raise KernelError(
                f"{name}: address {address:#x}: must be a multiple of {ALIGNMENT}; copy it before the launch"
            )
        return address
