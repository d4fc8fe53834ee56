"""Requests as kernels read them: fields by number, columns and parts."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvseek.core.batch import LEAST_COMMON, REQUEST_FIELDS, Batch, RequestState, pack
from kvseek.core.config import EXTENT_TOKENS

STATE = RequestState(
    token=11,
    slot=12,
    position=13,
    write_row=14,
    sink_rows=15,
    ring_first=16,
    ring_rows=17,
    length=18,
    dense=True,
    method_fields=(21, 22),
)
FIELDS = [field.name for field in dataclasses.fields(RequestState) if field.name != "method_fields"]


def make(*slots: int) -> Batch:
    table = torch.arange(20, dtype=torch.int32).view(10, 2)
    return Batch.of([dataclasses.replace(STATE, slot=slot, length=100 * slot) for slot in slots], table)


def test_requests_are_packed_in_the_order_of_their_fields() -> None:
    fixed = [int(getattr(STATE, name)) for name in FIELDS]
    assert pack([STATE]).tolist() == [[*fixed, 21, 22, 0, 0, 0, 0, 0]]
    assert pack([]).shape == (0, REQUEST_FIELDS)
    with pytest.raises(AssertionError, match="at most 4 fields, not 8"):
        dataclasses.replace(STATE, method_fields=(0,) * 8).packed()


@pytest.mark.parametrize("name", FIELDS)
def test_a_column_is_a_field(name: str) -> None:
    column = make(3, 1, 4).column(name)
    assert (column.dtype, column.is_contiguous()) == (torch.int32, True)
    values = {"slot": [3, 1, 4], "length": [300, 100, 400]}.get(name, [int(getattr(STATE, name))] * 3)
    assert column.tolist() == values


@pytest.mark.parametrize("slots", [(3,), (3, 1)])
def test_a_column_is_a_copy(slots: tuple[int, ...]) -> None:
    """Of one request too, whose column would be contiguous where it lies: at an address that not all kernels read."""
    batch = make(*slots)
    column = batch.column("position")
    batch.requests.fill_(-1)
    assert column.tolist() == [13] * len(slots)
    assert column.storage_offset() == 0


def test_a_part_has_some_of_the_requests() -> None:
    batch = make(3, 1, 4, 5)
    part = batch.subset([2, 0])
    assert (part.size, part.slots, part.lengths) == (2, [4, 3], [400, 300])
    assert torch.equal(part.requests, batch.requests[[2, 0]])
    assert part.table is batch.table, "extents are found by slot"
    assert (batch.size, batch.slots, batch.lengths) == (4, [3, 1, 4, 5], [300, 100, 400, 500])


def companions(slots: list[int], lengths: list[int], dense: set[int], table: list[list[int]]) -> list[tuple[int, int]]:
    """Of each request the companions before it, and the tokens that all of them have in common."""
    states = [RequestState(slot=slot, length=lengths[slot], dense=slot in dense) for slot in slots]
    packed = pack(states, torch.tensor(table, dtype=torch.int32)).tolist()
    return [(row[-3], row[-2]) for row in packed]


def test_neighbours_of_a_slot_are_companions() -> None:
    table, lengths = [[0, 1], [2, 3], [4, 5]], [1500, 100, 2000]
    own = [(number, 1500) for number in range(4)]
    assert companions([0] * 6, lengths, set(), table) == [*own, *own[:2]]
    assert companions([1, 2, 2, 0, 2], lengths, set(), table) == [(0, 0), (0, 2000), (1, 2000), (0, 0), (0, 0)]
    assert companions([2, 2, 2], lengths, {2}, table) == [(0, 0)] * 3, "nothing is scanned"


def test_slots_that_share_extents_are_companions_as_far_as_they_do() -> None:
    least = LEAST_COMMON // EXTENT_TOKENS
    shared = list(range(10, 10 + 4 * least))
    table = [
        [*shared, 1, 2],
        [*shared, 3, -1],
        [*shared[:least], *[4] * 3 * least, 5, 6],
        [*shared[:1], *[7] * (4 * least + 1)],
    ]
    whole = 4 * LEAST_COMMON
    lengths = [whole + 1100, whole + 100, whole, whole]
    assert companions([0, 1, 1], lengths, set(), table) == [(0, whole), (1, whole), (2, whole)]
    assert companions([0, 2], lengths, set(), table) == [(0, LEAST_COMMON), (1, LEAST_COMMON)]
    assert companions([0, 1, 2], lengths, set(), table)[:2] == [(0, whole), (1, whole)], "few in common would cost many"
    assert companions([0, 3], lengths, set(), table) == [(0, 0), (0, 0)], "too few"
