"""Fixtures of the tests that need a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from kvseek.core.cuda import CudaKernels

MakeKernels = Callable[[str, int, int], "CudaKernels"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU."""
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def kernels() -> MakeKernels:
    """Compile the kernels of method `full` for this GPU, once per (dtype, head_dim, group_size), and load them."""
    from kvseek.builder.compile.cuda import Specialisation, cached_cubin
    from kvseek.core.cuda import CudaKernels

    major, minor = torch.cuda.get_device_capability()

    @cache
    def make(dtype: str, head_dim: int, group_size: int) -> CudaKernels:
        return CudaKernels(cached_cubin(Specialisation(dtype, head_dim, group_size, "full"), 10 * major + minor))

    return make
