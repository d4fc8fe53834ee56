"""Launches cuda/draw/draw.cu, which draws tokens on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvseek.core.request import MAX_LOGPROBS
from kvseek.kernels.structs import c_struct

if TYPE_CHECKING:
    from kvseek.core.cuda import CudaKernels

# As in draw.cu.
THREADS = 256
MOST_BLOCKS = 64
DIGITS = 16

# Of the vocabulary for a block, about: blocks that wait for each other cost more than some tokens more
PART_TOKENS = 2048
BLOCKS_OF_MULTIPROCESSOR = 2  # that run at once on every GPU: they take a third of its shared memory or less

DrawArguments = c_struct("kernels/cuda/draw/draw.cu", "DrawArguments")


class DeviceDraw:
    """Draws tokens by one launch for all requests; a DrawKernel of engine/draws/compiled.py."""

    work_bytes: ClassVar[int] = 8 + 8 * (3 * DIGITS + MOST_BLOCKS + MAX_LOGPROBS)  # Meetings of draw.cu

    def __init__(self, kernels: CudaKernels) -> None:
        self._kernels = kernels

    def __call__(self, logits: Tensor, rows: int, work: int, drawn: int, count: int) -> None:
        """See DrawKernel; logits of the engine's dtype."""
        vocabulary = logits.shape[1]
        scores = torch.empty((count, vocabulary), device=logits.device)
        arguments = DrawArguments(
            logits=logits.data_ptr(),
            rows=rows,
            meetings=work,
            scores=scores.data_ptr(),
            drawn=drawn,
            vocabulary=vocabulary,
        )
        # All teams have to run at once, if their blocks wait for each other.
        room = BLOCKS_OF_MULTIPROCESSOR * self._kernels.multiprocessors // count
        blocks = max(1, min(MOST_BLOCKS, room, round(vocabulary / PART_TOKENS)))
        self._kernels.launch("kvseek_draw", (blocks, count, 1), THREADS, arguments, together=blocks > 1)
