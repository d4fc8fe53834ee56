"""The four-region cache: every token is held once, in order, in the region where it belongs."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kvseek.core.config import EXTENT_TOKENS, CacheConfig, EngineConfig, ModelConfig
from kvseek.core.errors import CapacityError
from kvseek.core.extents import ExtentTable
from kvseek.engine.cache.cache import Cache

MODEL = ModelConfig("llama", 16, 8, 8, 2, 2, 1, 2, 1e-5, 1e4, 1 << 20)


def make_cache(sink: int, local: int, update: int, slots: int = 2, tokens: int = 4096) -> Cache:
    cache_config = CacheConfig(sink=sink, local=local, update=update)
    config = EngineConfig(
        MODEL, "full", cache=cache_config, max_batch_size=slots, max_seq_len=tokens, max_input_len=tokens
    )
    return Cache(config, torch.float32, torch.device("cpu"))


def numbered(positions: torch.Tensor, layer: int) -> torch.Tensor:
    """Keys [1, n, 2] that say which token and layer they belong to."""
    return torch.stack((positions.float(), torch.full_like(positions, layer).float()), dim=-1)[None]


@settings(deadline=None, max_examples=60)
@given(
    sink=st.integers(0, 9),
    local=st.integers(1, 12),
    update=st.integers(1, 9),
    prompt=st.integers(1, 2100),
    steps=st.integers(0, 60),
)
def test_every_token_is_held_once_and_in_order(sink: int, local: int, update: int, prompt: int, steps: int) -> None:
    cache, slot = make_cache(sink, local, update), 1
    cache.open(slot, prompt + steps)
    cache.begin_prefill(slot, prompt)
    for layer in range(2):
        keys = numbered(torch.arange(prompt), layer)
        cache.write_prompt(layer, slot, keys, -keys)
    for position in range(prompt, prompt + steps):
        for eviction in cache.advance([slot]):
            expected = numbered(torch.arange(eviction.start, eviction.start + eviction.count) + sink, 1)
            assert torch.equal(cache.evicted_keys(1, eviction), expected)
        for layer in range(2):
            row = numbered(torch.tensor([position]), layer)
            cache.append(layer, [slot], row, -row)
    total, retrieval = prompt + steps, cache.lengths[slot]
    assert cache.tokens[slot] == total
    assert total - sink - retrieval <= local + update
    assert retrieval == 0 or total - sink - retrieval >= local, "the local window is never shorter than asked for"
    for layer in range(2):
        view = cache.view(layer, [slot], *cache.describe([slot]))
        window, rows = view.window_rows(0), view.retrieval_rows(0)
        first = min(sink, total)
        held = torch.cat([window[:, :first], rows, window[:, first:]], dim=1)
        expected = numbered(torch.arange(total), layer)
        assert torch.equal(held[:, :, 0], expected)
        assert torch.equal(held[:, :, 1], -expected)


def test_extents_are_reserved_and_returned() -> None:
    table = ExtentTable(slots=2, max_extents=3, capacity=4)
    table.reserve(0, 2 * EXTENT_TOKENS + 1)
    assert table.free == 1
    with pytest.raises(CapacityError, match="2 more extents of 1024 tokens, 1 of 4 are free"):
        table.reserve(1, EXTENT_TOKENS + 1)
    assert table.free == 1, "a refused reservation changes nothing"
    table.release(0)
    assert table.free == 4
    assert (table.table == -1).all()


def test_a_slot_never_gets_more_extents_than_its_table_holds() -> None:
    table = ExtentTable(slots=1, max_extents=2, capacity=9)
    table.reserve(0, 10)
    table.reserve(0, EXTENT_TOKENS + 1)
    assert table.room(0) == 2 * EXTENT_TOKENS
    assert sorted(table.table[0].tolist()) == [0, 1]
    with pytest.raises(CapacityError, match=r"2049 retrieval tokens need 3 extents .*at most 2; .*max_seq_len"):
        table.reserve(0, 2 * EXTENT_TOKENS + 1)
    assert table.free == 7, "a refused reservation changes nothing"
    assert torch.equal(table.device_table, table.table)


def test_a_reservation_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    table = ExtentTable(slots=1, max_extents=3, capacity=4)
    table.reserve(0, 10)

    def fail(slot: int, row: torch.Tensor) -> None:
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(table, "_upload", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            table.reserve(0, 3 * EXTENT_TOKENS)
    assert (table.free, table.room(0), table.table.tolist()) == (3, EXTENT_TOKENS, [[0, -1, -1]])
    table.reserve(0, 3 * EXTENT_TOKENS)
    assert (table.free, table.table.tolist()) == (1, [[0, 1, 2]])


def test_rows_cross_extent_borders() -> None:
    table = ExtentTable(slots=1, max_extents=3, capacity=3)
    table.reserve(0, 3 * EXTENT_TOKENS)
    array = torch.zeros(3, 1, EXTENT_TOKENS, 1)
    values = torch.arange(2.0 * EXTENT_TOKENS)[None, :, None]
    table.write(array, 0, 500, values)
    assert torch.equal(table.read(array, 0, 2 * EXTENT_TOKENS + 500)[:, 500:], values)


def test_the_pool_respects_its_budget() -> None:
    extent_bytes = 2 * 1 * EXTENT_TOKENS * 2 * 2 * 4  # layers, KV heads, tokens, K and V, D, float32
    cache_config = CacheConfig(kv_cache_host_memory_bytes=3 * extent_bytes + 1)
    config = EngineConfig(MODEL, "full", cache=cache_config, max_seq_len=8192)
    assert Cache(config, torch.float32, torch.device("cpu")).extents.capacity == 3
