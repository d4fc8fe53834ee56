"""Stages at which the nested method loses rows: too low a 2-bit estimate to be a candidate, or too low a 4-bit estimate."""

from __future__ import annotations

from torch import Tensor

from kvseek.plugins.contract import Index
from kvseek.plugins.measurements.stages import Stage, Stages, by_place, everything, require_index

from .reference import ReferenceIndex


def stages(index: Index, query: Tensor, slot: int) -> Stages:
    """Find the stages of a query [H, D]: the candidates of the first `scan`, and the `estimate` that chooses among them."""
    nested = require_index(index, ReferenceIndex)
    kv_heads, n = nested.context.num_kv_heads, nested.context.lengths[slot]
    if n <= nested.config.top_k:
        kept = everything(nested, slot)
    else:
        lanes = nested.lanes(query.view(kv_heads, -1, query.shape[-1]))
        kept = by_place(nested.candidates(lanes, slot, n), n)
    return Stages((Stage("scan", kept),), last="estimate")
