"""DeviceCache against Cache, on the CPU: the same tokens in the same places, whenever the side work runs.

Side work runs at the earliest moment (at once, as on the CPU) or at the latest (when something waits for it), which is
where a missing wait or an early reuse shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tests.support.cache_twins import CPU, DIM, LAYERS, SLOTS, Twins, make_config, rows_of

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.errors import CapacityError
from kvseek.core.streams import SideStream, Ticket
from kvseek.engine.cache.cache import COPIES_IN_FLIGHT, DeviceCache
from kvseek.engine.cache.cache.host_cache import device_cache


class LateTicket(Ticket):
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
        self.pending: deque[Ticket] = deque()
        self.works: deque[Callable[[], None]] = deque()

    def run(self, work: Callable[[], None]) -> Ticket:
        ticket = LateTicket(self)
        self.pending.append(ticket)
        self.works.append(work)
        return ticket


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
def test_the_same_as_the_synchronous_cache(
    sink: int, local: int, update: int, device_layers: int, late: bool, events: list[tuple[int, int, int, bool]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_cache, "SideStream", LateStream if late else SideStream)
        twins = Twins(make_config(sink, local, update, device_layers=device_layers))
    assert twins.cache.plan.device_layers == device_layers
    total = sum(steps + LAYERS for _, _, steps, _ in events)
    for request, (slot, prompt, steps, cancelled) in enumerate(events):
        twins.close(slot)
        for layer in twins.prefill(request, slot, prompt, prompt + total):
            twins.step()
            if cancelled and layer == 1:
                twins.close(slot)
                break
        for _ in range(steps):
            twins.step()
        twins.check_contents()
    for slot in range(SLOTS):
        twins.close(slot)
    assert twins.cache.extents.free == twins.cache.extents.capacity


def decode(twins: Twins, prompt: int, steps: int, limit: int | None = None) -> None:
    for _ in twins.prefill(1, 0, prompt, limit or prompt + steps):
        pass
    for _ in range(steps):
        twins.step()


@pytest.mark.parametrize(
    ("local", "update", "ahead"), [(256, 256, 32), (256, 16, 16), (8, 16, 8), (1, 256, 1), (40, 33, 32)]
)
def test_evictions_start_ahead_of_time(local: int, update: int, ahead: int) -> None:
    twins = Twins(make_config(2, local, update))
    assert twins.cache.evict_ahead == ahead
    steps = max(0, update - ahead - 1)  # the ring holds local tokens after the prompt
    decode(twins, 1500, steps, limit=3000)
    assert not twins.indexes[0].staged
    twins.step()
    assert twins.indexes[0].staged[0].shape[1] == update, "the next eviction is staged"
    assert twins.cache.lengths[0] == 1500 - 2 - local, "but not visible"
    for _ in range(update - steps - 1):
        twins.step()
    assert twins.cache.lengths[0] == 1500 - 2 - local, "the ring is full"
    twins.step()
    assert twins.cache.lengths[0] == 1500 - 2 - local + update
    twins.check_contents()


def test_evictions_cross_extent_borders() -> None:
    twins = Twins(make_config(0, 20, 16))
    decode(twins, EXTENT_TOKENS + 20 - 5, 40)  # 1,019 retrieval tokens: the first eviction goes to two extents
    assert twins.cache.lengths[0] == EXTENT_TOKENS - 5 + 2 * 16
    twins.check_contents()


def test_a_request_that_ends_before_its_eviction_needs_no_extent_for_it() -> None:
    twins = Twins(make_config(4, 40, 32))
    prompt = 4 + 40 + EXTENT_TOKENS  # the first extent is full
    decode(twins, prompt, 31, limit=prompt + 31)
    assert twins.cache.extents.room(0) > EXTENT_TOKENS, "31 more tokens would be evicted one day"
    twins = Twins(make_config(4, 40, 32))
    decode(twins, prompt, 31, limit=prompt)
    assert twins.cache.extents.room(0) == EXTENT_TOKENS
    assert not twins.indexes[0].staged
    twins.step()
    with pytest.raises(CapacityError, match="slot 0 with 1100 tokens needs room for 1056 retrieval tokens, 1024 are"):
        twins.cache.begin_step([0], twins.indexes)


def test_evictions_that_memory_does_not_suffice_for_follow_when_due(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(make_config(2, 40, 33))
    stage, end_step, failed = twins.indexes[1].stage, twins.cache.end_step, []

    def fail(slot: int, start: int, keys: torch.Tensor) -> None:
        failed.append(slot)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def end_step_without_memory(*arguments: Any) -> None:
        monkeypatch.setattr(twins.indexes[1], "stage", fail)
        end_step(*arguments)
        monkeypatch.setattr(twins.indexes[1], "stage", stage)

    monkeypatch.setattr(twins.cache, "end_step", end_step_without_memory)
    decode(twins, 1500, 70)
    assert failed
    assert twins.cache.lengths[0] == 1500 - 2 - 40 + 2 * 33
    twins.check_contents()


def test_few_layers_of_a_prompt_wait_for_their_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_cache, "SideStream", LateStream)
    twins = Twins(make_config(4, 8, 8, offload="always"))
    waiting = [len(twins.cache._offload_stream.pending) for _ in twins.prefill(1, 2, 1500, 1500)]  # type: ignore[attr-defined]
    assert waiting == [1, 2, COPIES_IN_FLIGHT]
    assert not twins.cache._in_flight
    twins.check_contents()


def test_a_cancelled_prompt_does_not_reach_the_next_owner_of_its_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_cache, "SideStream", LateStream)
    twins = Twins(make_config(4, 8, 8, offload="always"))
    next(twins.prefill(1, 0, 1500, 1500))  # layer 0 is on its way to the host
    twins.close(0)
    twins.cache.adopt(1, 1500)
    keys = rows_of(2, 0, torch.arange(1488))
    twins.cache.write_rows(0, 1, 0, torch.stack((keys, keys), dim=2))
    for work in twins.cache._offload_stream.works:  # type: ignore[attr-defined]
        work()
    assert torch.equal(twins.cache.read_rows(0, 1, 1488)[:, :, 0], keys)


def test_pointers_and_strides_lead_to_the_rows() -> None:
    for device_layers in range(LAYERS + 1):
        cache = DeviceCache(make_config(4, 8, 8, device_layers=device_layers), torch.float32, CPU, None)
        for layer in range(LAYERS):
            rows = cache.layer_rows(layer)
            assert cache.rows_pointer(layer) == rows.data_ptr()
            assert cache.extent_stride(layer) == rows.stride(0)
            assert rows.stride()[1:] == (EXTENT_TOKENS * 2 * DIM, 2 * DIM, DIM, 1)
            assert (rows.untyped_storage().data_ptr() == cache.device_rows.untyped_storage().data_ptr()) == (
                layer < device_layers
            )


def test_adopted_slots_decode_on() -> None:
    twins = Twins(make_config(4, 8, 8))
    twins.cache.adopt(1, 3000, room=100)
    assert (twins.cache.tokens[1], twins.cache.lengths[1]) == (3000, 3000 - 4 - 8)
    assert twins.cache.extents.room(1) == 4096
    keys = rows_of(5, 2, torch.arange(2988))
    rows = torch.stack((keys, -keys), dim=2)
    twins.cache.write_rows(2, 1, 0, rows[:, :1500])
    twins.cache.write_rows(2, 1, 1500, rows[:, 1500:])
    assert torch.equal(twins.cache.read_rows(2, 1, 2988), rows)
    twins.cache.adopt(1, 50)
    assert twins.cache.extents.free == twins.cache.extents.capacity - 1, "adopting again gives back what was held"


@pytest.mark.parametrize("sink", [0, 4])
def test_padding_requests_have_a_slot_of_their_own(sink: int) -> None:
    cache = DeviceCache(make_config(sink, 8, 8), torch.float32, CPU, None)
    state = cache.padding_state()
    assert (state.slot, state.position, state.write_row, state.length, state.dense) == (SLOTS, 0, 0, 0, True)
    assert state.sink_rows + state.ring_rows == 1, "one row to attend to: no division by zero"
    assert cache.window.shape[1] == len(cache.lengths) == cache.extents.device_table.shape[0] == SLOTS + 1


def test_rows_that_the_device_cannot_hold_are_refused() -> None:
    config = make_config(4, 8, 8, offload="never")
    with pytest.raises(CapacityError, match=r"'never' needs [\d,]+ bytes of rows on the device, 1,000 are free"):
        DeviceCache(config, torch.float32, CPU, 1000)
    assert DeviceCache(config, torch.float32, CPU, 1 << 30).plan.host_layers == 0
