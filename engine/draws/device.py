"""Launches cuda/draw.cu, which draws tokens on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_int32, c_void_p
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvseek.core.request import MAX_LOGPROBS
from kvseek.engine.model.graphs import HostCopy
from kvseek.engine.schedule.sampling import Drawn, Sampler

from .rows import DRAWN_WORDS, ROW_BYTES, pack_rows

if TYPE_CHECKING:
    from kvseek.core.cuda import CudaKernels

# As in draw.cu.
THREADS = 256
MOST_BLOCKS = 64
DIGITS = 16

MEETING_BYTES = 8 + 8 * (3 * DIGITS + MOST_BLOCKS + MAX_LOGPROBS)
LEAST_TOKENS = 2048  # of a block's part of the vocabulary
BLOCKS_OF_MULTIPROCESSOR = 2  # that run at once on every GPU: they take a third of its shared memory or less


class DrawArguments(ctypes.Structure):
    """Arguments of kvseek_draw, as in draw.cu."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "rows", "meetings", "scores", "drawn")),
        ("vocabulary", c_int32),
    )


class DeviceDraws:
    """Draws on a GPU by one launch for all requests; Draws of draws.py. What it returns waits for the draws alone."""

    def __init__(self, kernels: CudaKernels) -> None:
        self._kernels = kernels

    def begin(self, logits: Tensor, rows: Sequence[int], samplers: Sequence[Sampler]) -> Callable[[], list[Drawn]]:
        """See Draws."""
        packed, vocabulary = pack_rows(rows, samplers, logits.device, MEETING_BYTES), logits.shape[1]
        count = len(packed.rows)
        tokens = torch.empty((count, DRAWN_WORDS), dtype=torch.int32, device=logits.device)
        if count:
            scores = torch.empty((count, vocabulary), device=logits.device)
            arguments = DrawArguments(
                logits=logits.data_ptr(),
                rows=packed.buffer.data_ptr(),
                meetings=packed.buffer.data_ptr() + count * ROW_BYTES,
                scores=scores.data_ptr(),
                drawn=tokens.data_ptr(),
                vocabulary=vocabulary,
            )
            grid = (self._blocks(count, vocabulary), count, 1)
            self._kernels.launch("kvseek_draw", grid, THREADS, arguments, together=True)
        copies = HostCopy([tokens, *(logits[row] for row in packed.told)])

        def finish() -> list[Drawn]:
            found, *told = copies.wait()
            return packed.results(found, told)

        return finish

    def _blocks(self, requests: int, vocabulary: int) -> int:
        """Choose the blocks of a team: all teams have to run at once."""
        room = BLOCKS_OF_MULTIPROCESSOR * self._kernels.multiprocessors // requests
        return max(1, min(MOST_BLOCKS, room, -(-vocabulary // LEAST_TOKENS)))
