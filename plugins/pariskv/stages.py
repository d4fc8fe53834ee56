"""Stages at which ParisKV loses rows: too few votes to become a candidate, or a 4-bit estimate that is too low."""

from __future__ import annotations

from torch import Tensor

from kvseek.plugins.contract import Index
from kvseek.plugins.measurements.stages import Stage, Stages, by_place, everything, require_index

from .reference import ReferenceIndex


def stages(index: Index, query: Tensor, slot: int) -> Stages:
    """Find the stages of a query [H, D]: the candidates of the collision `votes`, and the `estimate` that reranks them."""
    pariskv = require_index(index, ReferenceIndex)
    kv_heads, n = pariskv.context.num_kv_heads, pariskv.context.lengths[slot]
    if n <= pariskv.config.top_k:
        kept = everything(pariskv, slot)
    else:
        lanes = pariskv.lanes(query.view(kv_heads, -1, query.shape[-1]))
        kept = by_place(pariskv.candidates(lanes, slot, n), n)
    return Stages((Stage("votes", kept),), last="estimate")
