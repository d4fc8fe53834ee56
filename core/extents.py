"""Extents: the unit in which cache rows and index arrays are allocated.

One extent is room for EXTENT_TOKENS tokens of one slot in every layer and KV head. The row pool and every index array
are arrays of extents with the same numbering, so one table per slot addresses all of them, and memory follows the
tokens that exist: CPU pages of an extent that was never written are never committed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .config import EXTENT_TOKENS
from .errors import CapacityError


def extents_for(tokens: int) -> int:
    """Return the number of extents that `tokens` retrieval tokens occupy."""
    return -(-tokens // EXTENT_TOKENS)


@dataclass
class ExtentTable:
    """The extents that each slot owns, and those that are free.

    Attributes
    ----------
    capacity : int
        Extents in the pool.
    table : Tensor, int32 [slots, max_extents]
        Number of the extent that holds places e * EXTENT_TOKENS and on of a slot, in column e; -1 where there is none.
    device_table : Tensor, int32 [slots, max_extents], on `device`
        A copy of `table` for kernels; `reserve` and `release` keep it equal.
    """

    slots: int
    max_extents: int
    capacity: int
    device: torch.device = torch.device("cpu")  # noqa: RUF009  immutable
    table: Tensor = field(init=False)
    device_table: Tensor = field(init=False)
    _free: list[int] = field(init=False)
    _owned: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.table = torch.full((self.slots, max(1, self.max_extents)), -1, dtype=torch.int32)
        self.device_table = self.table.to(self.device)  # the same tensor on the CPU
        self._free = list(range(self.capacity - 1, -1, -1))
        self._owned = [[] for _ in range(self.slots)]

    @property
    def free(self) -> int:
        """Extents that no slot owns."""
        return len(self._free)

    def reserve(self, slot: int, tokens: int) -> None:
        """Give `slot` the extents of `tokens` retrieval tokens; raises CapacityError if too few are free.

        If it raises, nothing has changed.
        """
        if extents_for(tokens) > self.max_extents:
            raise CapacityError(
                f"{tokens} retrieval tokens need {extents_for(tokens)} extents of {EXTENT_TOKENS} tokens, a slot has at most "
                f"{self.max_extents}; build with a larger max_seq_len"
            )
        needed = extents_for(tokens) - len(self._owned[slot])
        if needed > self.free:
            raise CapacityError(
                f"{tokens} tokens need {needed} more extents of {EXTENT_TOKENS} tokens, {self.free} of {self.capacity} are "
                "free; wait for running requests to end or raise kv_cache_host_memory_bytes"
            )
        if needed <= 0:
            return
        owned = [*self._owned[slot], *reversed(self._free[-needed:])]
        row = self.table[slot].clone()
        row[: len(owned)] = torch.tensor(owned, dtype=torch.int32)
        self._upload(slot, row)  # before the host's own tables change, because it may fail
        self.table[slot] = row
        self._owned[slot] = owned
        del self._free[-needed:]

    def release(self, slot: int) -> None:
        """Return all extents of `slot` to the pool."""
        self._free.extend(reversed(self._owned[slot]))
        self._owned[slot].clear()
        self.table[slot].fill_(-1)
        self._upload(slot, self.table[slot])

    def _upload(self, slot: int, row: Tensor) -> None:
        # Pinned, so that the host does not wait for the stream; a copy, so that the host may change the table meanwhile.
        if self.device.type != "cpu":
            self.device_table[slot].copy_(row.pin_memory(), non_blocking=True)

    def room(self, slot: int) -> int:
        """Return the number of retrieval tokens for which the extents of `slot` have room."""
        return len(self._owned[slot]) * EXTENT_TOKENS

    def spans(self, slot: int, start: int, stop: int) -> list[tuple[int, slice, slice]]:
        """Cut the places [start, stop) of a slot at the borders of extents.

        Returns (extent, places inside the extent, places counted from `start`) for each piece, in order.
        """
        pieces = []
        position = start
        while position < stop:
            offset = position % EXTENT_TOKENS
            length = min(EXTENT_TOKENS - offset, stop - position)
            extent = self._owned[slot][position // EXTENT_TOKENS]
            pieces.append((extent, slice(offset, offset + length), slice(position - start, position - start + length)))
            position += length
        return pieces

    def write(self, array: Tensor, slot: int, start: int, values: Tensor) -> None:
        """Write `values` [G, n, ...] to the places from `start` on of `slot`, in `array` [extents, G, 1024, ...]."""
        for extent, inside, source in self.spans(slot, start, start + values.shape[1]):
            array[extent, :, inside] = values[:, source]

    def read(self, array: Tensor, slot: int, length: int) -> Tensor:
        """Copy the first `length` places of `slot` out of `array` [extents, G, 1024, ...]: [G, length, ...]."""
        parts = [array[extent, :, inside] for extent, inside, _ in self.spans(slot, 0, length)]
        if not parts:
            return array.new_empty((array.shape[1], 0, *array.shape[3:]))
        return torch.cat(parts, dim=1)
