"""The nested method for the engine."""

from __future__ import annotations

from functools import partial

from kvseek.plugins.contract import Traits
from kvseek.plugins.ranking import index_by_device, rotation_codebook

from .config import Config
from .device import CudaIndex, cuda_macros
from .native import NativeIndex
from .reference import ReferenceIndex


def traits(config: Config) -> Traits:
    """Return the method's traits: the rotation's signs are all that codes need."""
    return Traits(
        prefix_reuse="entries",
        verifies_drafts=True,
        codebooks=partial(rotation_codebook, config.rotation_seed),
        cuda_macros=cuda_macros,
        rounded_rows=True,
    )


create = index_by_device(CudaIndex, NativeIndex, ReferenceIndex)
