"""The cache, on the CPU: every token is held once, in order, where it belongs, whenever the side work runs.

Side work runs at the earliest moment (at once, as on the CPU) or at the latest (when something waits for it), which is
where a missing wait or an early reuse shows.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tests.support.cache_runs import CPU, DIM, LAYERS, SLOTS, CacheRun, make_cache, make_config

from kvseek.core.config import EXTENT_TOKENS, CacheConfig
from kvseek.core.errors import CapacityError
from kvseek.core.streams import SideStream, SideWork
from kvseek.engine.cache import cache as cache_module
from kvseek.engine.cache.cache import COPIES_IN_FLIGHT, Cache
from kvseek.engine.cache.memory_layout import host_rows, lay_out_rows, layer_extent_bytes
from kvseek.engine.cache.row_storage import RowStorage


class LateWork(SideWork):
    """Runs what its stream was given, up to and including its own work, when it is waited for."""

    def __init__(self, stream: LateStream) -> None:
        super().__init__(CPU, None)
        self._stream = stream

    @property
    def done(self) -> bool:
        return self not in self._stream.pending

    def wait(self) -> None:
        while self in self._stream.pending:
            self._stream.pending.popleft()
            self._stream.works.popleft()()


class LateStream(SideStream):
    """Puts work off for as long as nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.pending: deque[SideWork] = deque()
        self.works: deque[Callable[[], None]] = deque()

    def run(self, work: Callable[[], None], read: tuple[torch.Tensor, ...] = ()) -> SideWork:
        late = LateWork(self)
        self.pending.append(late)
        self.works.append(work)
        return late


# What happens to a slot: (slot, prompt, decode steps after it, cancelled while its prompt is read).
PROMPTS = st.integers(1, 40) | st.integers(1000, 1060) | st.integers(2030, 2060)
EVENTS = st.lists(st.tuples(st.integers(0, SLOTS - 1), PROMPTS, st.integers(0, 25), st.booleans()), max_size=5)


@settings(deadline=None, max_examples=80)
@given(
    sink=st.integers(0, 5),
    local=st.integers(1, 12),
    update=st.integers(1, 12),
    device_layers=st.integers(0, LAYERS),
    late=st.booleans(),
    events=EVENTS,
)
def test_every_token_is_held_once_and_in_order(
    sink: int, local: int, update: int, device_layers: int, late: bool, events: list[tuple[int, int, int, bool]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "SideStream", LateStream if late else SideStream)
        run = CacheRun(make_config(sink, local, update, device_layers=device_layers))
    assert run.cache.rows.layout.device_layers == device_layers
    total = sum(steps + LAYERS for _, _, steps, _ in events)
    for request, (slot, prompt, steps, cancelled) in enumerate(events):
        run.close(slot)
        for layer in run.prefill(request, slot, prompt, prompt + total):
            run.step()
            if cancelled and layer == 1:
                run.close(slot)
                break
        for _ in range(steps):
            run.step()
        run.check_contents()
    for slot in range(SLOTS):
        run.close(slot)
    assert run.cache.extents.free == run.cache.extents.capacity


def decode(run: CacheRun, prompt: int, steps: int, limit: int | None = None) -> None:
    for _ in run.prefill(1, 0, prompt, limit or prompt + steps):
        pass
    for _ in range(steps):
        run.step()


@pytest.mark.parametrize(
    ("local", "update", "ahead"), [(256, 256, 32), (256, 16, 16), (8, 16, 8), (1, 256, 1), (40, 33, 32)]
)
def test_evictions_start_ahead_of_time(local: int, update: int, ahead: int) -> None:
    run = CacheRun(make_config(2, local, update))
    assert run.cache.evict_ahead == ahead
    length = 1024 // update * update
    steps = max(0, update - ahead - 1)  # the ring holds local + 1 tokens after the prompt
    decode(run, 2 + length + local + 1, max(0, steps - 1), limit=3000)
    assert run.cache.lengths[0] == length
    assert not run.indexes[0].appended
    run.step()
    assert run.indexes[0].appended[0].shape[1] == update, "the next eviction is taken in"
    assert run.cache.lengths[0] == length, "but not visible"
    for _ in range(update - max(1, steps) - 1):
        run.step()
    assert run.cache.lengths[0] == length, "the ring is full"
    run.step()
    assert run.cache.lengths[0] == length + update
    run.check_contents()


def test_evictions_cross_extent_borders() -> None:
    run = CacheRun(make_config(0, 20, 15))
    decode(run, EXTENT_TOKENS + 20, 40)  # 1,020 retrieval tokens: the first eviction goes to two extents
    assert run.cache.lengths[0] == 1020 + 2 * 15
    run.check_contents()


def test_a_request_that_ends_before_its_eviction_needs_no_extent_for_it() -> None:
    run = CacheRun(make_config(4, 40, 32))
    prompt = 4 + 40 + EXTENT_TOKENS + 1  # the first extent is full
    decode(run, prompt, 31, limit=prompt + 31)
    assert run.cache.extents.room(0) == EXTENT_TOKENS
    assert not run.indexes[0].appended
    with pytest.raises(CapacityError, match="slot 0 with 1100 tokens needs room for 1056 retrieval tokens, 1024 are"):
        run.cache.begin_step([0], run.indexes)


def test_evictions_that_memory_does_not_suffice_for_follow_when_due(monkeypatch: pytest.MonkeyPatch) -> None:
    run = CacheRun(make_config(2, 40, 33))
    append, end_step, failed = run.indexes[1].append, run.cache.end_step, []

    def fail(slot: int, start: int, keys: torch.Tensor) -> None:
        failed.append(slot)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def end_step_without_memory(*arguments: Any) -> None:
        monkeypatch.setattr(run.indexes[1], "append", fail)
        end_step(*arguments)
        monkeypatch.setattr(run.indexes[1], "append", append)

    monkeypatch.setattr(run.cache, "end_step", end_step_without_memory)
    decode(run, 1500, 70)
    assert failed
    assert run.cache.lengths[0] == (1570 - 1 - 2 - 40) // 33 * 33
    run.check_contents()


def test_few_layers_of_a_prompt_wait_for_their_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "SideStream", LateStream)
    run = CacheRun(make_config(4, 8, 8, offload="always"))
    waiting = [len(run.cache._offload_stream.pending) for _ in run.prefill(1, 2, 1500, 1500)]  # type: ignore[attr-defined]
    assert waiting == [1, 2, COPIES_IN_FLIGHT]
    run.check_contents()


