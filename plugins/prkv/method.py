"""PRKV for the engine."""

from __future__ import annotations

from functools import partial

from kvseek.core.index_context import IndexContext
from kvseek.plugins.contract import Index, Traits
from kvseek.plugins.ranking import rotation_codebook

from .config import Config
from .device import CudaIndex, cuda_macros
from .native import NativeIndex
from .reference import ReferenceIndex
from .summaries import ROTATION_SEED


def traits(config: Config) -> Traits:
    """Return the method's traits: the steps whose rows stay on the device, the signs of the codes' rotation, kernels' macros."""
    coded = config.page_score == "codes"
    return Traits(
        kept_steps=config.cache_steps,
        last_queries=lambda tokens: config.window_queries,
        codebooks=partial(rotation_codebook, ROTATION_SEED if coded else None),
        cuda_macros=partial(cuda_macros, config),
    )


def create(context: IndexContext) -> Index:
    """Make the index of one layer: for the GPU, on compiled code of the CPU, which ranks by codes alone, or the reference."""
    if context.cuda is not None:
        return CudaIndex(context)
    compiled = context.library is not None and context.config.page_score == "codes"
    return NativeIndex(context) if compiled else ReferenceIndex(context)
