"""The states of layers that keep no rows: of all slots, on the engine's device, and copies that later requests go on from."""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.core.config import STATE_BLOCK, EngineConfig
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
    """

    def __init__(self, config: EngineConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate them; raises CapacityError if the device's memory does not suffice."""
        model, slots = config.model.delta_net, slot_count(config)
        assert model is not None, "the model is a hybrid"
        heads = (model.num_value_heads, model.key_head_dim, model.value_head_dim)
        try:
            conv = torch.zeros(len(model.layers), slots, model.conv_kernel, model.channels, dtype=dtype, device=device)
            recurrent = torch.zeros(len(model.layers), slots, *heads, device=device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            raise CapacityError(
                f"cannot allocate {state_bytes(config, dtype):,} bytes on {device} for the states of {slots} slots "
                f"({str(error).splitlines()[0]}); lower max_batch_size"
            ) from None
        self.layers = [DeltaStates(*one) for one in zip(conv, recurrent, strict=True)]
        self.pending: dict[int, dict[int, Snapshot]] = {}
        self._every = config.cache.reuse_state_tokens
        self._prompts: dict[int, int] = {}  # tokens of each slot's prompt
        one = conv[:, 0, 1:].nbytes + recurrent[:, 0].nbytes
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

    def take(self, slot: int, tokens: int) -> None:
        """Make a pending snapshot of a slot, which has so many tokens, if steps have brought some of them.

        After a prompt's own tokens alone, that after its last whole block does: from there on others compute the same to the bit.
        """
        if self.most_snapshots and tokens > self._prompts.get(slot, 0):
            snapshot = self.pending.setdefault(slot, {})[tokens] = Snapshot(tokens)
            for states in self.layers:
                snapshot.write(DeltaPrompt.of_slot(states, slot, tokens))

    def drop(self, snapshot: Snapshot) -> None:
        """Make a pending snapshot no longer, as there is no room for it."""
        for pending in self.pending.values():
            if pending.get(snapshot.tokens) is snapshot:
                del pending[snapshot.tokens]

    def close(self, slot: int) -> None:
        """Forget the pending snapshots of a slot."""
        self.pending.pop(slot, None)
        self._prompts.pop(slot, None)
