"""What a decode step of ParisKV moves (ParisKV paper, section 4)."""

from __future__ import annotations

from kvseek.core.config import ModelConfig
from kvseek.plugins.measurements.costs import SelectionCosts

from .codebook import padded_dim
from .config import Config

WEIGHT_BYTES = 2  # float16, one a block
KERNELS = 4  # vote, scan, rerank, top


def costs(config: Config, model: ModelConfig, length: int, itemsize: int) -> SelectionCosts:
    """An id byte of each block of every key; codes and weights of the candidates; top_k rows."""
    dim = padded_dim(model.head_dim)
    blocks = dim // config.block_size
    candidates = config.candidates(length)
    return SelectionCosts(
        rows=min(length, config.top_k),
        index_bytes=length * blocks,
        rerank_bytes=candidates * (dim // 2 + WEIGHT_BYTES * blocks),
        kernels=KERNELS,
    )
