"""Row pools full of synthetic rows, and indexes built on them as the engine builds them after a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvseek.bench.speed.device.synthetic_keys import SyntheticKeys
from kvseek.plugins.contract import LAST_QUERIES

from .memory_plan import CHUNK_TOKENS, SLOT_STRIDE, Cell, key_tokens

if TYPE_CHECKING:
    from kvseek.core.config import ModelConfig
    from kvseek.engine.cache.cache import Cache
    from kvseek.plugins.contract import Index

    Target = tuple[Cache, list[list[Index]]]  # a cache, and the indexes of all layers over it


class Filler:
    """Fills caches and indexes with synthetic keys; every layer's are those of one text under other signs of channels.

    Parameters
    ----------
    cells : sequence of Cell
        All that will ever be filled: the text is as long as the longest of them needs.
    room : int
        Tokens that a request may grow by.
    """

    def __init__(
        self,
        model: ModelConfig,
        cells: Sequence[Cell],
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        room: int,
    ) -> None:
        longest = key_tokens(cells)
        self.source = SyntheticKeys(model.num_kv_heads, model.head_dim, device, seed)
        self._keys = self.source.keys(longest, dtype)
        self._values = self.source.values(min(longest, CHUNK_TOKENS), dtype)
        self.signs = [self.source.signs(dtype) for _ in range(model.num_layers)]
        self.queries = self.source.queries(model.num_heads, LAST_QUERIES, dtype)
        self._group, self._room = model.group_size, room

    def keys(self, layer: int, slot: int, tokens: int, heads: slice = slice(None)) -> Tensor:
        """Keys [G, tokens, D] of a slot in a layer by token, of some KV heads (a copy)."""
        return self._text(slot, tokens)[heads] * self.signs[layer][heads]

    def layer_queries(self, layer: int, queries: Tensor) -> Tensor:
        """Queries [H, w, D] of the source, as those of a layer."""
        return queries * self.signs[layer].repeat_interleave(self._group, dim=0)

    @torch.inference_mode()
    def fill(self, cell: Cell, targets: Sequence[Target]) -> None:
        """Make each cache hold the cell's requests, in slots 0, 1, ..., and build its indexes; other slots are closed.

        Every cache gets the same tokens. Rows of the host pool are copied from the
        device in pieces of an extent. `memory_plan.fill_bytes` counts what this holds at a time.
        """
        for cache, _ in targets:
            for slot in range(cache.padding_slot):
                cache.close(slot)
            for slot in range(cell.batch):
                cache.open(slot, cell.context + self._room)
                cache.begin_prefill(slot, with_empty_buffer(cache, cell.context))
        for layer in range(len(self.signs)):
            with self._turned(layer):
                for cache, index_sets in targets:
                    self._fill_layer(layer, cell.batch, cache, [indexes[layer] for indexes in index_sets])
        torch.cuda.synchronize()

    def _fill_layer(self, layer: int, slots: int, cache: Cache, indexes: Sequence[Index]) -> None:
        """Index and store all slots of a layer. What `build` leaves running ends before the keys are turned on."""
        works = []
        for slot in range(slots):
            keys, queries = self._text(slot, cache.lengths[slot]), self.layer_queries(layer, self.queries)
            started = [index.build(slot, keys, queries) for index in indexes]
            works += [work for work in started if work is not None]
            self._write(layer, slot, keys, cache)
        for work in works:
            work.wait()

    def _write(self, layer: int, slot: int, keys: Tensor, cache: Cache) -> None:
        """Store keys [G, n, D], and as many values."""
        for start in range(0, keys.shape[1], CHUNK_TOKENS):
            part = keys[:, start : start + CHUNK_TOKENS]
            rows = torch.stack((part, self._values[:, : part.shape[1]]), dim=2)
            cache.rows.write(layer, rows[None], cache.extents.spans(slot, start, start + part.shape[1]))

    def _text(self, slot: int, tokens: int) -> Tensor:
        start = slot * SLOT_STRIDE
        return self._keys[:, start : start + tokens]

    @contextmanager
    def _turned(self, layer: int) -> Iterator[None]:
        """Make the keys those of a layer, in place: a copy would take gigabytes. Twice ±1 changes no bit."""
        self._keys.mul_(self.signs[layer])
        try:
            yield
        finally:
            self._keys.mul_(self.signs[layer])


def with_empty_buffer(cache: Cache, tokens: int) -> int:
    """Return how many of `tokens` tokens there are without those in the update buffer, so that `update` steps evict nothing."""
    region, config = cache.retrieval_tokens(tokens), cache.config
    return config.sink + config.local + 1 + region if region else tokens
