"""A fixture that tests of several methods' compiled CPU kernels use."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from kvseek.builder.compile.cpu import instruction_levels
from kvseek.core.cpu_library import CpuLibrary

EXTENDED = 5  # level 4 and the instructions beyond it that kernels look for when they run (plugins/shared/level.cpp)
LEVELS = (*instruction_levels(), EXTENDED) if 4 in instruction_levels() else instruction_levels()


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, library: CpuLibrary) -> Iterator[int]:
    """Run the kernels at one instruction level, or at the processor's best if that is lower."""
    limit = library.function("kvseek_limit_level", ctypes.c_void_p)
    limit(ctypes.byref(ctypes.c_int(request.param)))
    yield request.param
    limit(ctypes.byref(ctypes.c_int(EXTENDED)))
