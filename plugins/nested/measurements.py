"""Costs of a decode step of the nested method, for plugins/measurements.py.

Stages at which the nested method loses rows: too low a 2-bit estimate to be a candidate, or too low a 4-bit estimate.
"""

from __future__ import annotations

from functools import partial

from kvseek.core.config import ModelConfig
from kvseek.kernels.reference.codes.key_codes import BITS
from kvseek.kernels.reference.codes.rotation import padded_dim
from kvseek.kernels.reference.codes.store import code_bytes, mean_bytes
from kvseek.plugins.measurements import SelectionCosts, candidate_stages
from kvseek.plugins.nested.config import Config
from kvseek.plugins.nested.reference import FIRST_BITS, ReferenceIndex


def costs(config: Config, model: ModelConfig, length: int, itemsize: int) -> SelectionCosts:
    """Compute the costs: scale, mean and 2 bits a channel of every key, all bits of the candidates, top_k rows."""
    dim = model.head_dim
    return SelectionCosts(
        rows=min(length, config.top_k),
        index_bytes=length * (code_bytes(dim, FIRST_BITS) + mean_bytes(padded_dim(dim))),
        rerank_bytes=config.candidate_count(length) * code_bytes(dim, BITS),
    )


stages = partial(candidate_stages, ReferenceIndex, "scan")
