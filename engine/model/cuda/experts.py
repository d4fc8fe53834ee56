"""Mixtures of experts on a GPU: kernels for decode steps, a library's grouped products for prompts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvseek.engine.model.experts import Experts, Mark, Parts, SiluMul, route
from kvseek.kernels.cuda.layer.experts import ExpertKernels

GROUPING = (9, 10)  # compute capabilities, without the minor one, for which PyTorch has a kernel


def multiplies_groups(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether PyTorch multiplies groups of rows by a kernel; else it multiplies one by one, in whatever order of sums."""
    return dtype is torch.bfloat16 and torch.cuda.get_device_capability(weight.device)[0] in GROUPING


class KernelExperts:
    """The experts of a layer on a GPU.

    A decode step reads the weights of the experts that its rows have chosen. A prompt's rows are ordered by expert, for which
    PyTorch's grouped product multiplies each expert's rows with its matrix; nothing waits for the device. Weights of 8 or 4 bits
    are written out for it, all of a layer's.

    Parameters
    ----------
    gate_up, down : tuple of Tensor
        Weights and scales as ExpertKernels' methods take them.
    dequantise : callable
        That of ProductKernels.
    looped : Experts, optional
        Reads prompts instead, where `multiplies_groups` is not.
    """

    def __init__(
        self,
        kernels: ExpertKernels,
        gate_up: Parts,
        down: Parts,
        dequantise: Callable[[Tensor, Tensor], Tensor],
        looped: Experts | None = None,
    ) -> None:
        self._kernels, self._gate_up, self._down, self._dequantise = kernels, gate_up, down, dequantise
        self._looped = looped

    def __call__(self, x: Tensor, logits: Tensor, silu_mul: SiluMul, mark: Mark, *, prompt: bool = False) -> Tensor:
        """See Experts of engine/model/experts.py."""
        if prompt and self._looped is not None:
            return self._looped(x, logits, silu_mul, mark, prompt=True)
        if prompt:
            return self._of_prompt(x, logits, silu_mul)
        most = self._kernels.most_rows
        if x.shape[0] > most:  # as happens with many experts a row; no row depends on others
            parts = zip(torch.split(x, most), torch.split(logits, most), strict=True)
            return torch.cat([self(rows, own, silu_mul, mark) for rows, own in parts])
        routes = self._kernels.route(logits)
        activated = self._kernels.gate_up(x, *self._gate_up, routes)
        mark("gate_up")
        out = self._kernels.down(activated, *self._down, routes)
        mark("down")
        return out

    def _of_prompt(self, x: Tensor, logits: Tensor, silu_mul: SiluMul) -> Tensor:
        config = self._kernels.config
        weights, chosen = route(logits, config)
        ordered, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(config.num_experts, device=x.device)
        ends = torch.searchsorted(ordered, numbers, right=True).int()
        activated = silu_mul(self._grouped(x[order // config.num_experts_per_tok], self._gate_up, ends))
        places = torch.empty_like(order)
        places[order] = torch.arange(order.shape[0], device=x.device)
        return self._kernels.combine(self._grouped(activated, self._down, ends), weights, places)

    def _grouped(self, x: Tensor, parts: Parts, ends: Tensor) -> Tensor:
        """Multiply rows up to ends[e] of x, from those of the expert before on, with the matrix of expert e."""
        weight = parts[0] if parts[1] is None else self._dequantise(parts[0], parts[1])
        each = weight.view(self._kernels.config.num_experts, -1, weight.shape[1])
        return torch._grouped_mm(x, each.transpose(1, 2), offs=ends)
