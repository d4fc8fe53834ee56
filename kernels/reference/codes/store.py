"""Codes of the keys of all slots of a layer, in extents, for indexes that keep nested key codes."""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.index_context import IndexContext

from .key_codes import BITS, FIELDS, KeyCodes, encode, mean_integers, round_means
from .rotation import padded_dim, rotate

ENCODE_TOKENS = 8 * EXTENT_TOKENS  # keys encoded at a time, which bounds temporary memory
MOST_BLOCK_TOKENS = 256  # keys that share a mean; half as many find 0.3 % more of the best rows, for twice the memory


def block_tokens(update: int) -> int:
    """Return the number of keys that share a mean: a power of two by which `cache.update` can be divided, at most 256.

    Keys enter a retrieval region by whole blocks then, so that a block's mean depends on its keys alone.
    """
    return min(MOST_BLOCK_TOKENS, update & -update)


def code_bytes(head_dim: int, bits: int) -> float:
    """Return the bytes of a key's code of so many bits a channel, and of its scale."""
    return padded_dim(head_dim) * bits / 8 + torch.float16.itemsize


def mean_bytes(dim: int, block: int = MOST_BLOCK_TOKENS) -> float:
    """Return the bytes of the means of `dim` channels, per key and KV head: two of a channel, and a step, for each block."""
    return (2 * dim + 4) / block


class CodeStore:
    """One layer's codes. With E extents, G KV heads, P the padded head size, and blocks of B places that share a mean:

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
    means : Tensor, int8 [E, G, 1024/B, 2, P]
        What is subtracted from the rotated keys of each block before they are encoded, in units of `mean_steps` (KeyCodes).
    mean_steps : Tensor, float32 [E, G, 1024/B]
    """

    def __init__(self, context: IndexContext, signs: Tensor, bits: int = BITS) -> None:
        self.context, self.signs, self.bits = context, signs.to(context.device), bits
        rows = (context.extents.capacity, context.num_kv_heads, EXTENT_TOKENS)
        self.row_bytes = signs.shape[0] // FIELDS  # of a plane
        self.high = torch.empty((*rows, self.row_bytes), dtype=torch.uint8, device=context.device)
        low_bytes = self.row_bytes if bits == BITS else 0
        self.low = torch.empty((*rows, low_bytes), dtype=torch.uint8, device=context.device)
        self.scales = torch.empty(rows, dtype=torch.float16, device=context.device)
        self.block = block_tokens(context.update)
        blocks = (*rows[:2], EXTENT_TOKENS // self.block)
        self.means = torch.empty((*blocks, 2, signs.shape[0]), dtype=torch.int8, device=context.device)
        self.mean_steps = torch.empty(blocks, dtype=torch.float32, device=context.device)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of codes, scales and means of all KV heads."""
        of_key = self.row_bytes + self.low.shape[-1] + self.scales.itemsize
        return self.context.num_kv_heads * (of_key + mean_bytes(self.means.shape[-1], self.block))

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """Encode keys [G, u, D] of the places from `start` on.

        The mean of a block is that of its keys among these. Keys of a block that earlier ones have begun are encoded with the
        mean of those; an engine appends whole blocks (IndexContext.update).
        """
        while keys.shape[1]:
            begun = start % self.block
            count = min(keys.shape[1], self.block - begun if begun else ENCODE_TOKENS)
            self._append(slot, start, keys[:, :count], begun > 0)
            start, keys = start + count, keys[:, count:]

    def _append(self, slot: int, start: int, keys: Tensor, begun: bool) -> None:
        """Encode keys [G, u, D] of the places from `start` on: of one block that has begun, or of new blocks."""
        if not begun:
            means = torch.stack(
                [block.mean(dim=1, dtype=torch.float64) for block in torch.split(keys, self.block, dim=1)], 1
            )
            integers, steps = round_means(rotate(means, self.signs))
            where = self.blocks_of(slot, torch.arange(start, start + keys.shape[1], self.block))
            self.means[where], self.mean_steps[where] = integers.transpose(0, 1), steps.T
        centred = rotate(keys, self.signs) - self.mean_of(slot, torch.arange(start, start + keys.shape[1]))
        for array, values in zip((self.high, self.low, self.scales), encode(centred, self.bits), strict=True):
            self.context.extents.write(array, slot, start, values)

    def mean_of(self, slot: int, places: Tensor) -> Tensor:
        """Read the mean that each of these places' codes leave out, rotated: int64 [n], on the host, to float32 [G, n, P]."""
        where = self.blocks_of(slot, places)
        return (mean_integers(self.means[where]) * self.mean_steps[where][..., None]).transpose(0, 1)

    def read(self, slot: int, length: int) -> KeyCodes:
        """Copy the codes of the first `length` places of a slot: [G, length, ...]."""
        where = self.blocks_of(slot, torch.arange(length))
        arrays = (self.high, self.low, self.scales)
        high, low, scales = (self.context.extents.read(array, slot, length) for array in arrays)
        return KeyCodes(high, low, scales, self.means[where].transpose(0, 1), self.mean_steps[where].T)

    def blocks_of(self, slot: int, places: Tensor) -> tuple[Tensor, slice, Tensor]:
        """Find the blocks of places int64 [n] in arrays [E, G, 1024/B, ...]: an index that gives [n, G, ...]."""
        extents = self.context.extents.table[slot, places // EXTENT_TOKENS].long()
        device = self.context.device
        return extents.to(device), slice(None), (places % EXTENT_TOKENS // self.block).to(device)
