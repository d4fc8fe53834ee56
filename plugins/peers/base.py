"""The ground of the competing systems: one selection in PyTorch, which an engine on the CPU runs and one on a GPU captures.

A method gives a value to each row of a region, and the `top_k` rows of the largest values are attended to. For equal ground, not
for speed: what a method's own code keeps, such as a page's bounds, is computed from a copy of the keys in every step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvseek.core.batch import Batch, Selection
from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.errors import require
from kvseek.core.extents import extents_for
from kvseek.core.index_context import IndexContext
from kvseek.plugins.contract import LAST_QUERIES, Budget, Index, Traits
from kvseek.plugins.ranking import best_positions

QUERIES = 32  # whose attention to all keys is in memory at a time
POINTS = 4096  # whose distances to all centroids are


@dataclass(frozen=True)
class TopK:
    """The field that all of them have; a Config inherits it and sets its paper's budget.

    Attributes
    ----------
    top_k : int
        Rows per KV head.
    """

    top_k: int

    def __post_init__(self) -> None:
        require(self.top_k >= 1, "top_k", self.top_k, ">= 1", "256 is a common budget")


@dataclass(frozen=True)
class DenseFirst(TopK):
    """The fields of those whose first layers read every row.

    Attributes
    ----------
    dense_layers : int
        First layers, which attend to every row.
    """

    dense_layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        default = f"{type(self).dense_layers} is the default"
        require(self.dense_layers >= 0, "dense_layers", self.dense_layers, ">= 0", default)


@dataclass(frozen=True)
class Pages(DenseFirst):
    """The fields of those that take rows by pages.

    Attributes
    ----------
    page : int
        Neighbouring rows that are taken together.
    """

    page: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.page >= 1, "page", self.page, ">= 1", f"{type(self).page} is the default")


@dataclass(frozen=True)
class Region:
    """The retrieval region of one request; all tensors are on the engine's device.

    A captured step has one shape for all lengths, so there n is as long as a region can become; on the CPU n is the length.

    Attributes
    ----------
    slot : Tensor, int32 [1]
    extents : Tensor, int32 [e]
        Extents of the places; any number where the region has none.
    length : Tensor, int32 [1]
    places : Tensor, int64 [n]
    valid : Tensor, bool [n]
        Which places hold a row; arrays may hold anything at the others.
    selects : Tensor, bool [1]
        Whether the request attends to what is selected, and not to every row.
    """

    slot: Tensor
    extents: Tensor
    length: Tensor
    places: Tensor
    valid: Tensor
    selects: Tensor


class PeerIndex(Index):
    """Selects the `top_k` rows to which a method gives the largest values; of equal ones the first."""

    bytes_per_token = 0.0

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        self.config: Any = context.config
        self.one_shape = context.device.type != "cpu"
        self.dense = context.layer < getattr(self.config, "dense_layers", 0)

    def budget(self, length: int) -> Budget:
        """See Index.budget. The rows are the top k, or all."""
        return Budget(length if self.dense else min(self.config.top_k, length))

    def select(self, queries: Tensor, batch: Batch) -> Selection | None:
        """See Index.select. Rows int32 [batch, G, top_k] ascend; -1 fills up."""
        if self.dense:
            return None
        shape = (batch.size, self.context.num_kv_heads, self.config.top_k)
        rows = torch.full(shape, -1, dtype=torch.int32, device=queries.device)
        for request, region in enumerate(self.regions(batch)):
            if region.places.numel():
                values = self.values(queries[request].reshape(shape[1], -1, queries.shape[2]).float(), region)
                best = best_positions(values.masked_fill(~region.valid, -torch.inf), self.config.top_k)
                rows[request, :, : best.shape[1]] = torch.where(best < region.length, best, -1)
        return Selection(rows)

    def regions(self, batch: Batch) -> Iterator[Region]:
        """Return the regions of a batch's requests."""
        columns = [torch.split(batch.column(name), 1) for name in ("slot", "length", "dense")]
        for request, (slot, length, dense) in enumerate(zip(*columns, strict=True)):
            most = batch.table.shape[1] * EXTENT_TOKENS if self.one_shape else batch.lengths[request]
            extents = batch.table.index_select(0, slot)[0, : extents_for(most)].clamp(min=0)
            places = torch.arange(most, device=slot.device)
            yield Region(slot, extents, length, places, places < length, dense == 0)

    def by_row(self, width: int, dtype: torch.dtype) -> Tensor:
        """Allocate `width` numbers for each row of the pool: [extents, G, 1024, width]."""
        context = self.context
        shape = (0 if self.dense else context.extents.capacity, context.num_kv_heads, EXTENT_TOKENS, width)
        self.bytes_per_token += dtype.itemsize * width * context.num_kv_heads * (not self.dense)
        return torch.empty(shape, dtype=dtype, device=context.device)

    def read(self, array: Tensor, region: Region) -> Tensor:
        """Copy what an array [extents, G, 1024, width] has of a region's places: [G, n, width]."""
        return array.index_select(0, region.extents).transpose(0, 1).flatten(1, 2)[:, : len(region.places)]

    def by_slot(self) -> Tensor:
        """Allocate a number for each row that a slot can have: float32 [slots, G, tokens]."""
        extents = self.context.extents
        shape = (extents.slots, self.context.num_kv_heads, extents.max_extents * EXTENT_TOKENS)
        self.bytes_per_token += torch.float32.itemsize * shape[1]
        return torch.zeros(shape, device=self.context.device)

    @abstractmethod
    def values(self, queries: Tensor, region: Region) -> Tensor:
        """Say what rows are worth to float32 queries [G, g, D]: [G, n]; what it says of places that are not valid is ignored.

        It may be captured as a CUDA graph: static shapes, and no tensor is read by the host.
        """


