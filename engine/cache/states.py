"""The states of layers that keep no rows: of all slots, on the engine's device, and copies that later requests go on from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvseek.core.config import MOST_DRAFTED, STATE_BLOCK, EngineConfig
from kvseek.core.errors import CapacityError
from kvseek.kernels.reference.delta_net import DeltaPrompt, DeltaStates

from .memory_layout import slot_count, state_bytes


class Snapshot:
    """The states of all layers after the first tokens of a sequence, in host memory; pinned, if the engine is on a GPU.

    Copies follow the current stream, which whoever reads them follows, too.

    Attributes
    ----------
    tokens : int
    layers : list of DeltaPrompt
        Of each layer with a state that has been written, in order.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens, self.layers = tokens, list[DeltaPrompt]()

    def write(self, state: DeltaPrompt) -> None:
        """Copy the state of the next layer."""
        self.layers.append(DeltaPrompt(self.tokens, _on_host(state.latest), _on_host(state.recurrent)))

    def read(self, layer: int, device: torch.device) -> DeltaPrompt:
        """Copy the state of a layer to a device."""
        own = self.layers[layer]
        latest, recurrent = (part.to(device, non_blocking=True, copy=True) for part in (own.latest, own.recurrent))
        return DeltaPrompt(self.tokens, latest, recurrent)


def _on_host(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=True)


class States:
    """The states of a hybrid's Gated DeltaNet layers.

    A prompt's is written when a layer has read it, from zero or from a copy of an earlier one. So nothing is done when a slot is
    opened.

    Attributes
    ----------
    layers : list of DeltaStates
        Those of the layers with states, in order.
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
        model, slots = config.model.delta_net, slot_count(config)
        assert model is not None, "the model is a hybrid"
        try:
            ring = model.conv_kernel + MOST_DRAFTED
            self.layers = [DeltaStates.zeros(model, slots, ring, dtype, device) for _ in model.layers]
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            raise CapacityError(
                f"cannot allocate {state_bytes(config, dtype):,} bytes on {device} for the states of {slots} slots "
                f"({str(error).splitlines()[0]}); lower max_batch_size"
            ) from None
        self.pending: dict[int, dict[int, Snapshot]] = {}
        self._every = config.cache.reuse_state_tokens
        self._prompts: dict[int, int] = {}  # tokens of each slot's prompt
        self._kernel, self._behind = model.conv_kernel, dict[int, int]()
        one = sum(layer.conv[0, : model.conv_kernel - 1].nbytes + layer.recurrent[0].nbytes for layer in self.layers)
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
        if len(set(slots)) < len(slots):
            counts = Counter(slots)
            self._behind.update((slot, tokens[slot] - count + 1) for slot, count in counts.items() if count > 1)

    def take(self, slot: int, tokens: int, most: int) -> None:
        """Make a pending snapshot of a slot after `tokens` of its `most` tokens, if steps have brought some of them.

        There is none if the states have had later tokens.

        After a prompt's own tokens alone, that after its last whole block does: from there on others compute the same to the bit.
        """
        there = self._behind.get(slot, most) <= tokens <= most
        if there and self.most_snapshots and tokens > self._prompts.get(slot, 0):
            snapshot = self.pending.setdefault(slot, {})[tokens] = Snapshot(tokens)
            if slot in self._behind:
                self.catch_up(slot, tokens)
            for states in self.layers:
                snapshot.write(DeltaPrompt.of_slot(states, slot, tokens, self._kernel))

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
