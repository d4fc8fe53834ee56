"""CTkvr for the engine."""

from __future__ import annotations

from functools import partial

from kvseek.core.index_context import IndexContext
from kvseek.plugins.contract import Index, Traits
from kvseek.plugins.ranking import rotation_codebook

from .config import ROTATION_SEED, Config
from .device import CudaIndex, cuda_macros
from .native import NativeIndex
from .reference import ReferenceIndex

__all__ = ["create", "traits"]


def traits(config: Config) -> Traits:
    """Return the method's traits: with execution "cpu" host cores attend to rows in host memory; codes need a rotation."""
    on_host = config.execution == "cpu"
    return Traits(
        cpu_library_on_gpu=on_host,
        reports_rows=not on_host,
        kept_steps=0 if on_host else 1,
        prefix_reuse="copies" if config.bits else "rows",  # `build` writes codes to extents
        last_queries=config.most_prompt_centroids,
        codebooks=partial(rotation_codebook, ROTATION_SEED if config.bits else None),
        cuda_macros=partial(cuda_macros, config),
    )


def create(context: IndexContext) -> Index:
    """Make the index of one layer: the index for the engine's kernels, or the reference without kernels."""
    if context.cuda is not None:
        return CudaIndex(context)
    return ReferenceIndex(context) if context.library is None else NativeIndex(context)
