"""Fixtures of the tests that need a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tests.conftest import BuildEngine

from kvseek.bench.methods import method_kernels
from kvseek.plugins.registry import get_method

if TYPE_CHECKING:
    from kvseek.core.cuda import CudaKernels

MakeKernels = Callable[..., "CudaKernels"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU."""
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def kernels() -> MakeKernels:
    """Compile the kernels of method `full` for this GPU, once per (dtype, head_dim, group_size, rounded_rows), and load them."""
    return cache(partial(method_kernels, "full", get_method("full").configure({})))


@pytest.fixture(scope="session")
def on_gpu(build_engine: BuildEngine) -> BuildEngine:
    """Build an engine for this GPU."""
    major, minor = torch.cuda.get_device_capability()

    def make(model: Path, method: str, *flags: str) -> Path:
        return build_engine(model, method, "--device", "cuda", "--cuda_archs", f"{major}{minor}", *flags)

    return make
