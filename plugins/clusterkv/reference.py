"""ClusterKV in PyTorch, on any device: the definition of correct for the GPU kernels.

Group keys that point the same way (k-means by cosine), score the mean key of each cluster against the query, and take
the rows of the best clusters until the budget is filled. ClusterKV paper, sections III-B, III-C and IV-C.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS
from kvseek.plugins.batch import Batch
from kvseek.plugins.contract import Built, Effort, Index, IndexContext
from kvseek.plugins.selection import Selection
from kvseek.plugins.shared.group import query_lanes, reduce_scores

from .clustering import cluster_keys
from .config import Config
from .seeding import initial_keys


@dataclass(frozen=True)
class Appended:
    """Evicted keys that queries do not see yet: as new clusters, or as keys that are to join the slot's last cluster.

    Attributes
    ----------
    clusters : int
        Number of new clusters, which follow those that queries see.
    total : Tensor, float32 [G, D], or None
        Sum of the keys that are to join the last cluster; None if they became new clusters.
    """

    clusters: int = 0
    total: Tensor | None = None


class ReferenceIndex(Index):
    """One layer's clusters. The first `dense_layers` layers have none: they attend to every row.

    The clusters of a slot are numbered in the order in which they were made, the prompt's first. Every KV head has the same
    number of clusters. Cluster c is entry c mod S of the slot's extent c / S, where S = config.clusters_per_extent. With E
    extents and G KV heads:

    Attributes
    ----------
    centroids : Tensor [E, G, S, D], dtype of the cache
        Mean of each cluster's keys. Rounding it to bfloat16 moves a score by 0.5 % of the spread of the scores of a
        cluster's keys; float32 would double the bytes that a step reads (README).
    sizes, starts : Tensor, int32 [E, G, S]
        Number of keys in each cluster, and entry of the slot's `places` where the cluster begins.
    places : Tensor, int32 [E, G, 1024]
        The slot's places, sorted by cluster; entries are addressed like rows of the pool. The places of an eviction follow
        those before it; inside a cluster places ascend.
    clusters : Tensor, int32 [slots]
        Number of clusters of each slot that queries see.
    counts, prompt_tokens : list of int, one per slot
        The same number on the host, and the number of tokens that `build` clustered.
    clusterer : callable or None
        Function by which CudaIndex clusters, with the arguments of `cluster`; None: cluster in PyTorch.
    """

    clusterer: Callable[[int, Tensor, int, int, int], object] | None = None

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        self.config: Config = context.config
        self.dense = context.layer < self.config.dense_layers
        extents, heads, device = context.extents, context.num_kv_heads, context.device
        capacity = 0 if self.dense else extents.capacity
        shape = (capacity, heads, self.config.clusters_per_extent)
        self.centroids = torch.empty((*shape, context.head_dim), dtype=context.dtype, device=device)
        self.sizes = torch.empty(shape, dtype=torch.int32, device=device)
        self.starts = torch.empty_like(self.sizes)
        self.places = torch.empty((capacity, heads, EXTENT_TOKENS), dtype=torch.int32, device=device)
        self.clusters = torch.zeros(extents.slots, dtype=torch.int32, device=device)
        self.counts, self.prompt_tokens = [0] * extents.slots, [0] * extents.slots
        self._appended: dict[int, Appended] = {}

    @property
    def bytes_per_token(self) -> float:
        """See Index. A place per token; centroid, size and start per cluster that extents have room for. 0 in a dense layer."""
        if self.dense:
            return 0.0
        cluster = self.context.head_dim * self.context.dtype.itemsize + 2 * 4
        per_head = 4 + self.config.clusters_per_extent * cluster / EXTENT_TOKENS
        return self.context.num_kv_heads * per_head

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> Built:
        """See Index.build; the queries are not used."""
        self.begin(slot, keys.shape[1])
        if self.counts[slot]:
            self.cluster(slot, keys, 0, 0, self.counts[slot])
        self.show_clusters(slot)
        return Built()

    def begin(self, slot: int, tokens: int) -> None:
        """Note on the host that a slot now holds a prompt of `tokens` retrieval tokens, and how many clusters it gets."""
        self._appended.pop(slot, None)
        self.prompt_tokens[slot] = tokens
        self.counts[slot] = 0 if self.dense else self.config.prompt_clusters(tokens)

    def show_clusters(self, slot: int) -> None:
        """Let queries see all clusters that `counts` has on the host."""
        self.clusters[slot].fill_(self.counts[slot])

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """See Index.append. An eviction too small for a cluster of its own joins the slot's last cluster."""
        if self.dense:
            return
        added = self._new_clusters(slot, start, keys.shape[1])
        if added:  # written beyond the slot's count, so queries do not see them yet
            self.cluster(slot, keys, start, self.counts[slot], added)
            self._appended[slot] = Appended(clusters=added)
        else:
            self._write_run(slot, start, keys.shape[1])
            self._appended[slot] = Appended(total=keys.sum(dim=1, dtype=torch.float32))

    def publish(self, slot: int, start: int, count: int) -> None:
        """See Index.publish."""
        if self.dense:
            return
        appended = self._appended.pop(slot)
        if appended.total is None:
            self.counts[slot] += appended.clusters
            self.show_clusters(slot)
        else:
            self._join(slot, appended.total, count)

    def effort(self, length: int) -> Effort:
        """See Index.effort. The rows are the budget, or all rows in a dense layer. The kernels need no numbers."""
        return Effort(length if self.dense else min(self.config.top_k, length))

    def select(self, queries: Tensor, batch: Batch) -> Selection | None:
        """Select the rows of the best clusters: queries [batch, H, D] to rows int32 [batch, G, top_k]. None in a dense layer.

        Clusters ascend by number, rows by place inside a cluster; -1 fills up when the region holds fewer than top_k.
        """
        if self.dense:
            return None
        grouped = queries.reshape(batch.size, self.context.num_kv_heads, -1, queries.shape[-1])
        requests = zip(grouped, batch.slots, batch.lengths, strict=True)
        return Selection(torch.stack([self._rows(*request) for request in requests]))

    def read_clusters(self, array: Tensor, slot: int) -> Tensor:
        """Copy the entries of the slot's clusters from `array` [E, G, S, ...]: [G, clusters, ...]."""
        extents, inside = self._entries(slot, 0, self.counts[slot])
        return array[extents, :, inside].transpose(0, 1)

    def write_clusters(self, array: Tensor, slot: int, first: int, values: Tensor) -> None:
        """Write `values` [G, c, ...] to `array` [E, G, S, ...] as the entries of clusters first .. first + c - 1."""
        extents, inside = self._entries(slot, first, values.shape[1])
        array[extents, :, inside] = values.transpose(0, 1).to(array.dtype)

    def _entries(self, slot: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Find the extents of clusters first .. first + count - 1 of a slot, and their entries there: int64 [count] each."""
        numbers = torch.arange(first, first + count)
        extents = self.context.extents.table[slot, numbers // self.config.clusters_per_extent]
        device = self.context.device
        return extents.long().to(device), (numbers % self.config.clusters_per_extent).to(device)

    def _new_clusters(self, slot: int, start: int, tokens: int) -> int:
        """Count the clusters that an eviction of `tokens` tokens from place `start` on adds; 0: it joins the last cluster."""
        generated = start - self.prompt_tokens[slot]
        return self.config.generated_clusters(generated + tokens) - self.config.generated_clusters(generated)

    def cluster(self, slot: int, keys: Tensor, first_place: int, first_cluster: int, clusters: int) -> None:
        """Cluster keys [G, n, D] of the places from first_place on by themselves, into clusters from first_cluster on."""
        if self.clusterer is not None:
            self.clusterer(slot, keys, first_place, first_cluster, clusters)
            return
        config = self.config
        chosen = initial_keys(config.seed, self.context.layer, keys.shape[1], clusters)
        found = cluster_keys(keys, chosen.to(keys.device), config.iterations)
        self.context.extents.write(self.places, slot, first_place, found.order + first_place)
        self.write_clusters(self.centroids, slot, first_cluster, found.centroids)
        self.write_clusters(self.sizes, slot, first_cluster, found.sizes)
        self.write_clusters(self.starts, slot, first_cluster, found.starts + first_place)

    def _write_run(self, slot: int, start: int, tokens: int) -> None:
        """Write places start .. start + tokens - 1 in ascending order, for keys that join the slot's last cluster."""
        places = torch.arange(start, start + tokens, dtype=torch.int32, device=self.context.device)
        self.context.extents.write(self.places, slot, start, places.expand(self.context.num_kv_heads, -1))

    def _join(self, slot: int, total: Tensor, tokens: int) -> None:
        """Add `tokens` keys, whose sum is `total` [G, D], to the slot's last cluster; their places follow the cluster's."""
        last = self.counts[slot] - 1
        extent = int(self.context.extents.table[slot, last // self.config.clusters_per_extent])
        inside = last % self.config.clusters_per_extent
        sizes, means = self.sizes[extent, :, inside], self.centroids[extent, :, inside]  # views: [G] and [G, D]
        before = sizes[:, None].float()
        means.copy_((before * means.float() + total) / (before + tokens))
        sizes.add_(tokens)

    def _rows(self, queries: Tensor, slot: int, length: int) -> Tensor:
        # queries [G, g, D] to rows int32 [G, top_k]
        sizes = self.read_clusters(self.sizes, slot)
        lanes = query_lanes(queries, self.config.group_reduce)
        scores = lanes @ self.read_clusters(self.centroids, slot).float().transpose(1, 2)
        scores = scores.masked_fill(sizes[:, None] == 0, -torch.inf)
        return self.rows_of_best(reduce_scores(scores, self.config.group_reduce, self.context.scaling), slot, length)

    def rows_of_best(self, values: Tensor, slot: int, length: int) -> Tensor:
        """List the places of the clusters with the largest values [G, clusters]: int32 [G, top_k], -1 fills up."""
        taken = rows_taken(values, self.read_clusters(self.sizes, slot), self.config.top_k)
        entries = expand(self.read_clusters(self.starts, slot), taken, self.config.top_k)
        places = self.context.extents.read(self.places, slot, length)
        return torch.where(entries < 0, -1, places.gather(1, entries.clamp(min=0)))


def rows_taken(values: Tensor, sizes: Tensor, top_k: int) -> Tensor:
    """Count the rows to take of each cluster: values and sizes [G, C] to int64 [G, C].

    Clusters are taken whole, by descending value (ties: lowest number), until `top_k` rows are reached; the last is cut.
    """
    order = values.argsort(dim=-1, descending=True, stable=True)
    ranked = sizes.long().gather(-1, order)
    preceding = ranked.cumsum(dim=-1) - ranked
    taken = torch.minimum(ranked, (top_k - preceding).clamp(min=0))
    return torch.zeros_like(taken).scatter_(-1, order, taken)


def expand(starts: Tensor, taken: Tensor, top_k: int) -> Tensor:
    """List the entries of `places` that clusters cover: starts and taken [G, C] to int64 [G, top_k], -1 at the end."""
    ends = taken.cumsum(dim=-1)
    wanted = torch.arange(top_k, device=taken.device).expand(taken.shape[0], -1).contiguous()
    cluster = torch.searchsorted(ends, wanted, right=True)
    held = cluster.clamp(max=taken.shape[-1] - 1)
    entries = starts.long().gather(-1, held) + wanted - (ends - taken).gather(-1, held)
    return torch.where(cluster < taken.shape[-1], entries, -1)
