"""PRKV for the engine."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from kvseek.plugins.codes.rotation import padded_dim, rotation_signs
from kvseek.plugins.contract import Index, IndexContext, Traits

from .config import Config
from .device import CudaIndex, cuda_macros
from .reference import ReferenceIndex
from .summaries import ROTATION_SEED


def traits(config: Config) -> Traits:
    """Return the method's traits: the steps whose rows stay on the device, the signs of the codes' rotation, kernels' macros."""

    def codebooks(head_dim: int) -> dict[str, Tensor]:
        signs = rotation_signs(ROTATION_SEED, padded_dim(head_dim))
        return {"signs": signs} if config.page_score == "codes" else {}

    return Traits(
        kept_steps=config.cache_steps,
        reuse_devices=("cpu",),  # kernels exchange rows without noting where they were
        last_queries=lambda tokens: config.window_queries,
        codebooks=codebooks,
        cuda_macros=partial(cuda_macros, config),
    )


def create(context: IndexContext) -> Index:
    """Make the index of one layer: the index for the GPU's kernels if the engine has them, else the reference."""
    return ReferenceIndex(context) if context.cuda is None else CudaIndex(context)
