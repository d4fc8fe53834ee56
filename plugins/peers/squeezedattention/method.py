"""SqueezedAttention: the rows of the clusters whose mean key scores best."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.errors import require
from kvseek.core.index_context import IndexContext
from kvseek.plugins.peers.base import CodedPeer, Region, TopK, kmeans, means_of, nearest, peer_traits

PAPER = {"top_k": 1024, "cluster_share": 0.05}  # its budgets are shares of a prompt, 10 % to 30 %
FAR = 100.0  # of a channel; directions have the length 1


@dataclass(frozen=True)
class Config(TopK):
    """How many rows are kept, and in how many clusters they are.

    Attributes
    ----------
    cluster_share : float
        Clusters for each row of a prompt.
    iterations : int
        Of k-means over a prompt's keys.
    """

    top_k: int = 1024
    cluster_share: float = 0.05
    iterations: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.cluster_share <= 1, "cluster_share", self.cluster_share, "in (0, 1]", "0.05 is the default")
        require(self.iterations >= 0, "iterations", self.iterations, ">= 0", "10 is the default")


class SqueezedIndex(CodedPeer):
    """Keeps each row's cluster, int32, and the slots' clusters [2, slots, G, clusters, D]: mean directions, mean keys."""

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        self.codes = self.by_row(1, torch.int32)
        self.most = max(1, round(self.config.cluster_share * context.extents.max_extents * EXTENT_TOKENS))
        shape = (context.extents.slots, context.num_kv_heads, self.most, context.head_dim)
        self.directions, self.means = (torch.zeros(shape, device=context.device) for _ in range(2))

    def learn(self, slot: int, keys: Tensor) -> None:
        """Cluster the keys by their directions. Clusters that a slot does not need are far from every direction."""
        count = min(self.most, max(1, round(self.config.cluster_share * keys.shape[1])))
        self.directions[slot] = FAR
        self.directions[slot, :, :count] = kmeans(normalize(keys, dim=-1), count, self.config.iterations)
        labels = self.encode(slot, keys)[..., 0].long()
        self.means[slot] = means_of(keys, labels, torch.zeros_like(self.means[slot]))

    def encode(self, slot: int, keys: Tensor) -> Tensor:
        """Find the nearest directions."""
        return nearest(normalize(keys, dim=-1), self.directions[slot])[..., None].to(torch.int32)

    def values(self, queries: Tensor, region: Region) -> Tensor:
        """Give each row what its cluster's mean key weighs in a softmax over all rows, averaged over the heads of a group."""
        means = self.means.index_select(0, region.slot)[0]
        labels = self.read(self.codes, region)[..., 0].long().clamp(0, self.most - 1)
        sizes = torch.zeros_like(means[..., 0]).scatter_add_(1, labels, region.valid.float().expand(len(labels), -1))
        scores = (queries @ means.transpose(1, 2)) * self.context.scaling + sizes.log()[:, None]
        weights = (scores.softmax(dim=-1) / sizes.clamp(min=1)[:, None]).mean(dim=1)
        return weights.gather(1, labels)


traits = partial(peer_traits, prefix_reuse="copies")
create = SqueezedIndex
