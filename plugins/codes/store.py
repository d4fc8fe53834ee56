"""Codes of the keys of all slots of a layer, in extents, for indexes that keep nested key codes."""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS
from kvseek.plugins.contract import IndexContext

from .key_codes import BITS, FIELDS, KeyCodes, encode
from .rotation import rotate

ENCODE_TOKENS = 8 * EXTENT_TOKENS  # keys encoded at a time, which bounds temporary memory


class CodeStore:
    """One layer's codes. With E extents, G KV heads, and P the padded head size:

    Parameters
    ----------
    context : IndexContext
    signs : Tensor, float32 [P]
        Of the rotation.
    bits : int
        Of a code: 2 or 4.

    Attributes
    ----------
    high, low : Tensor, uint8 [E, G, 1024, P/4]
        Planes of the codes (key_codes.py); `low` is [E, G, 1024, 0] with 2 bits.
    scales : Tensor, float16 [E, G, 1024]
    means : Tensor, float32 [slots, G, D]
        What is subtracted from a slot's keys before they are encoded: the mean key of the retrieval region when it was built.
    """

    def __init__(self, context: IndexContext, signs: Tensor, bits: int = BITS) -> None:
        self.context, self.signs, self.bits = context, signs.to(context.device), bits
        rows = (context.extents.capacity, context.num_kv_heads, EXTENT_TOKENS)
        self.row_bytes = signs.shape[0] // FIELDS  # of a plane
        self.high = torch.empty((*rows, self.row_bytes), dtype=torch.uint8, device=context.device)
        low_bytes = self.row_bytes if bits == BITS else 0
        self.low = torch.empty((*rows, low_bytes), dtype=torch.uint8, device=context.device)
        self.scales = torch.empty(rows, dtype=torch.float16, device=context.device)
        means = (context.extents.slots, context.num_kv_heads, context.head_dim)
        self.means = torch.zeros(means, dtype=torch.float32, device=context.device)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of codes and scales of all KV heads."""
        return self.context.num_kv_heads * (self.row_bytes + self.low.shape[-1] + self.scales.itemsize)

    def build(self, slot: int, keys: Tensor) -> None:
        """Encode the keys [G, n, D] of a slot's prompt, from place 0 on, with their own mean; zero if there are none."""
        self.set_mean(slot, keys)
        self.append(slot, 0, keys)

    def set_mean(self, slot: int, keys: Tensor) -> None:
        """Note the mean of a slot's keys [G, n, D]; zero if there are none."""
        self.means[slot] = keys.mean(dim=1, dtype=torch.float32) if keys.shape[1] else 0.0

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """Encode keys [G, u, D] of the places from `start` on, with the mean that `build` found."""
        for offset in range(0, keys.shape[1], ENCODE_TOKENS):
            part = keys[:, offset : offset + ENCODE_TOKENS].float()
            codes = encode(rotate(part - self.means[slot, :, None], self.signs), self.bits)
            for array, values in ((self.high, codes.high), (self.low, codes.low), (self.scales, codes.scales)):
                self.context.extents.write(array, slot, start + offset, values)

    def read(self, slot: int, length: int) -> KeyCodes:
        """Copy the codes of the first `length` places of a slot: [G, length, ...]."""
        return KeyCodes(
            *(self.context.extents.read(array, slot, length) for array in (self.high, self.low, self.scales))
        )
