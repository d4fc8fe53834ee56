"""CTkvr for the engine."""

from __future__ import annotations

from kvseek.plugins.contract import Index, IndexContext, Traits

from .config import Config
from .device import CudaIndex
from .native import LIMITS, NativeIndex
from .reference import ReferenceIndex

__all__ = ["create", "traits"]


def traits(config: Config) -> Traits:
    """Return the method's traits: with execution "cpu" host cores attend to rows in host memory."""
    on_host = config.execution == "cpu"
    return Traits(cpu_library_on_gpu=on_host, cpu_limits=LIMITS, kept_steps=0 if on_host else 1)


def create(context: IndexContext) -> Index:
    """Make the index of one layer: the index for the engine's kernels, or the reference without kernels."""
    if context.cuda is not None:
        return CudaIndex(context)
    return ReferenceIndex(context) if context.library is None else NativeIndex(context)
