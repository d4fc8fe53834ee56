"""Costs of a ParisKV decode step (ParisKV paper, section 4), for plugins/measurements.py."""

from __future__ import annotations

from kvseek.core.model_config import ModelConfig
from kvseek.kernels.reference.codes.rotation import padded_dim
from kvseek.plugins.measurements import SelectionCosts
from kvseek.plugins.pariskv.codebook import BLOCK
from kvseek.plugins.pariskv.config import Config

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
