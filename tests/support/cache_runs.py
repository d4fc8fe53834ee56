"""A cache that is given requests whose rows say where they belong; for the tests of Cache on the CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvseek.core.batch import Batch
from kvseek.core.config import EXTENT_TOKENS, CacheConfig, EngineConfig
from kvseek.core.index_context import IndexContext
from kvseek.core.model_config import ModelConfig
from kvseek.engine.cache.cache import EVICT_AHEAD, Cache
from kvseek.engine.cache.memory_layout import lay_out_rows, layer_extent_bytes
from kvseek.engine.cache.row_storage import RowStorage
from kvseek.kernels.reference.attention.attend import window_rows
from kvseek.plugins.contract import Budget, Index

CPU = torch.device("cpu")
LAYERS, KV_HEADS, DIM, SLOTS = 3, 2, 4, 3
MODEL = ModelConfig("llama", 16, 8, 8, LAYERS, 4, KV_HEADS, DIM, 1e-5, 1e4, 1 << 20)


class KeyList(Index):
    """Keeps the keys that it is given, by slot and position: those that are appended, and those that are published."""

    bytes_per_token = 4.0 * KV_HEADS * DIM

    def __init__(self, layer: int, cache: Cache) -> None:
        settings = (None, {}, cache.extents, cache.lengths, torch.float32, cache.window.device)
        super().__init__(IndexContext(layer, 4, KV_HEADS, DIM, 1.0, *settings))
        self.appended: dict[int, Tensor] = {}
        self.visible: dict[int, Tensor] = {}

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        self.visible[slot] = keys.clone()

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        assert start == self.visible[slot].shape[1] == self.context.lengths[slot]
        assert keys.is_contiguous()
        self.appended[slot] = keys.clone()

    def publish(self, slot: int, start: int, count: int) -> None:
        assert start + count == self.context.lengths[slot]
        assert self.appended[slot].shape[1] == count
        self.visible[slot] = torch.cat([self.visible[slot], self.appended.pop(slot)], dim=1)

    def budget(self, length: int) -> Budget:
        return Budget(length)

    def select(self, queries: Tensor, batch: Batch) -> None:
        return None


def make_config(
    sink: int, local: int, update: int, offload: str = "auto", device_layers: int = LAYERS, tokens: int = 4096
) -> EngineConfig:
    cache = CacheConfig(sink=sink, local=local, update=update)
    sizes = {"max_batch_size": SLOTS, "max_seq_len": tokens, "max_input_len": tokens}
    config = EngineConfig(MODEL, "full", cache=cache, device="cuda", **sizes)
    layer_bytes = layer_extent_bytes(config, torch.float32) * SLOTS * (tokens // EXTENT_TOKENS)
    budget = device_layers * layer_bytes if offload == "auto" and device_layers else None
    if offload == "auto" and not device_layers:
        offload = "always"
    cache = CacheConfig(sink, local, update, offload=offload, kv_cache_device_memory_bytes=budget)
    return EngineConfig(MODEL, "full", cache=cache, device="cuda", **sizes)


def make_cache(config: EngineConfig, device: torch.device = CPU) -> Cache:
    """The cache of a GPU engine; on the CPU it prepares evictions as early as there."""
    rows = RowStorage(config, torch.float32, device, lay_out_rows(config, torch.float32, None))
    cache = Cache(config, torch.float32, device, rows)
    cache.evict_ahead = min(EVICT_AHEAD, config.cache.update, config.cache.local)
    return cache


def rows_of(request: int, layer: int, positions: Tensor) -> Tensor:
    """Keys [KV_HEADS, n, DIM] that say which request, layer, KV head and token they belong to."""
    heads = torch.arange(KV_HEADS)[:, None].expand(-1, len(positions))
    parts = (torch.full_like(heads, request), torch.full_like(heads, layer), heads, positions.expand_as(heads))
    return torch.stack(parts, dim=-1).float()


def read_rows(cache: Cache, layer: int, slot: int) -> Tensor:
    """Rows of a slot's retrieval region by place, [KV_HEADS, n, 2, DIM] on the CPU."""
    if cache.window.is_cuda:
        torch.cuda.current_stream().synchronize()  # it waits for what is being copied to the host
    return cache.extents.read(cache.rows.of_layer(layer).pool, slot, cache.lengths[slot]).cpu()


