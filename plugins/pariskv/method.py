"""ParisKV for the engine."""

from __future__ import annotations

from torch import Tensor

from kvseek.plugins.contract import Index, IndexContext

from . import codebook
from .config import Config
from .costs import costs
from .device import CudaIndex, cuda_defines
from .native import NativeIndex
from .reference import ReferenceIndex
from .stages import stages

__all__ = ["codebooks", "costs", "create", "cuda_defines", "stages"]


def codebooks(config: Config, head_dim: int) -> dict[str, Tensor]:
    """What the builder computes once."""
    return codebook.build_codebooks(config, head_dim)


def create(context: IndexContext) -> Index:
    """Make the index of one layer: for the kernels that the engine has, else the reference."""
    if context.cuda is not None:
        return CudaIndex(context)
    return ReferenceIndex(context) if context.library is None else NativeIndex(context)
