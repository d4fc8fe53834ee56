"""The four-region cache: sink | retrieval | local | update buffer, in token order (ParisKV paper, fig. 5).

Sink, local and update buffer are the *window*, one tensor per layer on the engine's device. Tokens that leave it go to
the retrieval region, rows [K(D) | V(D)] in the extents of a pool, in host memory or on the device. The local window and
the update buffer share a ring: the token at position p >= sink lies in window row sink + (p - sink) mod (local + update),
so nothing is moved when tokens pass from the buffer to the local window.

Nothing here waits for a GPU. Rows travel on side streams: a prompt's rows while the next layer computes, and the rows that
are about to leave the window some steps ahead of time (docs/memory.md). On the CPU the same code runs at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvseek.core.batch import REQUEST_FIELDS, RequestState
from kvseek.core.config import EXTENT_TOKENS, CacheConfig, EngineConfig
from kvseek.core.errors import CapacityError
from kvseek.core.extents import ExtentTable, extents_for
from kvseek.core.streams import InFlight, SideStream, SideWork, to_device
from kvseek.plugins.contract import Index

from .memory_layout import slot_count
from .prefix import Prefix
from .row_storage import RowStorage
from .states import States

EVICT_AHEAD = 32  # most decode steps between the copy of rows that leave the window and the step where they leave
COPIES_IN_FLIGHT = 2  # layers of a prompt whose rows wait on the device for their copy to the host
LOADS_IN_FLIGHT = 2  # layers of a prefix that are read at a time: the layer that is computed next, and the one after it

logger = logging.getLogger(__name__)


def retrieval_tokens(cache: CacheConfig, tokens: int) -> int:
    """Return the tokens of the retrieval region of a request that has `tokens` tokens.

    They follow from the number of tokens alone, whether a prompt brought them or steps did: whole evictions of `update` tokens,
    the last of which was due when the step of the latest token began.
    """
    return max(0, tokens - 1 - cache.sink - cache.local) // cache.update * cache.update


class Cache:
    """Windows and retrieval regions of all slots, and the passage of tokens from one to the other.

    Attributes
    ----------
    window : Tensor [layers, slots, G, window, 2, D], on the engine's device
        Window rows, each a key and a value, of the layers that have rows (ModelConfig.row_layers), which are numbered from 0 in
        all of the cache. There are max_batch_size slots; an engine on a GPU has one more. `windows` are those of each layer.
    rows : RowStorage
        Rows of the retrieval regions.
    extents : ExtentTable
        The extents of `rows` that each slot has.
    tokens, lengths : list of int, one per slot
        All cached tokens of a slot, and the tokens in its retrieval region.
    states : States or None
        What the other layers have.
    latest : Tensor, int32 [slots], on the engine's device
        The token that each slot's last step has drawn, on a GPU: a step reads there what the host does not know yet.
    prefixes : dict of int to Prefix
        By slot, the prefix of the slot's prompt that is not read, as an earlier request has left its rows.
    padding_slot : int
        The last slot of an engine on a GPU, for requests that only fill up a batch: it holds one token, which each of them
        overwrites.
    """

    def __init__(self, config: EngineConfig, dtype: torch.dtype, device: torch.device, rows: RowStorage) -> None:
        """Allocate the windows; raises CapacityError if the device's memory does not suffice."""
        self.config: CacheConfig = config.cache
        self.rows = rows
        self.ring = self.config.local + self.config.update
        self.padding_slot = config.max_batch_size
        slots = slot_count(config)
        max_extents = extents_for(max(0, config.max_seq_len - self.config.sink))
        self.extents = ExtentTable(slots, max_extents, rows.layout.capacity, device)
        self.window = _windows(config, slots, dtype, device)
        self.windows = self.window.unbind()
        self.states = None if config.model.without_rows is None else States(config, dtype, device)
        self.latest = torch.zeros(slots, dtype=torch.int32, device=device)
        self.tokens, self.lengths = [0] * slots, [0] * slots
        if self.padding_slot < slots:
            self.tokens[self.padding_slot] = 1
        # On the CPU preparing an eviction beside the steps would gain nothing.
        self.evict_ahead = min(EVICT_AHEAD, self.config.update, self.config.local) if device.type == "cuda" else 0
        # Likewise reading a prefix before it is needed, which takes memory.
        self.load_ahead = device.type == "cuda"
        self._offload_stream, self._evict_stream, self._load_stream = (SideStream(device) for _ in range(3))
        self._offloads, self._loads = InFlight(COPIES_IN_FLIGHT), InFlight(LOADS_IN_FLIGHT)
        self._packed: tuple[dict[int, tuple[int, int]], list[Tensor]] | None = None  # see `write_windows`
        # By slot: an eviction whose rows and index entries are being written while its tokens are still in the window.
        self._prepared: dict[int, SideWork] = {}
        self.prefixes: dict[int, Prefix] = {}
        self._sources: dict[int, tuple[int, ...]] = {}  # by slot: extents that stay until the prompt has been read

    def extents_needed(self, tokens: int) -> int:
        """Return the number of extents that a request needs to grow to `tokens` tokens."""
        return extents_for(self.retrieval_tokens(tokens))

    def retrieval_tokens(self, tokens: int) -> int:
        """Return the tokens of the retrieval region of a request that has `tokens` tokens."""
        return retrieval_tokens(self.config, tokens)

    def most_tokens(self, extents: int) -> int:
        """Return the most tokens that a request with so many extents can have."""
        config = self.config
        evictions = extents * EXTENT_TOKENS // config.update
        return (evictions + 1) * config.update + config.sink + config.local

    def tokens_soon(self, slot: int) -> int:
        """Return the tokens for which a slot needs extents in its next step, or for an eviction that the step prepares."""
        return self.tokens[slot] + self.evict_ahead + 2

    def alike_steps(self, slot: int) -> int:
        """Count the steps of a slot before one in which tokens leave its window, or in which it may begin to select rows.

        An eviction that is due in the first of them does not count.
        """
        dense = self.config.full_threshold - 1 - self.tokens[slot]
        return min(self.room_in_ring(slot), dense) if dense > 0 else self.room_in_ring(slot)

    def steps_with_room(self, slot: int) -> int:
        """Count the steps that a slot can take until its extents have no room for `tokens_soon`; below 1: they have none now."""
        return self.most_tokens(len(self.extents.of_slot(slot))) + 1 - self.tokens_soon(slot)

    def open(self, slot: int, tokens: int, prefix: Prefix | None = None) -> None:
        """Reserve the extents that a request needs to grow to `tokens` tokens; raises CapacityError.

        The slot shares those that `prefix` says. All extents of `prefix` stay until the slot's prompt has been read.
        """
        if prefix is None:
            self.extents.reserve(slot, self.retrieval_tokens(tokens))
            return
        self.extents.reserve(slot, self.retrieval_tokens(tokens), prefix.extents[: prefix.shared])
        self.extents.hold(prefix.extents)
        self.prefixes[slot], self._sources[slot] = prefix, prefix.extents

    def close(self, slot: int) -> None:
        """Forget a slot and give its extents back, after the writes to them that are still under way.

        All later writes to the extents follow the current stream, so it is enough that the current stream waits.
        """
        self.finish_prompt(slot)
        self.settle(slot)
        self._prepared.pop(slot, None)
        self.prefixes.pop(slot, None)
        self.extents.release(slot)
        if self.states is not None:
            self.states.close(slot)
        self.tokens[slot] = self.lengths[slot] = 0

    # A prompt, layer by layer.

    def begin_prefill(self, slot: int, tokens: int) -> None:
        """Set the lengths of a slot that is about to receive a prompt of `tokens` tokens, layer by layer."""
        self.tokens[slot] = tokens
        self.lengths[slot] = self.retrieval_tokens(tokens)

    def write_prompt(self, layer: int, slot: int, keys: Tensor, values: Tensor) -> None:
        """Store a layer's prompt rows, keys and values [G, tokens, D], in window and pool.

        `keys` and `values` may be overwritten after the call. Rows for host memory are copied on a side stream, so
        `finish_prompt` must be called before the pool's rows are read.
        """
        shared = self.shared_places(slot)
        first = self.config.sink + shared if shared else 0  # of the tokens whose rows are written here
        self._write_tail(layer, slot, torch.stack((keys[:, first:], values[:, first:]), dim=2), first)

    def write_windows(self, layer: int, spans: Mapping[int, tuple[int, int]], keys: Tensor, values: Tensor) -> None:
        """Store a layer's rows of prompts that stay in the window at once: that of a slot has the rows first .. stop - 1."""
        if not spans:
            return
        if self._packed is None or self._packed[0] != spans:  # the layers of a pack follow each other
            counts, firsts = [stop - first for first, stop in spans.values()], [first for first, _ in spans.values()]
            rows = np.concatenate([np.arange(*span) for span in spans.values()])
            numbers = rows, np.repeat(list(spans), counts), rows - np.repeat(firsts, counts)
            on_device = [to_device(torch.from_numpy(part), torch.int64, self.window.device) for part in numbers]
            self._packed = dict(spans), on_device
        own, slots, positions = self._packed[1]
        pairs = torch.stack((keys, values), dim=2).transpose(0, 1)
        self.window[layer][slots, :, positions] = pairs.index_select(0, own)

    def write_prefix(self, layer: int, slot: int) -> Tensor:
        """Store a layer's rows of a slot that has no more tokens than its prefix, in window and pool.

        Returns the keys [G, n, D] of the places behind the shared ones.
        """
        shared = self.shared_places(slot)
        first = self.config.sink + shared
        rows = self.prefixes[slot].rows_from(self.rows, layer, first)
        self._write_tail(layer, slot, rows, first)
        return rows[:, : self.lengths[slot] - shared, 0].contiguous()

    def _write_tail(self, layer: int, slot: int, rows: Tensor, first: int) -> None:
        """Store a layer's rows [G, n, 2, D] of a slot's tokens from `first` on: 0, or one behind the sink."""
        self._offloads.make_room()
        if first:
            head = self.prefixes[slot].sink_of(layer, self.window.device)
            self.window[layer, slot, :, : self.config.sink] = head
        self._write_prompt_window(layer, slot, rows, first)
        begin = max(0, self.config.sink - first)
        rows = rows[:, begin : self.config.sink + self.lengths[slot] - first]
        spans = self.extents.spans(slot, max(0, first - self.config.sink), self.lengths[slot])
        if layer < self.rows.layout.device_layers:
            self.rows.write(layer, rows[None], spans)
        elif spans:
            work = self._offload_stream.run(lambda: self.rows.write(layer, rows[None], spans), read=(rows,))
            self._offloads.add(slot, work)

    def finish_prompt(self, slot: int) -> None:
        """Make the current stream wait until the rows of the slot's prompt are in the pool, and its prefix has been read."""
        self._offloads.finish(slot)
        self._loads.finish(slot)
        self.extents.let_go(self._sources.pop(slot, ()))

    # Prefixes (prefixes/cache.py).

    def load_prefix(self, layer: int, slot: int, keys: Tensor, values: Tensor) -> SideWork:
        """Start to copy a layer's keys and values of a slot's prefix to the first of `keys` and `values`, [G, n, D].

        The current stream must wait for the work before it uses them; in the order of the layers, as only LOADS_IN_FLIGHT run.
        """
        self._loads.make_room()
        prefix = self.prefixes[slot]
        work = self._load_stream.run(lambda: prefix.read(self.rows, layer, keys, values), read=(keys, values))
        self._loads.add(slot, work)
        return work

    def settle(self, slot: int) -> None:
        """Make the current stream wait for the eviction of a slot that is being prepared."""
        if slot in self._prepared:
            self._prepared[slot].wait()

    def shared_places(self, slot: int) -> int:
        """Return the number of a slot's first places that lie in shared extents."""
        return self.prefixes[slot].shared * EXTENT_TOKENS if slot in self.prefixes else 0

    def write_ring(self, slot: int, start: int, stop: int) -> None:
        """Write the rows of all layers of tokens in the ring to places start .. stop - 1, which they would have later.

        On the current stream: the request has ended, and the next one that reads the rows follows it there.
        """
        if start < stop:
            tokens = torch.arange(start, stop, device=self.window.device) % self.ring + self.config.sink
            self.rows.write(0, self.window[:, slot].index_select(2, tokens), self.extents.spans(slot, start, stop))

    # Decode steps.

    def begin_step(self, slots: Sequence[int], indexes: Sequence[Index]) -> None:
        """Count one more token per slot, after moving the oldest `update` tokens of full rings to the retrieval region.

        The current stream waits for evictions whose copies and index entries `end_step` has started; the others are made here.
        """
        for slot in slots:
            if self.tokens[slot] - self.lengths[slot] == self.ring + self.config.sink:
                self._evict(slot, indexes)
            self.tokens[slot] += 1
        if self.states is not None:
            self.states.begin_step(slots, self.tokens)

    def end_step(self, slots: Sequence[int], indexes: Sequence[Index]) -> None:
        """Start, beside the current stream, the evictions that are due within `evict_ahead` steps.

        Call it after launching the step, without waiting for its results. The index work must neither read nor write data
        that decode steps or other slots use (Index.append). If device memory does not suffice for an eviction now, the
        eviction is tried again, at the latest by the `begin_step` in which it is due.
        """
        if not self.evict_ahead:
            return
        near = self.ring - self.evict_ahead + self.config.sink
        for slot in slots:
            # A request that ends before its ring is full never evicts, so it has no extents for that.
            if (
                self.tokens[slot] - self.lengths[slot] >= near
                and slot not in self._prepared
                and self.extents.room(slot) >= self.lengths[slot] + self.config.update
            ):
                try:
                    self._prepare(slot, indexes)
                except torch.OutOfMemoryError:  # the step itself has been launched: its requests go on
                    logger.warning("no device memory to prepare the next eviction of slot %d ahead of time", slot)

    def describe(self, slots: Sequence[int], rows: npt.NDArray[np.int32]) -> None:
        """Write what indexes and attention read about requests as long as no token leaves their windows.

        Parameters
        ----------
        rows : array, int32 [batch, 16]
            As RequestState.packed; the columns `slot`, `ring_first` and `length` are written. `place` writes those between.
        """
        lengths = np.array([self.lengths[slot] for slot in slots], dtype=np.int32)
        rows[:, 1], rows[:, 5], rows[:, 7] = slots, lengths % self.ring, lengths

    def place(self, slots: Sequence[int], rows: npt.NDArray[np.int32]) -> None:
        """Write where the latest tokens of described requests lie, after `begin_step` has counted them.

        A slot that occurs several times has so many new tokens, of which each request has one more than the one before it.
        Rows [steps, batch, 16] are those of the last steps, one token after the other.
        """
        tokens, sink = np.array([self.tokens[slot] for slot in slots], dtype=np.int32), self.config.sink
        if len(set(slots)) < len(slots):
            tokens -= np.array([slots[number + 1 :].count(slot) for number, slot in enumerate(slots)], dtype=np.int32)
        if rows.ndim == 3:
            tokens = tokens - np.arange(len(rows), dtype=np.int32)[::-1, None]
        position = tokens - 1
        rows[..., 2] = position
        rows[..., 3] = np.where(position < sink, position, sink + (position - sink) % self.ring)
        rows[..., 4] = np.minimum(tokens, sink)
        rows[..., 6] = tokens - rows[..., 4] - rows[..., 7]

    def state(self, slot: int, token: int, method_fields: tuple[int, ...], dense: bool) -> RequestState:
        """Return what indexes and attention read about one request; see `describe`."""
        rows = np.zeros((1, REQUEST_FIELDS), dtype=np.int32)
        self.describe([slot], rows)
        self.place([slot], rows)
        names = ("slot", "position", "write_row", "sink_rows", "ring_first", "ring_rows", "length")
        fields = dict(zip(names, rows[0, 1 : 1 + len(names)].tolist(), strict=True))
        return RequestState(token=token, dense=dense, method_fields=method_fields, **fields)

    def padding_state(self) -> RequestState:
        """Return the state of a request that fills up a graph's bucket: it has one token and attends to that alone."""
        return self.state(self.padding_slot, 0, (), dense=True)

    def room_in_ring(self, slot: int) -> int:
        """Return how many tokens a slot can take before tokens leave the window, or, if that is due now, thereafter."""
        return (self.ring - self._in_ring(slot)) or self.config.update

    def _in_ring(self, slot: int) -> int:
        """Count the tokens of a slot in local window and update buffer."""
        return max(0, self.tokens[slot] - self.config.sink) - self.lengths[slot]

    def _write_prompt_window(self, layer: int, slot: int, rows: Tensor, first: int) -> None:
        """Store the sink and the latest tokens of a prompt in the window; its rows from token `first` on are [G, n, 2, D]."""
        sink, n, stop = self.config.sink, self.lengths[slot], first + rows.shape[1]
        window = self.window[layer, slot]
        if first == 0:
            head = stop if n == 0 else min(sink, stop)  # what no token has left lies in its order
            window[:, :head] = rows[:, :head]
            if n == 0:
                return
        while sink + n < stop:  # in at most two parts, as the ring's end may be passed
            at = sink + n % self.ring
            count = min(stop - sink - n, sink + self.ring - at)
            window[:, at : at + count] = rows[:, sink + n - first :][:, :count]
            n += count

    def _evict(self, slot: int, indexes: Sequence[Index]) -> None:
        """Move the oldest `update` tokens of a full ring to the retrieval region."""
        if slot not in self._prepared:
            self._prepare(slot, indexes)
        self._prepared.pop(slot).wait()
        start = self.lengths[slot]
        self.lengths[slot] += self.config.update
        for index in indexes:
            index.publish(slot, start, self.config.update)

    def _prepare(self, slot: int, indexes: Sequence[Index]) -> None:
        """Copy the oldest `update` rows of the ring to pool and indexes; the rows stay in the window until `_evict`.

        The ring holds at least `update` tokens then, because `evict_ahead` is at most `local`.
        """
        start = self.lengths[slot]
        stop = start + self.config.update
        if stop > self.extents.room(slot):
            raise CapacityError(
                f"slot {slot} with {self.tokens[slot]} tokens needs room for {stop} retrieval tokens, "
                f"{self.extents.room(slot)} are reserved; open it for more tokens"
            )
        spans = self.extents.spans(slot, start, stop)

        def work() -> None:
            leaving = torch.arange(start, stop, device=self.window.device) % self.ring + self.config.sink
            rows = self.window[:, slot].index_select(2, leaving)
            self.rows.write(0, rows, spans)
            keys = rows[:, :, :, 0].contiguous()
            for layer, index in enumerate(indexes):
                index.append(slot, start, keys[layer])

        self._prepared[slot] = self._evict_stream.run(work)


def _windows(config: EngineConfig, slots: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    model = config.model
    shape = (len(model.row_layers), slots, model.num_kv_heads, config.cache.window, 2, model.head_dim)
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        raise CapacityError(
            f"cannot allocate {math.prod(shape) * dtype.itemsize:,} bytes on {device} for the windows of {slots} "
            f"slots ({str(error).splitlines()[0]}); lower max_batch_size, cache.local or cache.update"
        ) from None
