"""PRKV for the engine."""

from __future__ import annotations

from functools import partial

from kvseek.plugins.contract import Index, IndexContext, Traits

from .config import Config
from .device import CudaIndex, cuda_macros
from .reference import ReferenceIndex


def traits(config: Config) -> Traits:
    """Return the method's traits: the steps whose rows stay on the device, and the macros of its kernels."""
    return Traits(kept_steps=config.cache_steps, cuda_macros=partial(cuda_macros, config))


def create(context: IndexContext) -> Index:
    """Make the index of one layer: the index for the GPU's kernels if the engine has them, else the reference."""
    return ReferenceIndex(context) if context.cuda is None else CudaIndex(context)
