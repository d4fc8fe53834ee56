"""A Cache and a DeviceCache that are given the same requests; for the tests of DeviceCache on the CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS, CacheConfig, EngineConfig, ModelConfig
from kvseek.engine.cache.cache import Cache
from kvseek.engine.cache.memory_layout import layer_extent_bytes
from kvseek.plugins.batch import DeviceBatch
from kvseek.plugins.contract import DeviceIndex, IndexContext
from kvseek.plugins.selection import DeviceSelection

CPU = torch.device("cpu")
LAYERS, KV_HEADS, DIM, SLOTS = 3, 2, 4, 3
MODEL = ModelConfig("llama", 16, 8, 8, LAYERS, 4, KV_HEADS, DIM, 1e-5, 1e4, 1 << 20)


class KeyList(DeviceIndex):
    """Keeps the keys that it is given, by slot and position, as staged and as visible."""

    def __init__(self, layer: int, lengths: list[int], cache: Cache) -> None:
        settings = (None, {}, cache.extents, lengths, torch.float32, cache.window.device, None)
        super().__init__(IndexContext(layer, 4, KV_HEADS, DIM, 1.0, *settings))
        self.staged: dict[int, Tensor] = {}
        self.visible: dict[int, Tensor] = {}

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        self.visible[slot] = keys.clone()

    def stage(self, slot: int, start: int, keys: Tensor) -> None:
        assert start == self.visible[slot].shape[1] == self.context.lengths[slot]
        assert keys.is_contiguous()
        self.staged[slot] = keys.clone()

    def commit(self, slot: int, start: int, count: int) -> None:
        assert start + count == self.context.lengths[slot]
        assert self.staged[slot].shape[1] == count
        self.visible[slot] = torch.cat([self.visible[slot], self.staged.pop(slot)], dim=1)

    def plan(self, length: int) -> tuple[int, ...]:
        return ()

    def attended(self, length: int) -> int:
        return length

    def launch_select(self, queries: Tensor, batch: DeviceBatch) -> DeviceSelection | None:
        return None

    @property
    def bytes_per_token(self) -> float:
        return 4.0 * KV_HEADS * DIM


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


def rows_of(request: int, layer: int, positions: Tensor) -> Tensor:
    """Keys [KV_HEADS, n, DIM] that say which request, layer, KV head and token they belong to."""
    heads = torch.arange(KV_HEADS)[:, None].expand(-1, len(positions))
    parts = (torch.full_like(heads, request), torch.full_like(heads, layer), heads, positions.expand_as(heads))
    return torch.stack(parts, dim=-1).float()


class Twins:
    """A Cache and a DeviceCache that hold the same requests, and the indexes of the latter."""

    def __init__(
        self, config: EngineConfig, device: torch.device = CPU, delay: Callable[[], None] = lambda: None
    ) -> None:
        """`delay` holds the current stream up before each write."""
        self.device, self.delay = device, delay
        self.reference = Cache(config, torch.float32, CPU)
        self.cache = DeviceCache(config, torch.float32, device, None)
        self.indexes = [KeyList(layer, self.cache.lengths, self.cache) for layer in range(LAYERS)]
        self.requests: dict[int, int] = {}  # request of each decoding slot

    def close(self, slot: int) -> None:
        self.requests.pop(slot, None)
        self.reference.close(slot)
        self.cache.close(slot)

    def prefill(self, request: int, slot: int, prompt: int, limit: int) -> Iterator[int]:
        """Read a prompt; yields after every layer."""
        for cache in (self.reference, self.cache):
            cache.open(slot, limit)
            cache.begin_prefill(slot, prompt)
        for layer in range(LAYERS):
            keys = rows_of(request, layer, torch.arange(prompt))
            values = -keys
            self.reference.write_prompt(layer, slot, keys, values)
            keys, values = keys.to(self.device), values.to(self.device)
            self.delay()
            self.cache.write_prompt(layer, slot, keys, values)
            sink, n = self.cache.config.sink, self.cache.lengths[slot]
            self.indexes[layer].build(slot, keys[:, sink : sink + n], keys)
            keys.fill_(torch.nan)  # write_prompt lets the caller overwrite its arguments
            values.fill_(torch.nan)
            yield layer
        self.cache.finish_prompt(slot)
        self.requests[slot] = request

    def step(self) -> None:
        """One decode step of all decoding slots."""
        slots = list(self.requests)
        if not slots:
            return
        evictions = self.reference.advance(slots)
        assert self.cache.begin_step(slots, self.indexes) == evictions
        for layer in range(LAYERS):
            parts = [
                rows_of(self.requests[s], layer, torch.tensor([self.reference.tokens[s] - 1]))[:, 0] for s in slots
            ]
            keys = torch.stack(parts)
            self.reference.append(layer, slots, keys, -keys)
            keys = keys.to(self.device)
            self.delay()
            self.cache.append(layer, slots, keys, -keys)
        self.cache.end_step(slots, self.indexes)
        self.check_states(slots)  # afterwards: it waits for the device

    def check_states(self, slots: list[int]) -> None:
        window_tokens, lengths = self.reference.describe(slots)
        for number, slot in enumerate(slots):
            state = self.cache.state(slot, 7, (3,), dense=False)
            position = self.reference.tokens[slot] - 1
            assert (state.token, state.slot, state.position, state.plan) == (7, slot, position, (3,))
            assert [state.sink_rows, state.ring_first, state.ring_rows] == window_tokens[number].tolist()
            assert state.length == lengths[number]
            written = self.cache.window[0, slot, 0, state.write_row, 0]
            assert written.tolist() == [self.requests[slot], 0, 0, position]

    def check_contents(self) -> None:
        """All rows of all decoding slots, and the keys of their indexes."""
        for slot, request in self.requests.items():
            n, sink = self.cache.lengths[slot], self.cache.config.sink
            described = self.cache.describe([slot])
            for layer in range(LAYERS):
                ours, reference = (cache.view(layer, [slot], *described) for cache in (self.cache, self.reference))
                assert torch.equal(ours.window_rows(0).cpu(), reference.window_rows(0))
                expected = rows_of(request, layer, torch.arange(sink, sink + n))
                rows = self.cache.read_rows(layer, slot, n).cpu()
                assert torch.equal(rows, torch.stack((expected, -expected), dim=2))
                assert torch.equal(rows, reference.retrieval_rows(0))
                assert torch.equal(self.indexes[layer].visible[slot].cpu(), expected)
