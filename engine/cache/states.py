"""The states of layers that keep no rows, of all slots, on the engine's device."""

from __future__ import annotations

import torch

from kvseek.core.config import EngineConfig
from kvseek.core.errors import CapacityError
from kvseek.kernels.reference.delta_net import DeltaStates

from .memory_layout import slot_count, state_bytes


class States:
    """The states of a hybrid's Gated DeltaNet layers.

    A prompt's is written when a layer has read it, from zero or from a copy of an earlier one. So nothing is done when a slot is
    opened or closed.

    Attributes
    ----------
    layers : list of DeltaStates
        Those of the layers with states, in order.
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
