"""PQCache: product quantization of the keys, whose tables estimate every product."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvseek.core.errors import require
from kvseek.core.index_context import IndexContext
from kvseek.plugins.peers.base import CodedPeer, Region, TopK, kmeans, nearest, peer_traits
from kvseek.plugins.ranking import softmax_mean

PAPER = {"top_k": 1024, "parts": 2, "bits": 6}  # its budgets are shares of a prompt, a tenth or a fifth


@dataclass(frozen=True)
class Config(TopK):
    """How many rows are kept, and how keys are quantized.

    Attributes
    ----------
    parts : int
        Parts of a key, each of which is coded by its nearest centroid; divides the head size.
    bits : int
        Of a part's code: 2^bits centroids a slot, KV head and part.
    iterations : int
        Of k-means over a prompt's keys.
    """

    top_k: int = 1024
    parts: int = 2
    bits: int = 6
    iterations: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.parts >= 1, "parts", self.parts, ">= 1", "2 is the default")
        require(1 <= self.bits <= 8, "bits", self.bits, "from 1 to 8", "6 is the default")
        require(self.iterations >= 0, "iterations", self.iterations, ">= 0", "10 is the default")


class ProductIndex(CodedPeer):
    """Keeps a code for each part of a key, uint8 [parts] a row, and the slots' centroids [slots, G, parts, 2^bits, D / parts]."""

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        parts, dim = self.config.parts, context.head_dim
        require(dim % parts == 0, "parts", parts, f"a divisor of head_dim = {dim}", "2 is the default")
        self.codes = self.by_row(parts, torch.uint8)
        shape = (context.extents.slots, context.num_kv_heads, parts, 1 << self.config.bits, dim // parts)
        self.centroids = torch.zeros(shape, device=context.device)

    def learn(self, slot: int, keys: Tensor) -> None:
        """Cluster each part of the keys."""
        count = self.centroids.shape[3]
        found = kmeans(self._parts(keys).flatten(0, 1), count, self.config.iterations)
        self.centroids[slot] = found.reshape(self.centroids.shape[1:])

    def encode(self, slot: int, keys: Tensor) -> Tensor:
        """Find the nearest centroids."""
        labels = nearest(self._parts(keys).flatten(0, 1), self.centroids[slot].flatten(0, 1))
        return labels.reshape(keys.shape[0], self.config.parts, -1).transpose(1, 2).to(torch.uint8)

    def values(self, queries: Tensor, region: Region) -> Tensor:
        """Rank by the mean softmax of the estimates."""
        centroids = self.centroids.index_select(0, region.slot)[0]
        tables = self._parts(queries) @ centroids.transpose(2, 3)  # [G, parts, g, 2^bits]
        codes = self.read(self.codes, region).long().transpose(1, 2)[:, :, None]  # [G, parts, 1, n]
        codes = (codes % tables.shape[3]).expand(-1, -1, tables.shape[2], -1)  # in range at places that are not valid
        estimates = tables.gather(3, codes).sum(dim=1)
        return softmax_mean(estimates.masked_fill(~region.valid, -torch.inf), self.context.scaling)

    def _parts(self, vectors: Tensor) -> Tensor:
        """Cut vectors [G, n, D] into parts: [G, parts, n, D / parts]."""
        parts = self.config.parts
        return vectors.reshape(*vectors.shape[:2], parts, vectors.shape[2] // parts).transpose(1, 2)


traits = partial(peer_traits, prefix_reuse="copies")
create = ProductIndex