class CacheRun:
    """A cache and its indexes, and which request decodes in which slot. Values are negative keys."""

    def __init__(
        self, config: EngineConfig, device: torch.device = CPU, delay: Callable[[], None] = lambda: None
    ) -> None:
        """`delay` holds the current stream up before each write."""
        self.device, self.delay = device, delay
        self.cache = make_cache(config, device)
        self.indexes = [KeyList(layer, self.cache) for layer in range(LAYERS)]
        self.requests: dict[int, int] = {}  # request of each decoding slot

    def close(self, slot: int) -> None:
        self.requests.pop(slot, None)
        self.cache.close(slot)

    def prefill(self, request: int, slot: int, prompt: int, limit: int) -> Iterator[int]:
        """Read a prompt; yields after every layer."""
        self.cache.open(slot, limit)
        self.cache.begin_prefill(slot, prompt)
        for layer in range(LAYERS):
            keys = rows_of(request, layer, torch.arange(prompt)).to(self.device)
            values = -keys
            sink, n = self.cache.config.sink, self.cache.lengths[slot]
            self.delay()
            self.indexes[layer].build(slot, keys[:, sink : sink + n], keys)
            self.cache.write_prompt(layer, slot, keys, values)
            keys.fill_(torch.nan)  # write_prompt lets the caller overwrite its arguments
            values.fill_(torch.nan)
            yield layer
        self.cache.finish_prompt(slot)
        self.requests[slot] = request

    def step(self) -> None:
        """One decode step of all decoding slots."""
        cache, slots = self.cache, list(self.requests)
        if not slots:
            return
        sink, update = cache.config.sink, cache.config.update
        full = [slot for slot in slots if cache.tokens[slot] - sink - cache.lengths[slot] == cache.ring]
        due = [cache.lengths[slot] + update * (slot in full) for slot in slots]
        cache.begin_step(slots, self.indexes)
        assert [cache.lengths[slot] for slot in slots] == due
        rows = {slot: cache.state(slot, 0, (), dense=False).write_row for slot in slots}
        for layer in range(LAYERS):
            keys = [rows_of(self.requests[s], layer, torch.tensor([cache.tokens[s] - 1]))[:, 0] for s in slots]
            written = torch.stack((torch.stack(keys), -torch.stack(keys)), dim=2).to(self.device)
            self.delay()
            for slot, row in zip(slots, written, strict=True):
                cache.window[layer, slot, :, rows[slot]] = row
        cache.end_step(slots, self.indexes)

    def check_contents(self) -> None:
        """What all decoding slots say of themselves, all of their rows, and the keys of their indexes."""
        cache = self.cache
        for slot, request in self.requests.items():
            n, sink, tokens = cache.lengths[slot], cache.config.sink, cache.tokens[slot]
            state = cache.state(slot, 7, (3,), dense=False)
            assert (state.token, state.slot, state.position, state.method_fields) == (7, slot, tokens - 1, (3,))
            assert (state.length, state.sink_rows + state.ring_rows + n) == (n, tokens)
            assert n == 0 or state.ring_rows >= cache.config.local, "the local window is never shorter than asked for"
            batch = Batch.of([state], cache.extents.device_table)
            near = torch.cat((torch.arange(min(sink, tokens)), torch.arange(min(sink + n, tokens), tokens)))
            for layer in range(LAYERS):
                check_rows(window_rows(batch, 0, cache.window[layer], sink).cpu(), rows_of(request, layer, near))
                far = rows_of(request, layer, torch.arange(sink, sink + n))
                check_rows(read_rows(cache, layer, slot), far)
                assert torch.equal(self.indexes[layer].visible[slot].cpu(), far)


def check_rows(found: Tensor, keys: Tensor) -> None:
    """Rows [KV_HEADS, n, 2, DIM] are these keys and the negatives of them."""
    assert torch.equal(found, torch.stack((keys, -keys), dim=2))