@pytest.mark.parametrize("device_layers", range(LAYERS + 1))
def test_pointers_and_strides_lead_to_the_rows(device_layers: int) -> None:
    cache = make_cache(make_config(4, 8, 8, device_layers=device_layers))
    for layer in range(LAYERS):
        rows = cache.rows.of_layer(layer)
        assert rows.pointer == rows.pool.data_ptr()
        assert rows.extent_stride == rows.pool.stride(0)
        assert rows.pool.stride()[1:] == (EXTENT_TOKENS * 2 * DIM, 2 * DIM, DIM, 1)
        storage = cache.rows.device_rows if layer < device_layers else cache.rows.pool.rows
        assert rows.pool.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr()


@pytest.mark.parametrize("sink", [0, 4])
def test_padding_requests_have_a_slot_of_their_own(sink: int) -> None:
    cache = make_cache(make_config(sink, 8, 8))
    state = cache.padding_state()
    assert (state.slot, state.position, state.write_row, state.length, state.dense) == (SLOTS, 0, 0, 0, True)
    assert state.sink_rows + state.ring_rows == 1, "one row to attend to: no division by zero"
    assert cache.window.shape[1] == len(cache.lengths) == cache.extents.device_table.shape[0] == SLOTS + 1


def test_rows_that_the_device_cannot_hold_are_refused() -> None:
    config = make_config(4, 8, 8, offload="never")
    with pytest.raises(CapacityError, match=r"'never' needs [\d,]+ bytes of rows on the device, 1,000 are free"):
        lay_out_rows(config, torch.float32, 1000)
    assert lay_out_rows(config, torch.float32, 1 << 30).host_layers == 0


def test_the_pool_of_a_cpu_engine_respects_its_budget() -> None:
    config = make_config(4, 8, 8)
    budget = 3 * LAYERS * layer_extent_bytes(config, torch.float32) + 1
    limits = CacheConfig(4, 8, 8, kv_cache_host_memory_bytes=budget)
    config = dataclasses.replace(config, device="cpu", cache=limits)
    rows = RowStorage(config, torch.float32, CPU, host_rows(config, torch.float32))
    cache = Cache(config, torch.float32, CPU, rows)
    assert cache.extents.capacity == len(rows.pool.rows) == 3
    assert cache.evict_ahead == 0, "beside the steps of a CPU there is nothing to gain"
    assert cache.window.shape[1] == len(cache.lengths) == cache.extents.table.shape[0] == SLOTS, "nothing is filled up"
