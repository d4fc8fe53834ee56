"""The kernels between products of one of several ranks on GPUs: what is added to the residual stream is summed up on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvseek.core.config import ModelConfig
from kvseek.kernels.cuda.layer.layer import LayerKernels, norm_threads
from kvseek.kernels.structs import c_struct

from .ranks import DeviceRanks
from .sums import Inboxes

if TYPE_CHECKING:
    from kvseek.core.cuda import CudaKernels

SumAddRmsNormArguments = c_struct("kernels/cuda/layer/layer.cu", "SumAddRmsNormArguments")


class RankLayerKernels(LayerKernels):
    """The kernels of one rank. `delta` of its methods is this rank's part of what is added; parameters as LayerKernels.

    Few rows, those of decode steps, are summed by the kernel that adds and normalises them, in float32, if the ranks have
    inboxes. PyTorch's kernel for such a sum waits for the other ranks twice, and the next product waits for that kernel before it
    reads any weights. More rows, and all rows where NCCL sums, are summed before.
    """

    def __init__(
        self,
        kernels: CudaKernels,
        model: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        max_batch: int,
        ranks: DeviceRanks,
    ) -> None:
        super().__init__(kernels, model, dtype, device, max_batch)
        self._ranks, self._inboxes = ranks, ranks.inboxes

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add the sum of all ranks' `delta`, unless it is None, to x [rows, hidden] in place; returns x's RMS norm × `weight`."""
        inboxes = self._inboxes
        if delta is None:
            return super().add_rms_norm(x, None, weight)
        if inboxes is None or x.shape[0] > inboxes.counts.numel():
            return super().add_rms_norm(x, self._ranks.sum(delta), weight)
        self._ranks.reporter.step()
        return self.sum_add_rms_norm(x, delta, weight, inboxes)

    def add(self, x: Tensor, delta: Tensor) -> None:
        """Add the sum of all ranks' `delta` to x [rows, hidden] in place."""
        super().add(x, self._ranks.sum(delta))

    def sum_add_rms_norm(self, x: Tensor, part: Tensor, weight: Tensor, inboxes: Inboxes) -> Tensor:
        """As `add_rms_norm`, for at most as many rows as the inboxes are for. It waits on the GPU for the other ranks."""
        out = torch.empty_like(x)
        arguments = SumAddRmsNormArguments(
            x=self._address("x", x),
            part=self._address("part", part),
            weight=self._address("weight", weight),
            out=out.data_ptr(),
            inboxes=inboxes.addresses.data_ptr(),
            counts=inboxes.counts.data_ptr(),
            stop=inboxes.stop.data_ptr(),
            hidden=x.shape[1],
            epsilon=self.model.rms_norm_eps,
            rank=inboxes.rank,
            ranks=inboxes.addresses.numel(),
            capacity=inboxes.counts.numel(),
        )
        self._launch("kvseek_sum_add_rms_norm", (x.shape[0], 1, 1), norm_threads(x.shape[1]), arguments)
        return out
