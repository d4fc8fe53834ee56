"""The four-region cache of an engine on the GPU: windows on the device, rows on the device or in pinned host memory.

Nothing here waits for the device. Rows travel on side streams: those of a prompt while the next layer computes, those
that will leave the window some steps before they do (docs/memory.md). On the CPU the same code runs synchronously.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS, EngineConfig
from kvseek.core.errors import CapacityError
from kvseek.core.streams import SideStream, Ticket
from kvseek.plugins.batch import RequestState
from kvseek.plugins.contract import LayerRows

from .host_cache import Cache, Eviction
from .host_pool import HostPool
from .memory_layout import RowPlan, plan_rows

if TYPE_CHECKING:
    from kvseek.plugins.contract import DeviceIndex

EVICT_AHEAD = 32  # most decode steps between the copy of rows that leave the window and the step where they leave
COPIES_IN_FLIGHT = 2  # layers of a prompt whose rows wait on the device for their copy to the host

logger = logging.getLogger(__name__)
Span = tuple[int, slice, slice]  # extent, positions in it, positions in what is written (ExtentTable.spans)


@dataclass(frozen=True)
class StagedEviction:
    """Tokens whose rows and index entries are written, or being written, but that are still in the window."""

    eviction: Eviction
    ticket: Ticket


class DeviceCache(Cache):
    """Rows of all layers and slots; `window` and `lengths` have one slot more, for the padding requests of a graph.

    Attributes
    ----------
    window : Tensor [layers, slots + 1, G, window, 2, D], on the device
        Window rows; row sink + (p - sink) mod (local + update) holds the token at position p >= sink.
    plan : RowPlan
        Extents, and the layers (the first ones) whose rows lie on the device.
    device_rows : Tensor [extents, device layers, G, 1024, 2, D], on the device
    pool : HostPool
        Rows of the other layers.
    padding_slot : int
        The last slot: it holds one token, which every padding request overwrites.
    """

    def __init__(
        self, config: EngineConfig, dtype: torch.dtype, device: torch.device, device_row_bytes: int | None
    ) -> None:
        """Allocate windows and rows.

        Parameters
        ----------
        device_row_bytes : int or None
            Device memory that rows may use (MemoryPlan.device_row_bytes); None: what kv_cache_device_memory_bytes allows.

        Raises
        ------
        CapacityError
            If the rows fit neither the budgets nor the memory.
        """
        model = config.model
        self.plan = plan_rows(config, dtype, device_row_bytes)
        self._start_slots(config, dtype, device)
        self.pool = HostPool(
            self.plan.capacity, self.plan.host_layers, model.num_kv_heads, model.head_dim, dtype, device
        )
        self.device_rows = _device_rows(self.plan, self.pool.rows.shape[2:], dtype, device)
        self._offload_stream, self._evict_stream = SideStream(device), SideStream(device)
        self._in_flight: deque[tuple[int, Ticket, Tensor]] = deque()  # slot, and rows on their way to the host
        self._staged: dict[int, StagedEviction] = {}

    def _start_slots(self, config: EngineConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.padding_slot = config.max_batch_size
        self._start(config, config.max_batch_size + 1, self.plan.capacity, dtype, device)
        self.tokens[self.padding_slot] = 1
        self.evict_ahead = min(EVICT_AHEAD, self.config.update, self.config.local)

    def lay_out(self, config: EngineConfig) -> None:
        """Forget all requests, and take the slots and windows of `config` over the rows that there are.

        For benchmarks: pinning rows anew takes long. Indexes and decoders made for the cache before are of no more use.

        Raises
        ------
        CapacityError
            If the windows do not fit into the device's memory.
        """
        for slot in range(self.padding_slot):
            self.close(slot)
        self._start_slots(config, self.window.dtype, self.window.device)

    def rows_pointer(self, layer: int) -> int:
        """Where kernels find the layer's rows: the address of extent 0, KV head 0, position 0."""
        d = self.plan.device_layers
        base, number = (self.device_rows.data_ptr(), layer) if layer < d else (self.pool.device_pointer, layer - d)
        return base + number * self.plan.layer_bytes

    def extent_stride(self, layer: int) -> int:
        """Numbers from one extent of the layer's rows to the next."""
        layers = self.plan.device_layers if layer < self.plan.device_layers else self.plan.host_layers
        return layers * self.plan.layer_bytes // self.window.element_size()

    def layer_rows(self, layer: int) -> Tensor:
        """See Cache.layer_rows: on the device or, of the other layers, on the CPU. The caller orders its accesses."""
        d = self.plan.device_layers
        return self.device_rows[:, layer] if layer < d else self.pool.rows[:, layer - d]

    def rows_of(self, layer: int) -> LayerRows:
        """See Cache.rows_of."""
        return LayerRows(self.layer_rows(layer), self.rows_pointer(layer), self.extent_stride(layer))

    def read_rows(self, layer: int, slot: int, length: int) -> Tensor:
        """Copy of the first `length` retrieval rows, [G, length, 2, D], where they lie. Waits for the device."""
        if self.window.is_cuda:
            torch.cuda.synchronize(self.window.device)
        return self.extents.read(self.layer_rows(layer), slot, length)

    def close(self, slot: int) -> None:
        """Forget a slot and give its extents back; what is still being written to them ends before they are used again.

        All later writes to the extents follow the current stream, so it is enough that this one waits.
        """
        self.finish_prompt(slot)
        staged = self._staged.pop(slot, None)
        if staged is not None:
            staged.ticket.wait()
        super().close(slot)

    def adopt(self, slot: int, tokens: int, room: int = 0) -> None:
        """Open a slot as if a prompt of `tokens` tokens had been read, with extents for `room` further tokens.

        For benchmarks and tests: the caller writes the rows (write_rows) and builds the indexes.
        """
        self.close(slot)
        self.open(slot, tokens + room)
        self.begin_prefill(slot, tokens)

    def write_rows(self, layer: int, slot: int, start: int, rows: Tensor) -> None:
        """Write rows [G, n, 2, D] at retrieval positions start .. start + n - 1, on the current stream."""
        rows = rows.to(self.window.device).contiguous()
        self._write(layer, rows[None], self.extents.spans(slot, start, start + rows.shape[1]))

    def write_prompt(self, layer: int, slot: int, keys: Tensor, values: Tensor, order: Tensor | None = None) -> None:
        """See Cache.write_prompt. The arguments may be overwritten after the call.

        Rows for the host are copied on a side stream; `finish_prompt`
        must come before the rows are read.
        """
        n = self.lengths[slot]
        self._reclaim(COPIES_IN_FLIGHT - 1)
        rows = torch.stack((keys, values), dim=2)
        self._write_prompt_window(layer, slot, rows)
        rows = self._retrieval_rows(slot, rows, order)
        retrieval = rows[None]
        spans = self.extents.spans(slot, 0, n)
        if layer < self.plan.device_layers:
            self._write(layer, retrieval, spans)
        elif n:
            ticket = self._offload_stream.run(lambda: self._write(layer, retrieval, spans))
            self._in_flight.append((slot, ticket, rows))

    def finish_prompt(self, slot: int) -> None:
        """Make the current stream wait until the rows of the slot's prompt are in the pool."""
        if any(owner == slot for owner, _, _ in self._in_flight):
            self._reclaim(0)

    def begin_step(self, slots: Sequence[int], indexes: Sequence[DeviceIndex]) -> list[Eviction]:
        """Count one more token per slot; of full rings, the oldest `update` tokens pass to the retrieval region first.

        Returns what passed. The current stream waits for the copies and index entries that `end_step` started; those
        that it did not start are made here.
        """
        committed = []
        for slot in slots:
            if self._in_ring(slot) == self.ring:
                committed.append(self._commit(slot, indexes))
            self.tokens[slot] += 1
        return committed

    def end_step(self, slots: Sequence[int], indexes: Sequence[DeviceIndex]) -> None:
        """Start, beside the current stream, the evictions that are due within `evict_ahead` steps.

        Call it when the step has been launched; its results need not be there. The index work must neither read nor
        write what decode steps and other slots use (DeviceIndex.stage). An eviction that device memory does not suffice
        for now is tried again, at the latest by the `begin_step` in which it is due.
        """
        for slot in slots:
            near = self._in_ring(slot) >= self.ring - self.evict_ahead
            # A request that ends before its ring is full has no extents for what it will not evict.
            if near and slot not in self._staged and self.extents.room(slot) >= self.lengths[slot] + self.config.update:
                try:
                    self._stage(slot, indexes)
                except torch.OutOfMemoryError:  # the step itself has been launched: its requests go on
                    logger.warning("no device memory to prepare the next eviction of slot %d ahead of time", slot)

    def state(self, slot: int, token: int, plan: tuple[int, ...], dense: bool) -> RequestState:
        """What kernels read about a request whose last token, `token`, `begin_step` has just counted."""
        position = self.tokens[slot] - 1
        row, window = self._window_row(position), self._window_tokens(slot)
        return RequestState(token, slot, position, row, *window, self.lengths[slot], dense, plan)

    def padding_state(self) -> RequestState:
        """A request that fills up a graph's bucket: its one token is the only one that it attends to."""
        return self.state(self.padding_slot, 0, (), dense=True)

    def _commit(self, slot: int, indexes: Sequence[DeviceIndex]) -> Eviction:
        if slot not in self._staged:
            self._stage(slot, indexes)
        staged = self._staged.pop(slot)
        staged.ticket.wait()
        eviction = staged.eviction
        self.lengths[slot] += eviction.count
        for index in indexes:
            index.commit(slot, eviction.start, eviction.count)
        return eviction

    def _stage(self, slot: int, indexes: Sequence[DeviceIndex]) -> None:
        """Copy the oldest `update` ring rows to the pool and into the indexes. They stay in the window until `_commit`.

        `evict_ahead` <= local keeps the ring from holding fewer than that many tokens.
        """
        eviction = Eviction(slot, self.lengths[slot], self.config.update)
        stop = eviction.start + eviction.count
        if stop > self.extents.room(slot):
            raise CapacityError(
                f"slot {slot} with {self.tokens[slot]} tokens needs room for {stop} retrieval tokens, "
                f"{self.extents.room(slot)} are reserved; open it for more tokens"
            )
        spans = self.extents.spans(slot, eviction.start, stop)

        def work() -> None:
            window_rows = self._ring_rows(eviction.start, eviction.count)
            rows = self.window[:, slot].index_select(2, window_rows)
            self._write(0, rows, spans)
            keys = rows[:, :, :, 0].contiguous()
            for layer, index in enumerate(indexes):
                index.stage(slot, eviction.start, keys[layer])

        self._staged[slot] = StagedEviction(eviction, self._evict_stream.run(work))

    def _write(self, first_layer: int, rows: Tensor, spans: Sequence[Span]) -> None:
        """Write rows [layers, G, n, 2, D] of layers first_layer, ... to their pools, on the current stream."""
        d = self.plan.device_layers
        on_device = min(max(0, d - first_layer), rows.shape[0])
        for extent, inside, source in spans:
            piece = rows[:, :, source]
            if on_device:
                self.device_rows[extent, first_layer : first_layer + on_device, :, inside] = piece[:on_device]
            if on_device < rows.shape[0]:
                self.pool.write(extent, first_layer + on_device - d, inside, piece[on_device:])

    def _reclaim(self, keep: int) -> None:
        """Let go of rows that have reached the host; of the others, the current stream waits for all but `keep`.

        It allocated them, so after the wait their memory may go to whatever it runs next.
        """
        while self._in_flight and (len(self._in_flight) > keep or self._in_flight[0][1].done):
            _, ticket, _ = self._in_flight.popleft()
            ticket.wait()


def _device_rows(plan: RowPlan, row_shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    try:
        return torch.empty((plan.capacity, plan.device_layers, *row_shape), dtype=dtype, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        raise CapacityError(
            f"cannot allocate {plan.device_bytes:,} bytes on {device} for the rows of {plan.device_layers} layers and "
            f"{plan.capacity * EXTENT_TOKENS:,} tokens ({str(error).splitlines()[0]}); lower "
            "cache.kv_cache_device_memory_bytes, max_batch_size or max_seq_len, or choose offload 'always'"
        ) from None
