"""CTkvr for the engine."""

from __future__ import annotations

from functools import partial

from kvseek.plugins.contract import Traits
from kvseek.plugins.ranking import index_by_device, rotation_codebook

from .config import ROTATION_SEED, Config
from .device import CudaIndex, cuda_macros
from .native import NativeIndex
from .reference import ReferenceIndex


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


create = index_by_device(CudaIndex, NativeIndex, ReferenceIndex)
