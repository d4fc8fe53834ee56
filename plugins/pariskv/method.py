"""ParisKV for the engine."""

from __future__ import annotations

from torch import Tensor

from kvseek.plugins.base import Index, IndexContext

from . import codebook
from .config import Config
from .native import NativeIndex
from .reference import ReferenceIndex


def codebooks(config: Config, head_dim: int) -> dict[str, Tensor]:
    """What the builder computes once."""
    return codebook.build_codebooks(config, head_dim)


def create(context: IndexContext) -> Index:
    """Make the index of one layer: compiled if the engine has a library, else the reference."""
    return ReferenceIndex(context) if context.library is None else NativeIndex(context)
