"""Retrieval for the query heads that share a KV head: makes one ranking of keys from several queries.

Each query head scores by itself; its scores become softmax weights, which are averaged over the group. Averaging the queries
instead would lose the heads whose scores cancel (PRKV paper).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvseek.core.batch import Batch
from kvseek.core.selection import Selection


def select_each(queries: Tensor, batch: Batch, kv_heads: int, top_k: int, choose: Callable[..., Tensor]) -> Selection:
    """Select top_k rows for each request and KV head: queries [batch, H, D] to rows int32 [batch, G, top_k].

    A region of at most top_k rows is selected whole, and -1 fills up. Of a longer one `choose(queries [G, g, D], slot, length)`
    gives the places [G, top_k], ascending.
    """
    rows = torch.full((batch.size, kv_heads, top_k), -1, dtype=torch.int32, device=queries.device)
    for request, (slot, length) in enumerate(zip(batch.slots, batch.lengths, strict=True)):
        if length <= top_k:
            rows[request, :, :length] = torch.arange(length, dtype=torch.int32, device=queries.device)
        else:
            rows[request] = choose(queries[request].reshape(kv_heads, -1, queries.shape[-1]), slot, length)
    return Selection(rows)


def softmax_mean(scores: Tensor, scaling: float) -> Tensor:
    """Reduce the scores of a group's queries to one value a key: [G, queries, n] (q·k, unscaled) to [G, n]; higher is better.

    The softmax of each query runs over the n keys given, after multiplication by `scaling`.
    """
    return (scores * scaling).softmax(dim=-1).mean(dim=1)


def best_positions(values: Tensor, count: int) -> Tensor:
    """Find the indexes of the `count` largest of values [..., n], ties cut by lowest index: int64 [..., count], ascending."""
    order = values.argsort(dim=-1, descending=True, stable=True)
    return order[..., :count].sort(dim=-1).values
