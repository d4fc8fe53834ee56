"""PRKV for the engine."""

from __future__ import annotations

from torch import Tensor

from kvseek.plugins.contract import Index, IndexContext

from .config import Config
from .costs import costs
from .device import CudaIndex, cuda_defines
from .reference import ReferenceIndex
from .stages import stages

__all__ = ["codebooks", "costs", "create", "cuda_defines", "stages"]


def codebooks(config: Config, head_dim: int) -> dict[str, Tensor]:
    """The builder has nothing to compute."""
    return {}


def create(context: IndexContext) -> Index:
    """Make the index of one layer: for the kernels of a GPU if the engine has them, else the reference."""
    return ReferenceIndex(context) if context.cuda is None else CudaIndex(context)
