"""Calls cpu/draw.cpp, which draws tokens on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from kvseek.core.cpu_library import CpuLibrary, pointer
from kvseek.engine.schedule.sampling import Drawn, Sampler

from .rows import DRAWN_WORDS, pack_rows


class DrawArguments(ctypes.Structure):
    """Arguments of kvseek_draw, as in draw.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "rows", "drawn")),
        *((name, c_int64) for name in ("count", "vocabulary", "threads")),
    )


class NativeDraws:
    """Draws on the CPU by the compiled library; Draws of draws.py."""

    def __init__(self, library: CpuLibrary) -> None:
        self._draw = library.function("kvseek_draw", c_void_p)

    def begin(self, logits: Tensor, rows: Sequence[int], samplers: Sequence[Sampler]) -> Callable[[], list[Drawn]]:
        """See Draws."""
        packed = pack_rows(rows, samplers, logits.device)
        tokens = torch.empty((len(packed.rows), DRAWN_WORDS), dtype=torch.int32)
        arguments = DrawArguments(
            logits=pointer(logits),
            rows=pointer(packed.buffer),
            drawn=tokens.data_ptr(),
            count=len(packed.rows),
            vocabulary=logits.shape[1],
            threads=torch.get_num_threads(),
        )
        self._draw(ctypes.byref(arguments))
        drawn = packed.results(tokens, [logits[row] for row in packed.told])
        return lambda: drawn
