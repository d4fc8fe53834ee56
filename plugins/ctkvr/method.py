"""CTkvr for the engine."""

from __future__ import annotations

from torch import Tensor

from kvseek.plugins.contract import Index, IndexContext

from .config import Config
from .costs import costs
from .device import CudaIndex
from .native import NativeIndex
from .reference import ReferenceIndex
from .stages import stages

__all__ = ["codebooks", "costs", "create", "needs_cpu_library", "stages"]


def codebooks(config: Config, head_dim: int) -> dict[str, Tensor]:
    """The builder has nothing to compute."""
    return {}


def needs_cpu_library(config: Config) -> bool:
    """Whether the index for the GPU calls compiled code of the CPU: to rerank and attend on host cores."""
    return config.execution == "cpu"


def create(context: IndexContext) -> Index:
    """Make the index of one layer: for the kernels that the engine has, else the reference."""
    if context.cuda is not None:
        return CudaIndex(context)
    return ReferenceIndex(context) if context.library is None else NativeIndex(context)
