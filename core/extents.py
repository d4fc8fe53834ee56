"""Extents: the unit in which cache rows and index arrays are allocated.

One extent is room for EXTENT_TOKENS tokens of one slot in every layer and KV head. The row pool and every index array
are arrays of extents with the same numbering, so one table per slot addresses all of them, and memory follows the
tokens that exist: CPU pages of an extent that was never written are never committed.

Slots may share an extent, and an extent may be kept for later requests while no slot uses it. Nobody writes to an extent that
is shared or kept; it is free again when its last user has let it go and it is no longer kept.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .config import EXTENT_TOKENS
from .errors import CapacityError

Tokens = TypeVar("Tokens", int, npt.NDArray[np.int32])
Span = tuple[int, slice, slice]
"""Consecutive places in one extent: the extent, the places inside it, and the same places counted from the first of all spans."""


def extents_for(tokens: Tokens) -> Tokens:
    """Return the number of extents that `tokens` retrieval tokens occupy; of each in an array."""
    return -(-tokens // EXTENT_TOKENS)


def cut(extents: Sequence[int], start: int, stop: int) -> list[Span]:
    """Cut the places [start, stop) of a sequence at the borders of its extents, which are given in order."""
    pieces = []
    position = start
    while position < stop:
        offset = position % EXTENT_TOKENS
        length = min(EXTENT_TOKENS - offset, stop - position)
        places, counted = slice(offset, offset + length), slice(position - start, position - start + length)
        pieces.append((extents[position // EXTENT_TOKENS], places, counted))
        position += length
    return pieces


@dataclass
class ExtentTable:
    """The extents that each slot uses, those that are kept for later requests, and those that are free.

    Attributes
    ----------
    capacity : int
        Extents in the pool.
    table : Tensor, int32 [slots, max_extents]
        Number of the extent that holds places e * EXTENT_TOKENS and on of a slot, in column e; -1 where there is none.
    device_table : Tensor, int32 [slots, max_extents], on `device`
        A copy of `table` for kernels; `reserve` and `release` keep it equal.
    changes : int
        Times that a slot's extents have changed.
    """

    slots: int
    max_extents: int
    capacity: int
    device: torch.device = torch.device("cpu")  # noqa: RUF009  immutable
    table: Tensor = field(init=False)
    device_table: Tensor = field(init=False)
    changes: int = field(init=False, default=0)
    _free: list[int] = field(init=False)
    _owned: list[list[int]] = field(init=False)
    _users: list[int] = field(init=False)  # of each extent: the slots that have it, and who else holds it
    _kept: set[int] = field(init=False)
    _used: int = field(init=False)  # extents with users
    _idle: int = field(init=False)  # kept extents without users

    def __post_init__(self) -> None:
        self.table = torch.full((self.slots, max(1, self.max_extents)), -1, dtype=torch.int32)
        self.device_table = self.table.to(self.device)  # the same tensor on the CPU
        self._free = list(range(self.capacity - 1, -1, -1))
        self._owned = [[] for _ in range(self.slots)]
        self._users, self._kept, self._used, self._idle = [0] * self.capacity, set(), 0, 0

    @property
    def free(self) -> int:
        """Extents that nobody uses and that are not kept."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Extents with users; an extent that several slots share counts once."""
        return self._used

    @property
    def idle(self) -> int:
        """Extents that are kept and have no users."""
        return self._idle

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many extents are used, free and kept. While these stay the same, nothing has been gained."""
        return self._used, len(self._free), len(self._kept)

    def checksum(self, before: int = 0) -> int:
        """Compute a CRC-32 of the slots' extents, of those that will be given away next and of how many are used and kept."""
        before = zlib.crc32(array("q", (self._used, self._idle, len(self._kept))), before)
        return zlib.crc32(array("q", self._free), zlib.crc32(self.table.numpy().tobytes(), before))

    def in_use(self, extent: int) -> bool:
        """Whether an extent has users."""
        return self._users[extent] > 0

    def of_slot(self, slot: int) -> tuple[int, ...]:
        """Return the extents of a slot, in the order of its places."""
        return tuple(self._owned[slot])

    def sole(self, slot: int) -> int:
        """Count the extents of a slot that nobody else uses: those that would be free, or kept alone, without it."""
        return sum(self._users[extent] == 1 for extent in self._owned[slot])

    def hold(self, extents: Sequence[int]) -> None:
        """Become a user of these extents, each of which is kept or has users, so that they stay until `let_go`."""
        for extent in extents:
            assert self._users[extent] or extent in self._kept, "a free extent holds nobody's rows"
            if not self._users[extent]:
                self._used, self._idle = self._used + 1, self._idle - 1
            self._users[extent] += 1

    def let_go(self, extents: Sequence[int]) -> None:
        """End a use of each of these extents; those that are not kept are free if that was the last."""
        for extent in extents:
            assert self._users[extent], "each use ends once"
            self._users[extent] -= 1
            if not self._users[extent]:
                self._used -= 1
                self._give_back(extent)

    def keep(self, extent: int) -> None:
        """Keep an extent that has users: it will not be free when the last of them has let it go."""
        assert self._users[extent], "only an extent with users may be kept"
        self._kept.add(extent)

    def forget(self, extent: int) -> None:
        """Keep an extent no longer."""
        self._kept.remove(extent)
        if not self._users[extent]:
            self._idle -= 1
            self._give_back(extent)

    def _give_back(self, extent: int) -> None:
        if extent in self._kept:
            self._idle += 1
        else:
            self._free.append(extent)

    def reserve(self, slot: int, tokens: int, shared: Sequence[int] = ()) -> None:
        """Give `slot` the extents of `tokens` retrieval tokens; raises CapacityError if too few are free.

        If it raises, nothing has changed.

        Parameters
        ----------
        shared : sequence of int
            Extents, in use or kept, that a slot without extents begins with; at most as many as it needs. The slot must not
            write to them.
        """
        assert not (shared and self._owned[slot]), "a slot's first extents are given once"
        if extents_for(tokens) > self.max_extents:
            raise CapacityError(
                f"{tokens} retrieval tokens need {extents_for(tokens)} extents of {EXTENT_TOKENS} tokens, a slot has at most "
                f"{self.max_extents}; build with a larger max_seq_len"
            )
        needed = extents_for(tokens) - len(self._owned[slot]) - len(shared)
        if needed > self.free:
            raise CapacityError(
                f"{tokens} tokens need {needed} more extents of {EXTENT_TOKENS} tokens, {self.free} of {self.capacity} are "
                "free; wait for running requests to end or raise kv_cache_host_memory_bytes"
            )
        if needed <= 0 and not shared:
            return
        assert needed >= 0, "a slot shares no more extents than it needs"
        new = self._free[len(self._free) - needed :][::-1]
        owned = [*self._owned[slot], *shared, *new]
        row = self.table[slot].clone()
        row[: len(owned)] = torch.tensor(owned, dtype=torch.int32)
        self._upload(slot, row)  # before the host's own tables change, because it may fail
        self.table[slot] = row
        self._owned[slot] = owned
        self.changes += 1
        self.hold(shared)
        del self._free[len(self._free) - needed :]
        for extent in new:
            self._users[extent] = 1
        self._used += needed

    def release(self, slot: int) -> None:
        """End a slot's use of all its extents."""
        self.let_go(self._owned[slot][::-1])
        self._owned[slot].clear()
        self.changes += 1
        self.table[slot].fill_(-1)
        self._upload(slot, self.table[slot])

    def _upload(self, slot: int, row: Tensor) -> None:
        # Pinned, so that the host does not wait for the stream; a copy, so that the host may change the table meanwhile.
        if self.device.type != "cpu":
            self.device_table[slot].copy_(row.pin_memory(), non_blocking=True)

    def room(self, slot: int) -> int:
        """Return the number of retrieval tokens for which the extents of `slot` have room, shared ones included."""
        return len(self._owned[slot]) * EXTENT_TOKENS

    def spans(self, slot: int, start: int, stop: int) -> list[Span]:
        """Cut the places [start, stop) of a slot at the borders of its extents; see `cut`."""
        return cut(self._owned[slot], start, stop)

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
