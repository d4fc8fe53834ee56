"""What layers that keep no rows keep instead: of all slots, on the engine's device, and copies that later requests go on from.

A Gated DeltaNet layer has a state. A layer with a sliding window has a ring of its latest tokens' rows, in which position p lies
in row p mod the ring's length; that is longer than the window by the tokens of a step that may be taken back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from kvseek.core.config import MOST_DRAFTED, STATE_BLOCK, EngineConfig
from kvseek.core.errors import CapacityError
from kvseek.core.streams import to_device
from kvseek.kernels.reference.delta_net import DeltaPrompt, DeltaStates

from .memory_layout import ring_rows, slot_count, state_bytes


class Snapshot:
    """The states of all layers after the first tokens of a sequence, in host memory; pinned, if the engine is on a GPU.

    Copies follow the current stream, which whoever reads them follows, too.

    Attributes
    ----------
    tokens : int
    layers : list of tuple of Tensor
        Of each layer with a state that has been written, in order: `latest` and `recurrent` of a DeltaPrompt, or the rows
        [G, n, 2, D] of a window's latest tokens.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens, self.layers = tokens, list[tuple[Tensor, ...]]()

    def write(self, *parts: Tensor) -> None:
        """Copy the state of the next layer."""
        self.layers.append(tuple(_on_host(part) for part in parts))

    def read(self, layer: int, device: torch.device) -> list[Tensor]:
        """Copy the state of a layer to a device."""
        return [part.to(device, non_blocking=True, copy=True) for part in self.layers[layer]]


def _on_host(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=True)


