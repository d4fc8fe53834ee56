"""ClusterKV for the engine."""

from __future__ import annotations

from functools import partial

from kvseek.plugins.contract import Traits
from kvseek.plugins.ranking import index_by_device, rotation_codebook

from .config import GENERATED_TOKENS, Config
from .device import CudaIndex, cuda_macros
from .native import NativeIndex
from .reference import ReferenceIndex


def traits(config: Config) -> Traits:
    """Return the method's traits; the first 16 tokens are never clustered, so they are the sink (paper, section III-B)."""
    return Traits(
        device_layers=config.dense_layers,  # `select` gives None there
        kept_steps=config.cache_steps,
        rounded_rows=True,
        verifies_drafts=True,
        cache_defaults={"update": GENERATED_TOKENS, "sink": 16},
        codebooks=partial(rotation_codebook, config.seed if config.rerank_bits else None),
        cuda_macros=partial(cuda_macros, config),
    )


create = index_by_device(CudaIndex, NativeIndex, ReferenceIndex)
