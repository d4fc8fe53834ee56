"""What lies between layers and cache: builds beside the prompt, and what a new prompt invalidates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.support.cache_runs import CPU, LAYERS, KeyList, make_cache, make_config, read_rows, rows_of
from torch import Tensor

from kvseek.core.batch import Batch
from kvseek.core.streams import SideWork
from kvseek.engine.retrieval import BUILDS_IN_FLIGHT, Retrieval
from kvseek.plugins.contract import Budget

MADE = make_config(4, 8, 8, offload="always")
CONFIG = dataclasses.replace(MADE, cache=dataclasses.replace(MADE.cache, full_threshold=30))
TOKENS = 100


class Build(SideWork):
    """Notes in `waits` that it was waited for; it runs until then."""

    def __init__(self, layer: int, waits: list[int]) -> None:
        super().__init__(CPU, None)
        self.layer, self.waits = layer, waits

    @property
    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self.waits.append(self.layer)


class SideIndex(KeyList):
    """Builds beside the prompt, and selects a number of rows that depends on the layer."""

    waits: list[int]

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> SideWork | None:
        super().build(slot, keys, queries)
        return Build(self.context.layer, self.waits)

    def budget(self, length: int) -> Budget:
        return Budget(10.0 * (self.context.layer + 1), (length, self.context.layer))


class UpkeptIndex(SideIndex):
    """Notes the slots whose upkeep it is asked for."""

    def refresh(self, slots: Sequence[int]) -> None:
        self.waits += slots


class Forgetful:
    """Stands for the hot rows of a layer."""

    def __init__(self) -> None:
        self.forgotten: list[int] = []

    def forget(self, slot: int) -> None:
        self.forgotten.append(slot)


@pytest.fixture
def waits() -> list[int]:
    return []


@pytest.fixture
def hot() -> Forgetful:
    return Forgetful()


@pytest.fixture
def retrieval(waits: list[int], hot: Any) -> Retrieval:
    cache = make_cache(CONFIG)
    indexes = [SideIndex(layer, cache) for layer in range(LAYERS)]
    for index in indexes:
        index.waits = waits
    return Retrieval(CONFIG, cache, indexes, [], [hot])


def read(retrieval: Retrieval, slot: int, layers: int = LAYERS, tokens: int = TOKENS) -> None:
    """Store the first layers of a prompt."""
    retrieval.cache.open(slot, tokens + 20)
    retrieval.expect(slot, tokens)
    for layer in range(layers):
        keys = rows_of(slot, layer, torch.arange(tokens))
        retrieval.store_layer(layer, slot, keys, -keys, keys)


def test_few_builds_run_beside_a_prompt(retrieval: Retrieval, waits: list[int]) -> None:
    assert BUILDS_IN_FLIGHT == 2
    read(retrieval, 0)
    assert waits == [0], "the third layer's build began when the first had ended"
    retrieval.finish_indexes(0)
    assert waits == [0, 1, 2]


def test_a_slots_next_prompt_follows_the_builds_of_one_that_was_given_up(
    retrieval: Retrieval, waits: list[int], hot: Forgetful
) -> None:
    read(retrieval, 1, 2)
    retrieval.cache.close(1)
    assert waits == []
    read(retrieval, 1, 0)
    assert waits == [0, 1]
    assert hot.forgotten == [1, 1], "each prompt makes the hot rows of the slot's last request invalid"


def test_rows_lie_in_the_order_of_their_tokens(retrieval: Retrieval) -> None:
    read(retrieval, 2)
    retrieval.finish_rows(2)
    cache, n = retrieval.cache, retrieval.cache.lengths[2]
    for layer in range(LAYERS):
        found = read_rows(cache, layer, 2)
        assert torch.equal(found[:, :, 0], rows_of(2, layer, torch.arange(4, 4 + n)))


def test_what_a_step_attends_to(retrieval: Retrieval) -> None:
    """Rows are the mean over the layers, 20 here. Short requests are dense, and those whose region has no more rows."""
    for slot, tokens in enumerate((TOKENS, 28, 31)):
        read(retrieval, slot, tokens=tokens)
    states, attended = retrieval.begin_step([7, 8, 9], [0, 1, 2])
    batch = Batch(states, retrieval.cache.extents.table)
    assert batch.column("token").tolist() == [7, 8, 9]
    assert batch.column("length").tolist() == [88, 16, 16]
    assert batch.column("dense").tolist() == [False, True, True]
    assert attended == [4 + 9 + 20, 29, 32]
    assert states[:, 9:11].tolist() == [[88, 0], [16, 0], [16, 0]], "the first layer's: alike in all"


def test_upkeep_is_for_slots_that_select(waits: list[int]) -> None:
    """A slot attends to everything while it is short: in its 30th token's step it selects rows for the first time."""
    cache = make_cache(CONFIG)
    index = UpkeptIndex(0, cache)
    index.waits = waits
    retrieval = Retrieval(CONFIG, cache, [index], [])
    for slot, tokens in enumerate((TOKENS, 28)):
        read(retrieval, slot, 1, tokens)
        retrieval.finish_indexes(slot)
    upkept = []
    for _ in range(3):
        waits.clear()
        retrieval.begin_step([7, 8], [0, 1])
        retrieval.refresh([0, 1])
        upkept.append(list(waits))
    assert upkept == [[0], [0, 1], [0, 1]]
    retrieval.refresh([1])
    assert waits[-1] == 1