class KeyedIndex(PeerIndex):
    """Keeps a copy of the keys, [extents, G, 1024, D] in the cache's dtype."""

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        self.copies = self.by_row(context.head_dim, context.dtype)

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """See Index.build; the queries are not used."""
        self.append(slot, 0, keys)

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """See Index.append. No selection reads beyond a region's length, so there is nothing to publish."""
        if not self.dense:
            self.context.extents.write(self.copies, slot, start, keys)

    def keys(self, region: Region) -> Tensor:
        """Copy a region's keys: float32 [G, n, D], zero at places that are not valid."""
        return self.read(self.copies, region).float().masked_fill(~region.valid[:, None], 0)


class CodedPeer(PeerIndex):
    """Keeps codes of the rows, [extents, G, 1024, width], instead of keys; a slot learns how from its first keys.

    Those are the prompt's. Of a prompt that stays in the window they are the first that leave it.
    """

    codes: Tensor

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """See Index.build; the queries are not used."""
        self.append(slot, 0, keys)

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """See Index.append. No selection reads beyond a region's length, so there is nothing to publish."""
        if keys.shape[1] and not self.dense:
            if start == 0:
                self.learn(slot, keys.float())
            self.context.extents.write(self.codes, slot, start, self.encode(slot, keys.float()))

    @abstractmethod
    def learn(self, slot: int, keys: Tensor) -> None:
        """Set what the codes of a slot mean, by float32 keys [G, n, D], n >= 1."""

    @abstractmethod
    def encode(self, slot: int, keys: Tensor) -> Tensor:
        """Encode float32 keys [G, u, D]: [G, u, width]."""


def nearest(points: Tensor, centroids: Tensor) -> Tensor:
    """Find the nearest centroid [B, c, d] of each point [B, n, d]: int64 [B, n]."""
    halves = centroids.square().sum(dim=-1)[:, None] / 2
    parts = [part @ centroids.transpose(1, 2) - halves for part in torch.split(points, POINTS, dim=1)]
    return torch.cat([part.argmax(dim=-1) for part in parts], dim=1)


