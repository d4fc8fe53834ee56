"""A fixture that tests of several methods' compiled CPU kernels use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.instruction_levels import limited

from kvseek.builder.compile.cpu import instruction_levels
from kvseek.core.cpu_library import CpuLibrary


@pytest.fixture(params=instruction_levels())
def level(request: pytest.FixtureRequest, library: CpuLibrary) -> Iterator[int]:
    """Run the kernels at one instruction level, or at the processor's best if that is lower."""
    with limited(library, request.param):
        yield request.param
