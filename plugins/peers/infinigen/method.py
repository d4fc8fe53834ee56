"""InfiniGen: products over the few channels that matter, after a rotation that gathers queries in few channels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvseek.core.errors import require
from kvseek.core.index_context import IndexContext
from kvseek.plugins.peers.base import DenseFirst, KeyedIndex, Region, all_queries, peer_traits
from kvseek.plugins.ranking import best_positions, softmax_mean

PAPER = {"top_k": 1024, "partial": 0.2, "dense_layers": 1}


@dataclass(frozen=True)
class Config(DenseFirst):
    """How many rows are kept, and by how much of the keys.

    Attributes
    ----------
    partial : float
        Share of the turned channels that queries, and as many that keys, are loudest in; products count these alone.
    """

    top_k: int = 1024
    partial: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.partial <= 1, "partial", self.partial, "in (0, 1]", "0.2 is the default")


class PartialIndex(KeyedIndex):
    """Keeps a projection, float32 [slots, G, D, D]: turn, leave out channels, turn back."""

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        shape = (context.extents.slots, context.num_kv_heads, context.head_dim, context.head_dim)
        self.projections = torch.zeros(shape, device=context.device)

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """See Index.build. The right singular vectors of the queries are the rotation."""
        super().build(slot, keys, queries)
        if self.dense:
            return
        n, dim = keys.shape[1:]
        if n < dim:  # such a prompt leaves directions undetermined: all channels count
            self.projections[slot] = torch.eye(dim, device=keys.device)
            return
        queries = queries[:, -n:]  # as many as are known of every prompt: Traits.last_queries
        grouped = queries.double().reshape(keys.shape[0], -1, dim)
        turned = torch.linalg.eigh(grouped.transpose(1, 2) @ grouped).eigenvectors  # [G, D, D], a column each
        count = max(1, int(self.config.partial * dim))
        chosen = torch.zeros_like(turned[:, :1])
        for vectors in (grouped, keys.double()):
            loudest = best_positions((vectors @ turned).abs().sum(dim=1), count)
            chosen.scatter_(2, loudest[:, None], 1.0)
        self.projections[slot] = ((turned * chosen) @ turned.transpose(1, 2)).float()

    def values(self, queries: Tensor, region: Region) -> Tensor:
        """Rank by the mean softmax of the partial products."""
        partial = queries @ self.projections.index_select(0, region.slot)[0]
        scores = partial @ self.keys(region).transpose(1, 2)
        return softmax_mean(scores.masked_fill(~region.valid, -torch.inf), self.context.scaling)


traits = partial(peer_traits, prefix_reuse="copies", last_queries=all_queries)
create = PartialIndex
