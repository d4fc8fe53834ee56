"""Costs of a CTkvr decode step on a GPU, for plugins/measurements.py.

Stages at which CTkvr loses rows: no list holds them, no probed list holds them, or the exact ranking leaves them out.
"""

from __future__ import annotations

import math

from torch import Tensor

from kvseek.core.config import ModelConfig
from kvseek.kernels.reference.codes.store import code_bytes
from kvseek.plugins.contract import Index
from kvseek.plugins.ctkvr.config import MOST_CENTROIDS, Config
from kvseek.plugins.ctkvr.reference import ReferenceIndex
from kvseek.plugins.measurements import SelectionCosts, Stage, Stages, by_place, everything, require_index

OFFSET_BYTES = 4  # a centroid's product with the mean, per query head (centroids.py)
DEDUPLICATION = 0.5  # share of the probed places that are distinct: section 3.1.2, footnote: "0.5 or less"


def costs(config: Config, model: ModelConfig, length: int, itemsize: int) -> SelectionCosts:
    """Compute the costs for a region of `length` prompt tokens; recalled tokens that no list holds are not counted."""
    if length <= config.top_k:
        return SelectionCosts(rows=length)
    centroids = config.prompt_centroids(length, MOST_CENTROIDS)
    listed = min(config.probes, centroids) * config.list_width(length)
    recalled = min(length, max(config.top_k, math.ceil(DEDUPLICATION * listed)))
    return SelectionCosts(
        rows=config.top_k,
        index_bytes=centroids * model.group_size * (model.head_dim * itemsize + OFFSET_BYTES),
        rerank_bytes=4 * listed + (recalled * code_bytes(model.head_dim, config.bits) if config.bits else 0),
        reranked_keys=0 if config.bits else recalled,
        host_cores=config.execution == "cpu",
    )


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
