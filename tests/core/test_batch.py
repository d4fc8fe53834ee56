"""Requests as kernels read them: fields by number, columns and parts."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvseek.core.batch import REQUEST_FIELDS, Batch, RequestState, pack

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
    with pytest.raises(AssertionError, match="at most 6 fields, not 8"):
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
