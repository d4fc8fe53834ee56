"""ParisKV for the engine."""

from __future__ import annotations

from functools import partial

from kvseek.core.index_context import IndexContext
from kvseek.plugins.contract import Index, Traits

from . import codebook
from .config import Config
from .device import CudaIndex, cuda_macros
from .native import NativeIndex
from .reference import ReferenceIndex

__all__ = ["create", "traits"]


def traits(config: Config) -> Traits:
    """Return the method's traits: codebooks that need no data, and macros that compile kernels for one number of lanes."""
    return Traits(
        prefix_reuse="entries",
        codebooks=partial(codebook.build_codebooks, config),
        cuda_macros=partial(cuda_macros, config),
    )


def create(context: IndexContext) -> Index:
    """Make the index of one layer: the index for the engine's kernels, or the reference without kernels."""
    if context.cuda is not None:
        return CudaIndex(context)
    return ReferenceIndex(context) if context.library is None else NativeIndex(context)
