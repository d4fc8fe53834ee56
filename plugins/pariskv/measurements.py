"""Costs of a ParisKV decode step (ParisKV paper, section 4), for plugins/measurements.py.

Stages at which ParisKV loses rows: too few votes to become a candidate, or a 4-bit estimate that is too low.
"""

from __future__ import annotations

from functools import partial

from kvseek.core.config import ModelConfig
from kvseek.kernels.reference.codes.rotation import padded_dim
from kvseek.plugins.measurements import SelectionCosts, candidate_stages
from kvseek.plugins.pariskv.codebook import BLOCK
from kvseek.plugins.pariskv.config import Config
from kvseek.plugins.pariskv.reference import ReferenceIndex

WEIGHT_BYTES = 2  # bytes of a block's weight, a float16


def costs(config: Config, model: ModelConfig, length: int, itemsize: int) -> SelectionCosts:
    """Compute the costs: an id byte of each block of every key, codes and weights of the candidates, and top_k rows."""
    dim = padded_dim(model.head_dim)
    blocks = dim // BLOCK
    candidates = config.candidates(length)
    return SelectionCosts(
        rows=min(length, config.top_k),
        index_bytes=length * blocks,
        rerank_bytes=candidates * (dim // 2 + WEIGHT_BYTES * blocks),
    )


stages = partial(candidate_stages, ReferenceIndex, "votes")
