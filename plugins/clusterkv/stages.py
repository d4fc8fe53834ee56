"""Stages at which ClusterKV loses rows: whole clusters fill the budget, a cluster ranks too low, or codes rank a row too low."""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.plugins.contract import Index
from kvseek.plugins.measurements.stages import Stage, Stages, by_place, everything, require_index, stored_keys
from kvseek.plugins.ranking import softmax_mean

from .reference import ReferenceIndex


def stages(index: Index, query: Tensor, slot: int) -> Stages:
    """Find the stages of a query [H, D]: `clusters` keeps the best clusters if each is ranked by its best key; `centroids`.

    In the stage `clusters`, a cluster's score for a lane is the largest score of its keys. These scores are reduced, and the
    last cluster is cut, as `select` does it with the scores of centroids. A dense layer keeps everything. With codes, both
    stages keep the rows that the codes choose from, and `codes` is the last one.
    """
    clusterkv = require_index(index, ReferenceIndex)
    config = clusterkv.config
    kv_heads, n = clusterkv.context.num_kv_heads, clusterkv.context.lengths[slot]
    if clusterkv.dense:
        kept = listed = everything(clusterkv, slot)
    else:
        queries = query.view(kv_heads, -1, query.shape[-1])
        best = best_scores(clusterkv, queries.float(), slot)
        values = softmax_mean(best, clusterkv.context.scaling)
        kept = by_place(clusterkv.rows_of_best(values, slot, n, config.rows_of_clusters), n)
        listed = by_place(clusterkv.candidates(queries, slot, n), n)
    clusters = Stage("clusters", kept, ideal=True)
    if not config.rerank_bits:
        return Stages((clusters,), last="centroids")
    return Stages((clusters, Stage("centroids", listed)), last="codes")


def best_scores(index: ReferenceIndex, lanes: Tensor, slot: int) -> Tensor:
    """Find the largest q·k in each cluster: lanes [G, lanes, D] to [G, lanes, clusters]; -inf for a cluster without keys."""
    n = index.context.lengths[slot]
    scores = lanes @ stored_keys(index, slot).transpose(1, 2)
    sorted_places = index.context.extents.read(index.places, slot, n).long()
    ends = index.read_clusters(index.sizes, slot).long().cumsum(dim=-1)
    entries = torch.arange(n, device=ends.device).expand(ends.shape[0], -1).contiguous()
    cluster = torch.searchsorted(ends, entries, right=True)
    best = scores.new_full((*scores.shape[:2], ends.shape[-1]), -torch.inf)
    by_cluster = scores.gather(-1, sorted_places[:, None].expand_as(scores))
    return best.scatter_reduce_(-1, cluster[:, None].expand_as(scores), by_cluster, "amax")
