"""The requests of a decode step and what is selected for them, as indexes and attention read them (kernels/cuda/batch.cuh).

The kernels of a captured graph get the same arguments at every replay. All values that vary from step to step are in one
int32 array of 16 numbers a request, which the engine writes before each step; on a GPU it is in device memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.errors import ConfigError
from kvseek.core.extents import extents_for

REQUEST_FIELDS = 16
# Batch sizes for which a GPU has captured steps; units.cuh counts up to the largest.
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
METHOD_FIELDS = 4  # fields of a request that are the method's own
MOST_TOGETHER = 4  # requests whose scans are one at most (kernels/cuda/codes/products.cuh)
LEAST_COMMON = 2048  # first tokens that requests of different slots have in common at least to be scanned together
LATEST = -1  # in place of a token: the one that the step before drew, which the host need not know yet


@dataclass(frozen=True, kw_only=True)
class RequestState:
    """One request of a decode step; the fields of `Request` in kernels/request.h, in order, but for the last three.

    Attributes
    ----------
    token : int
        Id of the token that the step reads, or LATEST; of no use to a method.
    slot : int
    position : int
        Position of that token in the sequence.
    write_row : int
        Window row that receives the token's key and value.
    sink_rows : int
        Window rows of the sink that hold a token, from row 0 on.
    ring_first, ring_rows : int
        First row of the ring that holds a token, counted from the ring's start, and number of rows that hold one; behind the
        ring's last row they go on at its first.
    length : int
        Tokens in the retrieval region.
    dense : bool
        Whether the request attends to every row, so that nothing is selected for it.
    method_fields : tuple of int
        Budget.method_fields of the method for this length, at most 4.
    """

    token: int = 0
    slot: int
    position: int = 0
    write_row: int = 0
    sink_rows: int = 0
    ring_first: int = 0
    ring_rows: int = 0
    length: int
    dense: bool = False
    method_fields: tuple[int, ...] = ()

    def packed(self) -> tuple[int, ...]:
        """Return the 16 numbers that kernels read; the last three depend on the batch (`arrange`)."""
        own = self.method_fields
        assert len(own) <= METHOD_FIELDS, f"a method has at most {METHOD_FIELDS} fields, not {len(own)}"
        return (  # field by field: dataclasses.astuple copies deeply, in every step for every request
            self.token,
            self.slot,
            self.position,
            self.write_row,
            self.sink_rows,
            self.ring_first,
            self.ring_rows,
            self.length,
            int(self.dense),
            *own,
            *(0,) * (REQUEST_FIELDS - METHOD_COLUMN - len(own)),
        )


COLUMNS = {field.name: number for number, field in enumerate(fields(RequestState))}
"""Of a packed request's numbers, by the field; those behind METHOD_COLUMN are the method's."""
METHOD_COLUMN = COLUMNS["method_fields"]


def pack(states: Sequence[RequestState], table: Tensor | None = None) -> Tensor:
    """Pack requests as kernels read them: int32 [batch, 16] on the CPU. `table` may be given, see `arrange`."""
    rows = np.array([state.packed() for state in states], dtype=np.int32).reshape(-1, REQUEST_FIELDS)
    arrange(rows, None if table is None else table.cpu().numpy())
    return torch.from_numpy(rows)


def arrange(rows: npt.NDArray[np.int32], table: npt.NDArray[np.int32] | None = None) -> None:
    """Set the numbers of requests [batch, 16] that follow from their batch: `companions`, `common` and `scratch`.

    Those for which rows are selected get scratch extents one after the other, as many as their regions have. Neighbours of
    one slot are companions, and so are those whose regions begin with the same extents, if `table`, int32 [slots, max_extents],
    tells them.
    """
    needed = np.where(rows[:, COLUMNS["dense"]], 0, extents_for(rows[:, COLUMNS["length"]]))
    rows[:, -3:-1], rows[:, -1] = 0, needed.cumsum() - needed
    slots, lengths = rows[:, COLUMNS["slot"]].tolist(), rows[:, COLUMNS["length"]].tolist()
    first, common = 0, 0
    for number in range(1, len(rows)):
        found = 0
        if needed[first] and needed[number] and number - first < MOST_TOGETHER:
            found = lengths[number]
            if slots[number] != slots[first]:
                alike = 0 if table is None else common_extents(table[slots[first]], table[slots[number]])
                found = min(alike, lengths[first] // EXTENT_TOKENS, lengths[number] // EXTENT_TOKENS) * EXTENT_TOKENS
                found *= found >= LEAST_COMMON
            found = min(found, common or found)
        if 2 * found <= common:  # or there is none
            first, common = number, 0
            continue
        common = found
        rows[number, -3], rows[first : number + 1, -2] = number - first, common


def common_extents(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """Count the first extents that two slots have in common, from their rows of a table."""
    differ = np.flatnonzero(one != other)
    return int(differ[0]) if len(differ) else len(one)


@dataclass(frozen=True)
class Batch:
    """The requests of a decode step.

    On a GPU the numbers change from replay to replay of a captured graph. So a selection that is captured may only pass the
    tensors on to kernels. References and the CPU's code also read `slots` and `lengths`, which wait for a GPU's stream.

    Attributes
    ----------
    requests : Tensor, int32 [batch, 16], on the engine's device
        Packed RequestStates.
    table : Tensor, int32 [slots, max_extents], on the engine's device
        Extents of each slot.
    latest : Tensor or None, int32 [slots], on the engine's device
        The token that each slot's last step has drawn: where a token is LATEST, and where this step's tokens go. None on the
        CPU, whose host knows every token.
    """

    requests: Tensor
    table: Tensor
    latest: Tensor | None = None

    @classmethod
    def of(cls, states: Sequence[RequestState], table: Tensor) -> Self:
        """Make the batch of these requests, on the device of `table`."""
        known = None if table.is_meta else table
        return cls(pack(states, known).to(table.device), table)

    @property
    def size(self) -> int:
        """Requests of the batch, those that only fill up a graph's bucket included."""
        return self.requests.shape[0]

    def column(self, name: str) -> Tensor:
        """Copy a field of RequestState of all requests: int32 [batch], on the device of `requests`."""
        return self.requests[:, COLUMNS[name]].clone(memory_format=torch.contiguous_format)

    @cached_property
    def slots(self) -> list[int]:
        """Slot of each request."""
        return self._listed("slot")

    @cached_property
    def lengths(self) -> list[int]:
        """Retrieval tokens of each request."""
        return self._listed("length")

    def in_rings(self, window: int, rows: int) -> Batch:
        """Make the batch of the same requests over rings alone, in which position p has row p mod `rows`.

        Each request attends to its latest `window` tokens, densely. No number is read back from a GPU.
        """
        requests, position = self.requests.clone(), self.requests[:, COLUMNS["position"]]
        first = (position + 1 - window).clamp(min=0)
        places = {"write_row": position % rows, "ring_first": first % rows, "ring_rows": position + 1 - first}
        for name, numbers in places.items():
            requests[:, COLUMNS[name]] = numbers
        for name, number in (("sink_rows", 0), ("length", 0), ("dense", 1)):
            requests[:, COLUMNS[name]] = number
        return Batch(requests, self.table, self.latest)

    def subset(self, requests: Sequence[int]) -> Batch:
        """Make the batch of some of the requests, given by their numbers in this batch."""
        return Batch(self.requests[list(requests)], self.table)

    def _listed(self, name: str) -> list[int]:
        return [int(number) for number in self.requests[:, COLUMNS[name]].tolist()]


