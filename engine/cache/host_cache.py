"""The four-region cache: sink | retrieval | local | update buffer, in token order (ParisKV paper, fig. 5).

Sink, local and update buffer are the *window*, one tensor per layer on the device. Tokens that leave it go to the
retrieval region, rows [K(D) | V(D)] in the extents of a pool in host memory. The local window and the update buffer
share a ring: the token at position p >= sink lies in window row sink + (p - sink) mod (local + update), so nothing is
moved when tokens pass from the buffer to the local window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS, CacheConfig, EngineConfig
from kvseek.core.errors import CapacityError
from kvseek.core.extents import ExtentTable, extents_for
from kvseek.plugins.contract import LayerRows
from kvseek.plugins.layer_cache import LayerCache

from .memory_layout import RowPlan, extents_wanted, layer_extent_bytes, retrieval_tokens


@dataclass(frozen=True)
class Eviction:
    """Tokens that left the window of a slot: retrieval positions start .. start + count - 1."""

    slot: int
    start: int
    count: int


class Cache:
    """Rows of all layers and slots. Lengths are in tokens; shapes as in LayerCache.

    Attributes
    ----------
    plan : RowPlan
        Extents, and in how many layers their rows lie in host memory: here in all.
    """

    plan: RowPlan

    def __init__(self, config: EngineConfig, dtype: torch.dtype, device: torch.device) -> None:
        model, slots = config.model, config.max_batch_size
        extent_bytes = model.num_layers * layer_extent_bytes(config, dtype)
        capacity = extents_wanted(config)
        if config.cache.kv_cache_host_memory_bytes is not None:
            capacity = min(capacity, config.cache.kv_cache_host_memory_bytes // extent_bytes)
        self.plan = RowPlan(capacity, 0, model.num_layers, extent_bytes // model.num_layers)
        self._start(config, slots, capacity, dtype, device)
        row_shape = (model.num_kv_heads, EXTENT_TOKENS, 2, model.head_dim)
        try:
            self.rows = torch.empty((capacity, model.num_layers, *row_shape), dtype=dtype)
        except RuntimeError as error:
            raise CapacityError(
                f"cannot reserve {capacity * extent_bytes:,} bytes for {capacity} extents of the row pool ({error}); lower "
                "max_batch_size or max_seq_len, or set kv_cache_host_memory_bytes"
            ) from None

    def _start(self, config: EngineConfig, slots: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        """What every cache has: the counts, the extents and the windows of `slots` slots."""
        model = config.model
        self.config: CacheConfig = config.cache
        self.ring = self.config.local + self.config.update
        max_extents = extents_for(max(0, config.max_seq_len - self.config.sink))
        self.extents = ExtentTable(slots, max_extents, capacity, device)
        window_shape = (model.num_layers, slots, model.num_kv_heads, self.config.window, 2, model.head_dim)
        try:
            self.window = torch.zeros(window_shape, dtype=dtype, device=device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            raise CapacityError(
                f"cannot allocate {math.prod(window_shape) * dtype.itemsize:,} bytes on {device} for the windows of {slots} "
                f"slots ({str(error).splitlines()[0]}); lower max_batch_size, cache.local or cache.update"
            ) from None
        self.tokens = [0] * slots  # cached tokens in all
        self.lengths = [0] * slots  # of those, in the retrieval region

    def layer_rows(self, layer: int) -> Tensor:
        """Row pool of a layer, [extents, G, 1024, 2, D] (strided by extent)."""
        return self.rows[:, layer]

    def extents_needed(self, tokens: int) -> int:
        """Extents that a request needs to grow to `tokens` tokens."""
        return extents_for(self.retrieval_tokens(tokens))

    def retrieval_tokens(self, tokens: int) -> int:
        """Most tokens that the retrieval region holds when a request has `tokens` tokens."""
        return retrieval_tokens(self.config, tokens)

    def open(self, slot: int, tokens: int) -> None:
        """Reserve the extents that a request needs to grow to `tokens` tokens; raises CapacityError."""
        self.extents.reserve(slot, self.retrieval_tokens(tokens))

    def close(self, slot: int) -> None:
        """Forget a slot and give its extents back."""
        self.extents.release(slot)
        self.tokens[slot] = self.lengths[slot] = 0

    def begin_prefill(self, slot: int, tokens: int) -> None:
        """Set the lengths of a slot that is about to receive a prompt of `tokens` tokens, layer by layer."""
        self.tokens[slot] = tokens
        self.lengths[slot] = self.retrieval_tokens(tokens)

    def rows_of(self, layer: int) -> LayerRows:
        """Where the layer's retrieval rows lie, for its index."""
        pool = self.layer_rows(layer)
        return LayerRows(pool, pool.data_ptr(), pool.stride(0))

    def write_prompt(self, layer: int, slot: int, keys: Tensor, values: Tensor, order: Tensor | None = None) -> None:
        """Store a layer's prompt rows, keys and values [G, tokens, D], in window and pool.

        `order` int64 [G, n] is the retrieval token of each place of the pool (Index.arrange); None: token order.
        """
        rows = torch.stack((keys, values), dim=2)
        self._write_prompt_window(layer, slot, rows)
        self.extents.write(self.layer_rows(layer), slot, 0, self._retrieval_rows(slot, rows, order))

    def _retrieval_rows(self, slot: int, rows: Tensor, order: Tensor | None) -> Tensor:
        """Those of a prompt's rows [G, tokens, 2, D] that go to the pool, [G, n, 2, D] by place."""
        sink, n = self.config.sink, self.lengths[slot]
        retrieval = rows[:, sink : sink + n]
        if order is None:
            return retrieval
        return retrieval.gather(1, order[..., None, None].expand_as(retrieval))

    def _write_prompt_window(self, layer: int, slot: int, rows: Tensor) -> None:
        """Store those of a prompt's rows [G, tokens, 2, D] that stay in the window."""
        sink, n = self.config.sink, self.lengths[slot]
        window = self.window[layer, slot]
        window[:, :sink][:, : rows.shape[1]] = rows[:, :sink]
        recent = torch.arange(n, max(n, rows.shape[1] - sink), device=window.device)  # ring positions
        window[:, sink + recent % self.ring] = rows[:, sink + recent]

    def append(self, layer: int, slots: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Store the rows of one new token per request, keys and values [batch, G, D]; `advance` counts it first."""
        rows = torch.stack((keys, values), dim=2)
        for request, slot in enumerate(slots):
            self.window[layer, slot, :, self._window_row(self.tokens[slot] - 1)] = rows[request]

    def advance(self, slots: Sequence[int]) -> list[Eviction]:
        """Count one more token per slot, first moving the oldest `update` tokens of full rings to the retrieval region.

        The caller feeds the keys of each eviction to the indexes.
        """
        evictions = []
        for slot in slots:
            if self._in_ring(slot) == self.ring:
                evictions.append(self._evict(slot))
            self.tokens[slot] += 1
        return evictions

    def evicted_keys(self, layer: int, eviction: Eviction) -> Tensor:
        """Keys of evicted tokens, [G, count, D]."""
        return self.window[layer, eviction.slot][:, self._ring_rows(eviction.start, eviction.count), 0]

    def view(self, layer: int, slots: Sequence[int], window_tokens: Tensor, lengths: Tensor) -> LayerCache:
        """The layer as attention reads it; `window_tokens` and `lengths` come from `describe`, once a step."""
        window, rows = self.window[layer], self.layer_rows(layer)
        return LayerCache(slots, window, window_tokens, rows, self.extents.table, lengths, self.config.sink)

    def describe(self, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """`window_tokens` int32 [batch, 3] and `lengths` int32 [batch] of LayerCache."""
        described = [self._window_tokens(slot) for slot in slots]
        lengths = [self.lengths[slot] for slot in slots]
        return torch.tensor(described, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)

    def _window_tokens(self, slot: int) -> tuple[int, int, int]:
        """Sink rows, first ring row and ring rows of a slot, as in LayerCache.window_tokens."""
        return min(self.config.sink, self.tokens[slot]), self.lengths[slot] % self.ring, self._in_ring(slot)

    def _in_ring(self, slot: int) -> int:
        """Tokens of a slot in local window and update buffer."""
        return max(0, self.tokens[slot] - self.config.sink) - self.lengths[slot]

    def _window_row(self, position: int) -> int:
        sink = self.config.sink
        return position if position < sink else sink + (position - sink) % self.ring

    def _ring_rows(self, start: int, count: int) -> Tensor:
        """Window rows of retrieval positions start .. start + count - 1 that are still in the ring, int64."""
        positions = torch.arange(start, start + count, device=self.window.device)
        return positions % self.ring + self.config.sink

    def _evict(self, slot: int) -> Eviction:
        start, count = self.lengths[slot], self.config.update
        window_rows = self._ring_rows(start, count)
        for layer in range(self.window.shape[0]):
            self.extents.write(self.layer_rows(layer), slot, start, self.window[layer, slot][:, window_rows])
        self.lengths[slot] += count
        return Eviction(slot, start, count)
