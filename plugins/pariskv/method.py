"""ParisKV for the engine."""

from __future__ import annotations

from functools import partial

from kvseek.plugins.contract import Traits
from kvseek.plugins.ranking import index_by_device

from . import codebook
from .config import Config
from .device import CudaIndex, cuda_macros
from .native import NativeIndex
from .reference import ReferenceIndex


def traits(config: Config) -> Traits:
    """Return the method's traits: codebooks that need no data, and macros that compile kernels for one number of lanes."""
    return Traits(
        prefix_reuse="entries",
        verifies_drafts=True,
        codebooks=partial(codebook.build_codebooks, config),
        cuda_macros=partial(cuda_macros, config),
        rounded_rows=True,
    )


create = index_by_device(CudaIndex, NativeIndex, ReferenceIndex)
