"""Retrieval for the query heads that share a KV head: makes one ranking of keys from several queries.

``mean`` averages the queries before retrieval (the ParisKV release). ``max`` and ``softmax_mean`` score each query head
by itself, take the softmax of its scaled scores, and reduce the softmax weights over the group, because averaging queries
loses the heads whose scores cancel (PRKV paper).
"""

from __future__ import annotations

from torch import Tensor

from kvseek.core.config import require

GROUP_REDUCTIONS = ("mean", "max", "softmax_mean")


def require_group_reduce(value: str) -> None:
    """Raise ConfigError unless `value`, of the field group_reduce, names a group reduction."""
    require(
        value in GROUP_REDUCTIONS, "group_reduce", value, f"one of {GROUP_REDUCTIONS}", "softmax_mean is the default"
    )


def query_lanes(queries: Tensor, group_reduce: str) -> Tensor:
    """Make the queries that retrieval scores on their own: [G, g, D] to float32 [G, lanes, D]; 1 lane with "mean", else g."""
    queries = queries.float()
    return queries.mean(dim=1, keepdim=True) if group_reduce == "mean" else queries


def reduce_scores(scores: Tensor, group_reduce: str, scaling: float) -> Tensor:
    """Reduce scores of `query_lanes` to one value a key: [G, lanes, n] (q·k, unscaled) to [G, n]; higher is better.

    The softmax of each lane runs over the n keys given, after multiplication by `scaling`.
    """
    if group_reduce == "mean":
        return scores[:, 0]
    weights = (scores * scaling).softmax(dim=-1)
    return weights.amax(dim=1) if group_reduce == "max" else weights.mean(dim=1)


def best_positions(values: Tensor, count: int) -> Tensor:
    """Find the indexes of the `count` largest of values [..., n], ties cut by lowest index: int64 [..., count], ascending."""
    order = values.argsort(dim=-1, descending=True, stable=True)
    return order[..., :count].sort(dim=-1).values
