"""Row pools filled with synthetic keys: what lies in them is what the indexes are built on."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.support.cache_twins import KV_HEADS, LAYERS, MODEL, KeyList, make_config

from kvseek.benchmarks import device_filling
from kvseek.benchmarks.device.filling import Filler
from kvseek.benchmarks.device.memory_plan import Cell
from kvseek.core.errors import CapacityError
from kvseek.engine.cache.cache import Cache

CPU = torch.device("cpu")
SHAPE = dataclasses.replace(MODEL, head_dim=16)
CELL, ROOM = Cell(2500, 2), 64


class NoRoom(KeyList):
    """An index that cannot be built."""

    def build(self, slot: int, keys: torch.Tensor, queries: torch.Tensor) -> None:
        raise CapacityError("no room for the index")


def make(monkeypatch: pytest.MonkeyPatch, index: type[KeyList] = KeyList) -> tuple[Filler, DeviceCache, list[Any]]:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(device_filling, "CHUNK_TOKENS", 1024)  # rows are written in several pieces
    config = dataclasses.replace(make_config(4, 16, 64, "always"), model=SHAPE)
    cache = DeviceCache(config, torch.float32, CPU, None)
    indexes = [index(layer, cache.lengths, cache) for layer in range(LAYERS)]
    return Filler(SHAPE, [CELL], torch.float32, CPU, seed=3, room=ROOM), cache, indexes


def test_the_pool_holds_the_keys_that_the_index_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of two slots and of two layers differ."""
    filler, cache, indexes = make(monkeypatch)
    filler.fill(CELL, [(cache, [indexes])])
    seen = {}
    for layer, index in enumerate(indexes):
        for slot in range(CELL.batch):
            n = cache.lengths[slot]
            assert n == CELL.context - 4 - 16
            rows = cache.extents.read(cache.layer_rows(layer), slot, n)
            assert rows.shape == (KV_HEADS, n, 2, 16)
            assert torch.equal(rows[:, :, 0], index.visible[slot])
            assert torch.equal(rows[:, :, 0], filler.keys(layer, slot, n))
            seen[layer, slot] = rows[:, :, 0]
    assert not torch.equal(seen[0, 0], seen[0, 1])
    assert not torch.equal(seen[0, 0], seen[1, 0])


def test_a_failure_half_way_leaves_the_keys_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are turned in place, layer by layer; what is filled next begins with the same ones, to the bit."""
    filler, cache, indexes = make(monkeypatch, NoRoom)
    before = filler.keys(1, 0, CELL.context)
    with pytest.raises(CapacityError, match="no room for the index"):
        filler.fill(CELL, [(cache, [indexes])])
    assert torch.equal(filler.keys(1, 0, CELL.context), before)
