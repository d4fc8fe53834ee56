"""ClusterKV in PyTorch, on any device: the definition of correct for the GPU kernels.

Group keys that point the same way (k-means by cosine), score the mean key of each cluster against the query, and take
the rows of the best clusters until the budget is filled. ClusterKV paper, sections III-B, III-C and IV-C. Two things are
our own: a cluster's score counts how far its keys lie from their mean, and key codes choose among the rows of more clusters.
Both can be turned off (spread_weight, rerank_bits), and a cluster is then ranked by its mean alone, and taken whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvseek.core.batch import Batch, Selection
from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.errors import require
from kvseek.core.index_context import IndexContext
from kvseek.core.streams import SideWork
from kvseek.kernels.reference.codes.key_codes import estimate_at, round_lanes
from kvseek.kernels.reference.codes.rotation import rotate
from kvseek.kernels.reference.codes.store import CodeStore
from kvseek.plugins.contract import Budget, Index
from kvseek.plugins.ranking import best_positions, code_store, softmax_mean

from .clustering import cluster_keys, initial_keys
from .config import Config


@dataclass(frozen=True)
class Appended:
    """Evicted keys that queries do not see yet: as new clusters, or as keys that are to join the slot's last cluster.

    Attributes
    ----------
    clusters : int
        Number of new clusters, which follow those that queries see.
    total : Tensor, float32 [G, D], or None
        Sum of the keys that are to join the last cluster; None if they became new clusters.
    spread : Tensor, float32 [G], or None
        Their spread about their own mean (clustering.Clustering), if the index keeps spreads.
    """

    clusters: int = 0
    total: Tensor | None = None
    spread: Tensor | None = None


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
    spreads : Tensor, float32 [E, G, S]
        Spread of each cluster's keys (clustering.Clustering); no entries with spread_weight 0.
    places : Tensor, int32 [E, G, 1024]
        The slot's places, sorted by cluster; entries are addressed like rows of the pool. The places of an eviction follow
        those before it; inside a cluster places ascend.
    clusters : Tensor, int32 [slots]
        Number of clusters of each slot that queries see.
    counts, prompt_tokens : list of int, one per slot
        The same number on the host, and the number of tokens that `build` clustered.
    codes : CodeStore or None
        Codes of the keys by place; None with rerank_bits 0, and in dense layers.
    """

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
        spreads = shape if self.config.spread_weight else (0, *shape[1:])
        self.spreads = torch.empty(spreads, dtype=torch.float32, device=device)
        self.places = torch.empty((capacity, heads, EXTENT_TOKENS), dtype=torch.int32, device=device)
        self.clusters = torch.zeros(extents.slots, dtype=torch.int32, device=device)
        self.counts, self.prompt_tokens = [0] * extents.slots, [0] * extents.slots
        self._appended: dict[int, Appended] = {}
        bits = 0 if self.dense else self.config.rerank_bits
        if bits:
            limit = "0 without the codebook 'signs', which engines from before the codes lack"
            require("signs" in context.codebooks, "rerank_bits", bits, limit, "build the engine again")
        self.codes = code_store(context, bits) if bits else None

    @property
    def bytes_per_token(self) -> float:
        """See Index. A place and a code per token; centroid, size, start and spread per cluster that extents have room for.

        0 in a dense layer.
        """
        if self.dense:
            return 0.0
        cluster = self.context.head_dim * self.context.dtype.itemsize + (3 if self.config.spread_weight else 2) * 4
        per_head = 4 + self.config.clusters_per_extent * cluster / EXTENT_TOKENS
        codes = self.codes.bytes_per_token if self.codes is not None else 0.0
        return self.context.num_kv_heads * per_head + codes

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> SideWork | None:
        """See Index.build; the queries are not used."""
        self.begin(slot, keys.shape[1])
        if self.codes is not None:
            self.codes.append(slot, 0, keys)
        if self.counts[slot]:
            self.cluster(slot, keys, 0, 0, self.counts[slot])
        self.show_clusters(slot)
        return None

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
        if self.codes is not None:
            self.codes.append(slot, start, keys)
        added = self._new_clusters(slot, start, keys.shape[1])
        if added:  # written beyond the slot's count, so queries do not see them yet
            self.cluster(slot, keys, start, self.counts[slot], added)
            self._appended[slot] = Appended(clusters=added)
        else:
            self._write_run(slot, start, keys.shape[1])
            total = keys.sum(dim=1, dtype=torch.float32)
            self._appended[slot] = Appended(
                total=total, spread=self._spread(keys) if self.config.spread_weight else None
            )

    def publish(self, slot: int, start: int, count: int) -> None:
        if self.dense:
            return
        appended = self._appended.pop(slot)
        if appended.total is None:
            self.counts[slot] += appended.clusters
            self.show_clusters(slot)
        else:
            self._join(slot, appended, count)

    def budget(self, length: int) -> Budget:
        """See Index.budget. The rows are the budget, or all rows in a dense layer. The kernels need no fields."""
        return Budget(length if self.dense else min(self.config.top_k, length))

    def select(self, queries: Tensor, batch: Batch) -> Selection | None:
        """Select rows of the best clusters: queries [batch, H, D] to rows int32 [batch, G, top_k]. None in a dense layer.

        Rows come in the order of their clusters' numbers, and ascend by place inside a cluster; -1 fills up when the region
        holds fewer than top_k. With codes as well: their estimates choose among the rows of more clusters, and keep the order.
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
        config = self.config
        chosen = initial_keys(config.seed, self.context.layer, keys.shape[1], clusters)
        found = cluster_keys(keys, chosen.to(keys.device), config.iterations)
        self.context.extents.write(self.places, slot, first_place, found.order + first_place)
        self.write_clusters(self.centroids, slot, first_cluster, found.centroids)
        self.write_clusters(self.sizes, slot, first_cluster, found.sizes)
        self.write_clusters(self.starts, slot, first_cluster, found.starts + first_place)
        if config.spread_weight:
            self.write_clusters(self.spreads, slot, first_cluster, found.spreads)

    def _write_run(self, slot: int, start: int, tokens: int) -> None:
        """Write places start .. start + tokens - 1 in ascending order, for keys that join the slot's last cluster."""
        places = torch.arange(start, start + tokens, dtype=torch.int32, device=self.context.device)
        self.context.extents.write(self.places, slot, start, places.expand(self.context.num_kv_heads, -1))

    def _spread(self, keys: Tensor) -> Tensor:
        """Compute the spread [G] of keys [G, u, D] about their own mean."""
        keys = keys.float()
        return (keys - keys.mean(dim=1, keepdim=True)).square().mean(dim=(1, 2)).sqrt()

    def _join(self, slot: int, keys: Appended, tokens: int) -> None:
        """Add `tokens` keys to the slot's last cluster; their places follow the cluster's.

        The squares about the common mean are those about both means, and what lies between these. Sums of squares about zero
        would need more digits than a mean in bfloat16 has.
        """
        assert keys.total is not None, "keys that join a cluster are summed up"
        last = self.counts[slot] - 1
        extent = int(self.context.extents.table[slot, last // self.config.clusters_per_extent])
        inside = last % self.config.clusters_per_extent
        sizes, means = self.sizes[extent, :, inside], self.centroids[extent, :, inside]  # views: [G] and [G, D]
        before = sizes[:, None].float()
        if keys.spread is not None:
            spreads, old = self.spreads[extent, :, inside], before[:, 0]
            between = (means.float() - keys.total / tokens).square().mean(dim=1) * old * tokens / (old + tokens)
            squares = old * spreads.square() + tokens * keys.spread.square() + between
            spreads.copy_((squares / (old + tokens)).sqrt())
        means.copy_((before * means.float() + keys.total) / (before + tokens))
        sizes.add_(tokens)

    def _rows(self, queries: Tensor, slot: int, length: int) -> Tensor:
        # queries [G, g, D] to rows int32 [G, top_k]
        places = self.candidates(queries, slot, length)
        if self.codes is not None and length > self.config.top_k:
            places = self._rerank(self.codes, queries, places[:, : min(length, places.shape[1])].long(), slot, length)
        return places[:, : self.config.top_k].int()

    def _values(self, queries: Tensor, slot: int) -> Tensor:
        """Compute what clusters are ranked by: queries [G, g, D] to [G, clusters]."""
        lanes = queries.float()
        scores = lanes @ self.read_clusters(self.centroids, slot).float().transpose(1, 2)
        if weight := self.config.spread_weight:
            scores = (
                scores + weight * lanes.norm(dim=-1, keepdim=True) * self.read_clusters(self.spreads, slot)[:, None]
            )
        scores = scores.masked_fill(self.read_clusters(self.sizes, slot)[:, None] == 0, -torch.inf)
        return softmax_mean(scores, self.context.scaling)

    def _rerank(self, codes: CodeStore, queries: Tensor, places: Tensor, slot: int, length: int) -> Tensor:
        """Choose the best top_k of places int64 [G, c] by their codes' estimates; they keep their order, by which ties are cut"""
        lanes = round_lanes(rotate(queries.float(), codes.signs))
        estimates = estimate_at(codes.read(slot, length), places, lanes)
        values = softmax_mean(estimates, self.context.scaling)
        return places.gather(1, best_positions(values, self.config.top_k))

    def candidates(self, queries: Tensor, slot: int, length: int) -> Tensor:
        """List the places of the best clusters: queries [G, g, D] to int32 [G, rows_of_clusters], -1 at the end."""
        return self.rows_of_best(self._values(queries, slot), slot, length, self.config.rows_of_clusters)

    def rows_of_best(self, values: Tensor, slot: int, length: int, count: int) -> Tensor:
        """List the places of the clusters with the largest values [G, clusters]: int32 [G, count], -1 fills up."""
        taken = rows_taken(values, self.read_clusters(self.sizes, slot), count)
        entries = expand(self.read_clusters(self.starts, slot), taken, count)
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
