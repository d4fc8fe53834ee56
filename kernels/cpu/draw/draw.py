"""Calls cpu/draw/draw.cpp, which draws tokens on the CPU."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvseek.core.cpu_library import CpuLibrary, pointer
from kvseek.kernels.structs import c_struct

DrawArguments = c_struct("kernels/cpu/draw/draw.cpp", "DrawArguments")


class NativeDraw:
    """Draws tokens by the compiled library; a DrawKernel of engine/draws/compiled.py. Threads share the requests."""

    work_bytes: ClassVar[int] = 0

    def __init__(self, library: CpuLibrary) -> None:
        self._draw = library.function("kvseek_draw", DrawArguments)

    def __call__(self, logits: Tensor, rows: int, work: int, drawn: int, count: int) -> None:
        """See DrawKernel; logits float32."""
        arguments = DrawArguments(
            logits=pointer(logits),
            rows=rows,
            drawn=drawn,
            count=count,
            vocabulary=logits.shape[1],
            threads=torch.get_num_threads(),
        )
        self._draw(arguments)
