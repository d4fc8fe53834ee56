"""Retrieval for the query heads that share a KV head: makes one ranking of keys from several queries.

Each query head scores by itself; its scores become softmax weights, which are averaged over the group. Averaging the queries
instead would lose the heads whose scores cancel (PRKV paper).
"""

from __future__ import annotations

from torch import Tensor


def softmax_mean(scores: Tensor, scaling: float) -> Tensor:
    """Reduce the scores of a group's queries to one value a key: [G, queries, n] (q·k, unscaled) to [G, n]; higher is better.

    The softmax of each query runs over the n keys given, after multiplication by `scaling`.
    """
    return (scores * scaling).softmax(dim=-1).mean(dim=1)


def best_positions(values: Tensor, count: int) -> Tensor:
    """Find the indexes of the `count` largest of values [..., n], ties cut by lowest index: int64 [..., count], ascending."""
    order = values.argsort(dim=-1, descending=True, stable=True)
    return order[..., :count].sort(dim=-1).values
