"""Exact top-k: score every retrieval key. The upper bound of token-level retrieval, on the ground of the competing systems."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvseek.plugins.peers.base import KeyedIndex, Region, TopK, peer_traits
from kvseek.plugins.ranking import best_positions, softmax_mean


@dataclass(frozen=True)
class Config(TopK):
    """Number of rows that are kept."""

    top_k: int = 100


class FlatIndex(KeyedIndex):
    """Ranks all keys by their products with the queries, in float32."""

    def values(self, queries: Tensor, region: Region) -> Tensor:
        """Rank by the mean softmax."""
        scores = queries @ self.keys(region).transpose(1, 2)
        return softmax_mean(scores.masked_fill(~region.valid, -torch.inf), self.context.scaling)


def exact_top_k(queries: Tensor, keys: Tensor, top_k: int, scaling: float) -> Tensor:
    """Find the best keys by exact scores: queries [G, g, D], keys [G, n, D] to indexes int64 [G, min(top_k, n)].

    The indexes ascend; of equal scores at the cut the lowest indexes are kept.
    """
    scores = queries.float() @ keys.float().transpose(1, 2)
    return best_positions(softmax_mean(scores, scaling), top_k)


traits = partial(peer_traits, verifies_drafts=True, rounded_rows=True)
create = FlatIndex
