"""Compiled CPU kernels at an instruction level that is not the processor's best."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from kvseek.core.cpu_library import CpuLibrary


@contextmanager
def limited(library: CpuLibrary, level: int | None) -> Iterator[None]:
    """Run the kernels at a level of kernels/cpu/level.cpp, or at the processor's best if that is lower. None: the best."""
    limit = library.function("kvseek_limit_level", ctypes.c_void_p)
    limit(None if level is None else ctypes.byref(ctypes.c_int(level)))
    try:
        yield
    finally:
        limit(None)