class States:
    """The states of a hybrid's Gated DeltaNet layers, or the rings of layers with a sliding window.

    A prompt's is written when a layer has read it, from nothing or from a copy of an earlier one. So nothing is done when a slot
    is opened.

    Attributes
    ----------
    layers : list of DeltaStates
        Those of the layers with states, in order.
    rings : list of Tensor [slots, G, rows, 2, D]
        Those of the layers with a window, in order.
    window : int
        Tokens that these layers attend to.
    most_snapshots : int
        How many cache.reuse_state_bytes have room for.
    pending : dict of int to dict of int to Snapshot
        By slot and number of tokens, the slot's snapshots that nobody else can find yet; whole when its prompt has been read.
    catch_up : callable
        Brings the states of a slot to so many tokens, of which its last step has verified the latest. The model sets it.
    """

    catch_up: Callable[[int, int], None]

    def __init__(self, config: EngineConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate them; raises CapacityError if the device's memory does not suffice."""
        model, slots = config.model, slot_count(config)
        try:
            self.layers = _delta_states(config, slots, dtype, device)
            shape = (slots, model.num_kv_heads, ring_rows(model), 2, model.head_dim)
            rings = torch.zeros(len(model.window_layers), *shape, dtype=dtype, device=device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            raise CapacityError(
                f"cannot allocate {state_bytes(config, dtype):,} bytes on {device} for the states of {slots} slots "
                f"({str(error).splitlines()[0]}); lower max_batch_size"
            ) from None
        self.rings, self.window = list(rings), model.sliding_window or 0
        self.pending: dict[int, dict[int, Snapshot]] = {}
        self._every = config.cache.reuse_state_tokens
        self._prompts: dict[int, int] = {}  # tokens of each slot's prompt
        self._behind: dict[int, int] = {}  # tokens that the recurrent states have had, if the last step had a draft
        self._kernel = 0 if model.delta_net is None else model.delta_net.conv_kernel
        self._written: tuple[dict[int, tuple[int, int]], list[Tensor]] | None = None  # see `write_rings`
        one = sum(layer.conv[0, : self._kernel - 1].nbytes + layer.recurrent[0].nbytes for layer in self.layers)
        one += rings[:, 0, :, : self.window].nbytes
        self.most_snapshots = 0 if config.cache.reuse is False else config.cache.reuse_state_bytes // one

    def begin_snapshots(self, slot: int, first: int, tokens: int) -> None:
        """Make pending snapshots for a prompt of which tokens from `first` on are read; its layers write them.

        They are of the states after each multiple of reuse_state_tokens, and after the last whole block, from which a prompt that
        continues this one goes on. If they do not all fit, the last ones are made.
        """
        self._prompts[slot] = tokens
        places = {*range(self._every, tokens + 1, self._every), tokens // STATE_BLOCK * STATE_BLOCK}
        wanted = sorted(place for place in places if place > first)
        self.pending[slot] = {place: Snapshot(place) for place in wanted[max(0, len(wanted) - self.most_snapshots) :]}

    def begin_step(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Take note of the slots of a step that have a draft; `tokens` of each slot count it.

        The recurrent states of a slot take in those of its draft that are accepted in its next step (DeltaStates).
        """
        for slot in slots:
            self._behind.pop(slot, None)
        if self.layers and len(set(slots)) < len(slots):
            counts = Counter(slots)
            self._behind.update((slot, tokens[slot] - count + 1) for slot, count in counts.items() if count > 1)

    def read_ring(self, layer: int, snapshot: Snapshot, keys: Tensor, values: Tensor) -> None:
        """Write a window's rows after the tokens of a snapshot to a prompt's `keys` and `values` [G, n, D].

        Zeros stand before them: no query sees these, but blocks of attention may begin there.
        """
        (rows,) = snapshot.read(layer, keys.device)
        first = snapshot.tokens - rows.shape[1]
        for part, target in enumerate((keys, values)):
            target[:, :first] = 0
            target[:, first : snapshot.tokens] = rows[:, :, part]

    def write_rings(
        self,
        layer: int,
        spans: Mapping[int, tuple[int, int]],
        keys: Tensor,
        values: Tensor,
        snapshots: Iterable[Snapshot],
    ) -> None:
        """Store the latest rows of prompts that a layer with a window has read, and write the snapshots of a prompt read alone.

        Keys and values are [G, n, D]; the prompt of a slot has the rows first .. stop - 1.
        """
        ring = self.rings[layer]
        if self._written is None or self._written[0] != spans:  # the layers of a pack follow each other
            latest = [np.arange(max(first, stop - self.window), stop) for first, stop in spans.values()]
            rows, slots = np.concatenate(latest), np.repeat(list(spans), [len(one) for one in latest])
            positions = rows - np.array([spans[slot][0] for slot in slots.tolist()])
            numbers = rows, slots, positions % ring.shape[2]
            self._written = (
                dict(spans),
                [to_device(torch.from_numpy(part), torch.int64, ring.device) for part in numbers],
            )
        own, at, places = self._written[1]
        pairs = torch.stack((keys.index_select(1, own), values.index_select(1, own)), dim=2)
        ring[at, :, places] = pairs.transpose(0, 1)
        for snapshot in snapshots:
            begin = max(0, snapshot.tokens - self.window)
            snapshot.write(torch.stack([part[:, begin : snapshot.tokens] for part in (keys, values)], dim=2))

    def take(self, slot: int, tokens: int, most: int) -> None:
        """Make a pending snapshot of a slot after `tokens` of its `most` tokens, if steps have brought some of them.

        There is none if the states have had later tokens, or the rings more of them than they have room for.

        After a prompt's own tokens alone, that after its last whole block does: from there on others compute the same to the bit.
        """
        least = most - MOST_DRAFTED if self.rings else self._behind.get(slot, most)
        if least <= tokens <= most and self.most_snapshots and tokens > self._prompts.get(slot, 0):
            snapshot = self.pending.setdefault(slot, {})[tokens] = Snapshot(tokens)
            if slot in self._behind:
                self.catch_up(slot, tokens)
            for states in self.layers:
                state = DeltaPrompt.of_slot(states, slot, tokens, self._kernel)
                snapshot.write(state.latest, state.recurrent)
            for ring in self.rings:
                latest = torch.arange(max(0, tokens - self.window), tokens, device=ring.device) % ring.shape[2]
                snapshot.write(ring[slot].index_select(1, latest))

    def drop(self, snapshot: Snapshot) -> None:
        """Make a pending snapshot no longer, as there is no room for it."""
        for pending in self.pending.values():
            if pending.get(snapshot.tokens) is snapshot:
                del pending[snapshot.tokens]

    def close(self, slot: int) -> None:
        """Forget the pending snapshots of a slot."""
        self.pending.pop(slot, None)
        self._prompts.pop(slot, None)
        self._behind.pop(slot, None)


def _delta_states(config: EngineConfig, slots: int, dtype: torch.dtype, device: torch.device) -> list[DeltaStates]:
    model = config.model.delta_net
    if model is None:
        return []
    return [DeltaStates.zeros(model, slots, MOST_DRAFTED, dtype, device) for _ in model.layers]
