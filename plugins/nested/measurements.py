"""Costs of a decode step of the nested method, for plugins/measurements.py."""

from __future__ import annotations

from kvseek.core.model_config import ModelConfig
from kvseek.kernels.reference.codes.key_codes import BITS
from kvseek.kernels.reference.codes.rotation import padded_dim
from kvseek.kernels.reference.codes.store import code_bytes, mean_bytes
from kvseek.plugins.measurements import SelectionCosts
from kvseek.plugins.nested.config import Config
from kvseek.plugins.nested.reference import FIRST_BITS


def costs(config: Config, model: ModelConfig, length: int, itemsize: int) -> SelectionCosts:
    """Compute the costs: scale, mean and 2 bits a channel of every key, all bits of the candidates, top_k rows."""
    dim = model.head_dim
    return SelectionCosts(
        rows=min(length, config.top_k),
        index_bytes=length * (code_bytes(dim, FIRST_BITS) + mean_bytes(padded_dim(dim))),
        rerank_bytes=config.candidate_count(length) * code_bytes(dim, BITS),
    )
