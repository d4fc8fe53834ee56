"""PRKV for the engine."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from kvseek.core.index_context import IndexContext
from kvseek.kernels.cpu.codes.store import LIMITS
from kvseek.kernels.reference.codes.rotation import padded_dim, rotation_signs
from kvseek.plugins.contract import Index, Traits

from .config import Config
from .device import CudaIndex, cuda_macros
from .native import NativeIndex
from .reference import ReferenceIndex
from .summaries import ROTATION_SEED


def traits(config: Config) -> Traits:
    """Return the method's traits: the steps whose rows stay on the device, the signs of the codes' rotation, kernels' macros."""

    def codebooks(head_dim: int) -> dict[str, Tensor]:
        signs = rotation_signs(ROTATION_SEED, padded_dim(head_dim))
        return {"signs": signs} if config.page_score == "codes" else {}

    return Traits(
        kept_steps=config.cache_steps,
        last_queries=lambda tokens: config.window_queries,
        codebooks=codebooks,
        cpu_limits=LIMITS if config.page_score == "codes" else None,
        cuda_macros=partial(cuda_macros, config),
    )


def create(context: IndexContext) -> Index:
    """Make the index of one layer: for the GPU, on compiled code of the CPU, which ranks by codes alone, or the reference."""
    if context.cuda is not None:
        return CudaIndex(context)
    compiled = context.library is not None and context.config.page_score == "codes"
    return NativeIndex(context) if compiled else ReferenceIndex(context)
