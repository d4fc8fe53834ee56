"""Where CTkvr loses rows: no list holds them, no probed list does, or the exact ranking of the recalled ones."""

from __future__ import annotations

from torch import Tensor

from kvseek.plugins.contract import Index
from kvseek.plugins.measurements.stages import Stage, Stages, by_place, everything, require_index

from .reference import ReferenceIndex


def stages(index: Index, query: Tensor, slot: int) -> Stages:
    """Stages of a query [H, D]: `lists` of all centroids and the recent places, lists of the nearest (`probe`), `rerank`."""
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