def most_requests(slots: int) -> int:
    """Return the requests of the largest batch over `slots` slots; several requests that fill up a graph share one slot."""
    return max(slots, next((size for size in BUCKETS if size >= slots - 1), 0))


def buckets_for(max_batch_size: int) -> tuple[int, ...]:
    """Return the buckets that an engine needs: all up to the first that holds `max_batch_size`; raises ConfigError above 64."""
    if max_batch_size > BUCKETS[-1]:
        raise ConfigError(
            f"max_batch_size = {max_batch_size}: must be <= {BUCKETS[-1]} with device = 'cuda'; build with less"
        )
    return BUCKETS[: BUCKETS.index(bucket_of(max_batch_size)) + 1]


def bucket_of(batch: int) -> int:
    """Return the smallest bucket that holds a batch."""
    return next(size for size in BUCKETS if size >= batch)


@dataclass(frozen=True)
class Selection:
    """Retrieval rows to attend to, on the engine's device. To attend to every row, a method returns None instead.

    Attributes
    ----------
    rows : Tensor, int32 [batch, G, entries]
        Places of the retrieval region, none of which occurs twice in one [batch, KV head]; -1 is no entry. Neighbouring places
        should be neighbouring entries, because a GPU reads them together. Undefined for requests with `dense` set, and on a GPU
        for those that only fill up a batch.
    """

    rows: Tensor
