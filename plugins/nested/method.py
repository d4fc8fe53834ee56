"""The nested method for the engine."""

from __future__ import annotations

from functools import partial

from kvseek.core.index_context import IndexContext
from kvseek.plugins.contract import Index, Traits
from kvseek.plugins.ranking import rotation_codebook

from .config import Config
from .device import CudaIndex, cuda_macros
from .native import NativeIndex
from .reference import ReferenceIndex

__all__ = ["create", "traits"]


def traits(config: Config) -> Traits:
    """Return the method's traits: the rotation's signs are all that codes need."""
    return Traits(
        prefix_reuse="entries",
        codebooks=partial(rotation_codebook, config.rotation_seed),
        cuda_macros=cuda_macros,
    )


def create(context: IndexContext) -> Index:
    """Make the index of one layer: for the GPU, on compiled code of the CPU, or the reference."""
    if context.cuda is not None:
        return CudaIndex(context)
    return ReferenceIndex(context) if context.library is None else NativeIndex(context)
