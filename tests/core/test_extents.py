"""Extents: how many a slot may have, and rows that cross their borders. Who owns which: tests/engine/test_admission.py."""

from __future__ import annotations

import pytest
import torch

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.errors import CapacityError
from kvseek.core.extents import ExtentTable


def test_a_slot_never_gets_more_extents_than_its_table_holds() -> None:
    table = ExtentTable(slots=1, max_extents=2, capacity=9)
    table.reserve(0, 10)
    table.reserve(0, EXTENT_TOKENS + 1)
    assert table.room(0) == 2 * EXTENT_TOKENS
    assert sorted(table.table[0].tolist()) == [0, 1]
    with pytest.raises(CapacityError, match=r"2049 retrieval tokens need 3 extents .*at most 2; .*max_seq_len"):
        table.reserve(0, 2 * EXTENT_TOKENS + 1)
    assert table.free == 7, "a refused reservation changes nothing"
    assert torch.equal(table.device_table, table.table)
    with pytest.raises(CapacityError, match="4 more extents of 1024 tokens, 3 of 3 are free"):
        ExtentTable(slots=1, max_extents=4, capacity=3).reserve(0, 4 * EXTENT_TOKENS)


def test_a_reservation_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    table = ExtentTable(slots=1, max_extents=3, capacity=4)
    table.reserve(0, 10)

    def fail(slot: int, row: torch.Tensor) -> None:
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(table, "_upload", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            table.reserve(0, 3 * EXTENT_TOKENS)
    assert (table.free, table.room(0), table.table.tolist()) == (3, EXTENT_TOKENS, [[0, -1, -1]])
    table.reserve(0, 3 * EXTENT_TOKENS)
    assert (table.free, table.table.tolist()) == (1, [[0, 1, 2]])


def test_rows_cross_extent_borders() -> None:
    table = ExtentTable(slots=1, max_extents=3, capacity=3)
    table.reserve(0, 3 * EXTENT_TOKENS)
    array = torch.zeros(3, 1, EXTENT_TOKENS, 1)
    values = torch.arange(2.0 * EXTENT_TOKENS)[None, :, None]
    table.write(array, 0, 500, values)
    assert torch.equal(table.read(array, 0, 2 * EXTENT_TOKENS + 500)[:, 500:], values)
