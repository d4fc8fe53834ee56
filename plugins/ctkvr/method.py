"""CTkvr for the engine."""

from __future__ import annotations

from kvseek.plugins.contract import Index, IndexContext, Traits

from .config import Config
from .device import CudaIndex
from .native import NativeIndex
from .reference import ReferenceIndex

__all__ = ["create", "traits"]


def traits(config: Config) -> Traits:
    """On a GPU, host cores may rerank and attend."""
    return Traits(cpu_library_on_gpu=config.execution == "cpu")


def create(context: IndexContext) -> Index:
    """Make the index of one layer: for the kernels that the engine has, else the reference."""
    if context.cuda is not None:
        return CudaIndex(context)
    return ReferenceIndex(context) if context.library is None else NativeIndex(context)
