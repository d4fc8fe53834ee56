"""Costs of a ClusterKV decode step, for plugins/measurements.py.

Stages at which ClusterKV loses rows: whole clusters fill the budget, a cluster ranks too low, or codes rank a row too low.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.core.config import ModelConfig
from kvseek.kernels.reference.codes.store import code_bytes
from kvseek.plugins.clusterkv.config import Config
from kvseek.plugins.clusterkv.reference import ReferenceIndex
from kvseek.plugins.contract import Index
from kvseek.plugins.measurements import (
    SelectionCosts,
    Stage,
    Stages,
    by_place,
    everything,
    require_index,
    stored_keys,
)
from kvseek.plugins.ranking import softmax_mean

NUMBER = 4  # bytes of a score, a size, a start, a place
ENTRY_BYTES = 2 * NUMBER  # for each row: its place is read and written


def costs(config: Config, model: ModelConfig, length: int, itemsize: int) -> SelectionCosts:
    """Compute the costs per request, layer and KV head.

    All rows count as read from the pool; how many of them are hot shows only in a run. Generated tokens count as
    if they were clustered like a prompt's, which holds for the defaults.
    """
    listed, clusters = min(config.rows_of_clusters, length), config.prompt_clusters(length)
    lanes = model.group_size
    taken = -(-listed * clusters // length) if length else 0
    numbers = 3 if config.spread_weight else 2  # both kernels read the sizes
    ranked_bytes = code_bytes(model.head_dim, config.rerank_bits) + 2 * NUMBER * lanes + ENTRY_BYTES
    return SelectionCosts(
        rows=min(config.top_k, length),
        index_bytes=clusters * (model.head_dim * itemsize + numbers * NUMBER),
        rerank_bytes=clusters * 2 * NUMBER * lanes
        + taken * NUMBER
        + listed * (ENTRY_BYTES + (ranked_bytes if config.rerank_bits else 0)),
        dense_layers=config.dense_layers,
    )


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
