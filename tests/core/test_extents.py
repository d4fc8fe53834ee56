"""Extents: who owns which, what a refusal leaves behind, and rows that cross their borders."""

from __future__ import annotations

import pytest
import torch

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.errors import CapacityError
from kvseek.core.extents import ExtentTable


def test_extents_are_reserved_and_returned() -> None:
    table = ExtentTable(slots=2, max_extents=3, capacity=4)
    table.reserve(0, 2 * EXTENT_TOKENS + 1)
    assert table.free == 1
    with pytest.raises(CapacityError, match="2 more extents of 1024 tokens, 1 of 4 are free"):
        table.reserve(1, EXTENT_TOKENS + 1)
    assert table.free == 1, "a refused reservation changes nothing"
    table.release(0)
    assert table.free == 4
    assert (table.table == -1).all()


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


def test_a_shared_extent_is_free_when_its_last_user_has_gone() -> None:
    table = ExtentTable(slots=2, max_extents=3, capacity=4)
    table.reserve(0, 2 * EXTENT_TOKENS)
    table.reserve(1, 3 * EXTENT_TOKENS, table.of_slot(0))
    assert table.of_slot(1)[:2] == table.of_slot(0)
    assert (table.used, table.idle, table.free) == (3, 0, 1)
    table.release(0)
    assert (table.used, table.idle, table.free) == (3, 0, 1)
    table.release(1)
    assert (table.used, table.idle, table.free) == (0, 0, 4)


def test_a_kept_extent_stays_without_users() -> None:
    table = ExtentTable(slots=2, max_extents=3, capacity=4)
    table.reserve(0, 2 * EXTENT_TOKENS)
    kept, other = table.of_slot(0)
    table.keep(kept)
    table.release(0)
    assert (table.used, table.idle, table.free) == (0, 1, 3)
    table.reserve(1, 3 * EXTENT_TOKENS)
    with pytest.raises(CapacityError, match="1 more extents of 1024 tokens, 0 of 4 are free"):
        table.reserve(0, EXTENT_TOKENS)
    table.release(1)
    table.reserve(1, EXTENT_TOKENS, [kept])
    assert (table.of_slot(1), table.in_use(kept), table.in_use(other)) == ((kept,), True, False)
    table.forget(kept)
    assert (table.used, table.idle, table.free) == (1, 0, 3), "forgotten, but in use"
    table.release(1)
    assert (table.used, table.idle, table.free) == (0, 0, 4)
