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
from kvseek.core.index_context import IndexContext
from kvseek.plugins.contract import Budget, Index, Traits
from kvseek.plugins.ranking import best_positions


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
    """

    slot: Tensor
    extents: Tensor
    length: Tensor
    places: Tensor
    valid: Tensor


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
                values = self.values(queries[request].unflatten(0, (shape[1], -1)).float(), region)
                best = best_positions(values.masked_fill(~region.valid, -torch.inf), self.config.top_k)
                rows[request, :, : best.shape[1]] = torch.where(best < region.length, best, -1)
        return Selection(rows)

    def regions(self, batch: Batch) -> Iterator[Region]:
        """Return the regions of a batch's requests."""
        slots, lengths = batch.column("slot"), batch.column("length")
        for request in range(batch.size):
            known = None if self.one_shape else batch.lengths[request]
            yield self.region(slots[request : request + 1], batch.table, lengths[request : request + 1], known)

    def region(self, slot: Tensor, table: Tensor, length: Tensor, known: int | None) -> Region:
        """Return a slot's region; `known` is its length, None if it must not matter to the shape."""
        most = table.shape[1] * EXTENT_TOKENS if known is None else known
        extents = table.index_select(0, slot)[0, : -(-most // EXTENT_TOKENS)].clamp(min=0)
        places = torch.arange(most, device=table.device)
        return Region(slot, extents, length, places, places < length)

    @abstractmethod
    def values(self, queries: Tensor, region: Region) -> Tensor:
        """Say what rows are worth to float32 queries [G, g, D]: [G, n]; what it says of places that are not valid is ignored.

        It may be captured as a CUDA graph: static shapes, and no tensor is read by the host.
        """


class KeyedIndex(PeerIndex):
    """Keeps a copy of the keys, [extents, G, 1024, D] in the cache's dtype."""

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        shape = (context.extents.capacity, context.num_kv_heads, EXTENT_TOKENS, context.head_dim)
        self.copies = torch.empty((0,) if self.dense else shape, dtype=context.dtype, device=context.device)

    @property
    def bytes_per_token(self) -> float:  # type: ignore[override]
        """Bytes per token of the copy of the keys."""
        return self.copies[0].nbytes / EXTENT_TOKENS if self.copies.numel() else 0.0

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """See Index.build; the queries are not used."""
        self.append(slot, 0, keys)

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """See Index.append. No selection reads beyond a region's length, so there is nothing to publish."""
        if not self.dense:
            self.context.extents.write(self.copies, slot, start, keys)

    def keys(self, region: Region) -> Tensor:
        """Copy a region's keys: float32 [G, n, D], zero at places that are not valid."""
        keys = self.copies.index_select(0, region.extents).transpose(0, 1).flatten(1, 2)[:, : len(region.places)]
        return keys.float().masked_fill(~region.valid[:, None], 0)


def in_pages(rows: Tensor, page: int, filling: float) -> Tensor:
    """Cut rows [G, n, ...] into pages, the last of them filled up: [G, pages, page, ...]."""
    missing = -rows.shape[1] % page
    return pad(rows, (*(0, 0) * (rows.ndim - 2), 0, missing), value=filling).unflatten(1, (-1, page))


def of_pages(values: Tensor, page: int, count: int) -> Tensor:
    """Give the first `count` rows the values [G, pages] of their pages: [G, count]."""
    return values.repeat_interleave(page, dim=1, output_size=values.shape[1] * page)[:, :count]


def peer_traits(config: Any, **own: Any) -> Traits:
    """Return the traits of a method whose entries are made from the keys alone; `own` overrides them."""
    return Traits(**{"prefix_reuse": "entries", "device_layers": getattr(config, "dense_layers", 0), **own})
