"""Stages at which CTkvr loses rows: no list holds them, no probed list holds them, or the exact ranking leaves them out."""

from __future__ import annotations

from torch import Tensor

from kvseek.plugins.contract import Index
from kvseek.plugins.measurements.stages import Stage, Stages, by_place, everything, require_index

from .reference import ReferenceIndex


def stages(index: Index, query: Tensor, slot: int) -> Stages:
    """Find the stages of a query [H, D].

    `lists` keeps all places that are recent or in a list of any centroid, `probe` those that are recent or in a probed list;
    `rerank` ranks them.
    """
    ctkvr = require_index(index, ReferenceIndex)
    n = ctkvr.context.lengths[slot]
    if n <= ctkvr.config.top_k:
        listed = recalled = everything(ctkvr, slot)
    else:
        valid = min(ctkvr.written[slot], ctkvr.ring)
        listed = by_place(ctkvr.lists[slot, :, :valid].flatten(1), n)
        listed[:, ctkvr.first_recent(slot) :] = True
        recalled = by_place(ctkvr.recall(query, slot), n)
    return Stages((Stage("lists", listed), Stage("probe", recalled)), last="rerank")