def means_of(points: Tensor, labels: Tensor, otherwise: Tensor) -> Tensor:
    """Average the points [B, n, d] of each label: [B, c, d]; `otherwise` [B, c, d] where there is none.

    Sums are in float64, so that their order, which is any on a GPU, does not show.
    """
    sums = otherwise.new_zeros(otherwise.shape, dtype=torch.float64)
    sums.scatter_add_(1, labels[..., None].expand_as(points), points.double())
    sizes = sums.new_zeros(sums.shape[:2]).scatter_add_(1, labels, torch.ones_like(labels, dtype=torch.float64))
    return torch.where(sizes[..., None] > 0, sums / sizes.clamp(min=1)[..., None], otherwise).float()


def kmeans(points: Tensor, count: int, iterations: int) -> Tensor:
    """Cluster points [B, n, d] around `count` centroids, which begin at evenly spaced points: [B, count, d]."""
    centroids = points[:, torch.linspace(0, points.shape[1] - 1, count, device=points.device).round().long()]
    for _ in range(iterations):
        centroids = means_of(points, nearest(points, centroids), centroids)
    return centroids


def in_pages(rows: Tensor, page: int, filling: float) -> Tensor:
    """Cut rows [G, n, ...] into pages, the last of them filled up: [G, pages, page, ...]."""
    padded = pad(rows, (*(0, 0) * (rows.ndim - 2), 0, -rows.shape[1] % page), value=filling)
    return padded.reshape(rows.shape[0], -1, page, *rows.shape[2:])


def bounds_of_pages(keys: Tensor, valid: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Find the least and the largest number of each channel of the valid keys [G, n, D] of a page: [G, pages, D] each."""
    invalid = ~valid[:, None]
    least = in_pages(keys.masked_fill(invalid, torch.inf), page, torch.inf).amin(dim=2)
    return least, in_pages(keys.masked_fill(invalid, -torch.inf), page, -torch.inf).amax(dim=2)


def of_pages(values: Tensor, page: int, count: int) -> Tensor:
    """Give the first `count` rows the values [G, pages] of their pages: [G, count]."""
    return values.repeat_interleave(page, dim=1, output_size=values.shape[1] * page)[:, :count]


def attention_received(
    queries: Tensor,
    keys: Tensor,
    scaling: float,
    *,
    causal: bool = False,
    kept: Tensor | None = None,
    counted: Tensor | None = None,
) -> Tensor:
    """Sum the softmax attention that queries [H, w, D] pay to keys [G, n, D]: float32 [G, g, n].

    Parameters
    ----------
    causal : bool
        Whether the last query sees all keys, the one before it all but the last, and so on.
    kept : Tensor, bool [G, n], optional
        The only keys that there are.
    counted : Tensor, bool [w], optional
        The only queries that there are.
    """
    heads, n, dim = keys.shape
    keys, sums = keys.float().transpose(1, 2)[:, None], keys.new_zeros((), dtype=torch.float32)
    for first in range(0, queries.shape[1], QUERIES):
        block = queries[:, first : first + QUERIES].reshape(heads, queries.shape[0] // heads, -1, dim).float()
        scores = block @ keys * scaling
        if causal:
            last = torch.arange(first, first + block.shape[2], device=keys.device) + n - queries.shape[1]
            scores = scores.masked_fill(torch.arange(n, device=keys.device) > last[:, None], -torch.inf)
        if kept is not None:
            scores = scores.masked_fill(~kept[:, None, None], -torch.inf)
        weights = scores.softmax(dim=-1)
        if counted is not None:
            weights = weights.masked_fill(~counted[first : first + QUERIES, None], 0)
        sums = sums + weights.sum(dim=2)
    return sums


def all_queries(tokens: int) -> int:
    """Say that `build` makes use of all queries that it is given: Traits.last_queries."""
    return min(tokens, LAST_QUERIES)


def peer_traits(config: Any, **own: Any) -> Traits:
    """Return the traits of a method whose entries are made from the keys alone; `own` overrides them."""
    return Traits(**{"prefix_reuse": "entries", "device_layers": getattr(config, "dense_layers", 0), **own})
