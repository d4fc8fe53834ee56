"""Synthetic keys have the statistics of real ones; what lies in a pool is what the indexes are built on."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from kvseek.bench.speed.device import filling
from kvseek.bench.speed.device.filling import Filler, Spectrum, SyntheticKeys
from kvseek.bench.speed.device.memory_plan import Cell
from kvseek.core.batch import Batch, Selection
from kvseek.core.config import CacheConfig, EngineConfig
from kvseek.core.errors import CapacityError
from kvseek.core.model_config import ModelConfig
from kvseek.engine.cache.cache import Cache
from kvseek.engine.cache.memory_layout import host_rows
from kvseek.engine.cache.row_storage import RowStorage
from kvseek.engine.loading.indexes import IndexMaker
from kvseek.plugins.contract import Budget, Index

CPU = torch.device("cpu")
LAYERS, KV_HEADS = 3, 2
SHAPE = ModelConfig("llama", 16, 64, 8, LAYERS, 4, KV_HEADS, 16, 1e-5, 1e4, 1 << 20)
CELL, ROOM = Cell(2500, 2), 64


class KeyList(Index):
    """Keeps the keys that it is built from, by slot."""

    @property
    def bytes_per_token(self) -> float:
        return 0.0

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        self.built = {**getattr(self, "built", {}), slot: keys.clone()}

    def append(self, slot: int, start: int, keys: Tensor) -> None: ...

    def budget(self, length: int) -> Budget:
        return Budget(length)

    def select(self, queries: Tensor, batch: Batch) -> Selection | None:
        return None


class NoRoom(KeyList):
    """An index that cannot be built."""

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        raise CapacityError("no room for the index")


def make(monkeypatch: pytest.MonkeyPatch, kind: type[KeyList] = KeyList) -> tuple[Filler, Cache, list[Index]]:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(filling, "CHUNK_TOKENS", 1024)  # rows are written in several pieces
    sizes = {"max_batch_size": CELL.batch + 1, "max_seq_len": 4096, "max_input_len": 4096}
    config = EngineConfig(SHAPE, "full", cache=CacheConfig(sink=4, local=16, update=64), dtype="float32", **sizes)
    cache = Cache(config, torch.float32, CPU, RowStorage(config, torch.float32, CPU, host_rows(config, torch.float32)))
    contexts = [index.context for index in IndexMaker(config, {}).over(cache)]
    indexes: list[Index] = [kind(dataclasses.replace(context, shared={})) for context in contexts]
    return Filler(SHAPE, [CELL], torch.float32, CPU, seed=3, room=ROOM), cache, indexes


def test_the_pool_holds_the_keys_that_the_index_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of two slots and of two layers differ."""
    filler, cache, indexes = make(monkeypatch)
    filler.fill(CELL, [(cache, [indexes])])
    seen = {}
    for layer, index in enumerate(indexes):
        assert isinstance(index, KeyList)
        for slot in range(CELL.batch):
            n = cache.lengths[slot]
            assert n == (CELL.context - 1 - 4 - 16) // 64 * 64
            rows = cache.extents.read(cache.rows.of_layer(layer).pool, slot, n)
            assert rows.shape == (KV_HEADS, n, 2, 16)
            assert torch.equal(rows[:, :, 0], index.built[slot])
            assert torch.equal(filler.keys(layer, slot, n), index.built[slot])
            seen[layer, slot] = rows[:, :, 0]
    assert not torch.equal(seen[0, 0], seen[0, 1])
    assert not torch.equal(seen[0, 0], seen[1, 0])


def test_slots_that_a_cell_does_not_have_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    filler, cache, indexes = make(monkeypatch)
    filler.fill(CELL, [(cache, [indexes])])
    filler.fill(Cell(1200, 1), [(cache, [indexes])])
    assert cache.tokens[: CELL.batch] == [4 + 16 + 1 + 1152, 0], "nothing is in the update buffer"
    assert cache.extents.capacity - cache.extents.free == 2  # of the longest that the request may grow to


def test_a_failure_half_way_leaves_the_keys_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are turned in place, layer by layer; what is filled next begins with the same ones, to the bit."""
    filler, cache, indexes = make(monkeypatch, NoRoom)
    before = filler.keys(1, 0, CELL.context)
    with pytest.raises(CapacityError, match="no room for the index"):
        filler.fill(CELL, [(cache, [indexes])])
    assert torch.equal(filler.keys(1, 0, CELL.context), before)


class TestSynthetic:
    tokens = 8192

    @pytest.fixture
    def source(self) -> SyntheticKeys:
        return SyntheticKeys(2, 128, CPU, seed=1)

    @pytest.fixture
    def keys(self, source: SyntheticKeys) -> torch.Tensor:
        return source.keys(self.tokens)

    def test_spectrum(self, keys: torch.Tensor) -> None:
        """Eigenvalues of the covariance fall as 1/rank or, where a frequent topic lies, faster, in no channel's direction;
        a few channels hold most of the mean."""
        for head in keys:
            eigenvalues = torch.linalg.eigvalsh(head.T.cov()).flip(0)
            assert 7 < (eigenvalues[7] / eigenvalues[63]).item() < 16
            assert head.var(dim=0).max() < 0.25 * eigenvalues[0]
            mean = head.mean(dim=0).square().sort(descending=True).values
            assert mean[:4].sum() > 0.5 * mean.sum()
            assert mean.sum() > 0.5 * head.var(dim=0).sum()

    def test_topics_persist_and_differ_in_frequency(self, source: SyntheticKeys) -> None:
        topics = source.topic_runs(50_000)
        changes = (topics[1:] != topics[:-1]).float().mean().item()
        assert 1 / changes == pytest.approx(Spectrum().run_tokens, rel=0.15)
        counts = torch.bincount(topics, minlength=1024).sort(descending=True).values
        assert counts[0] > 20 * counts[100]

    def test_attention_is_concentrated(self, source: SyntheticKeys, keys: torch.Tensor) -> None:
        """The best 100 of 8,192 keys hold about two thirds of the mass, as on real keys; so of another layer's keys."""
        queries = source.queries(8, 64)
        for signs in (torch.ones(2, 1, 128), source.signs()):
            turned = (queries * signs.repeat_interleave(4, dim=0)).view(2, 256, 128)
            weights = (turned @ (keys * signs).transpose(1, 2) / 128**0.5).softmax(dim=-1)
            assert weights.topk(100).values.sum(dim=-1).mean().item() == pytest.approx(0.65, abs=0.1)

    def test_neighbouring_queries_seek_the_same(self, source: SyntheticKeys, keys: torch.Tensor) -> None:
        queries = source.queries(2, 200)
        best = (queries @ keys.transpose(1, 2)).topk(100).indices

        def shared(steps: int) -> float:
            """Share of the best rows that were among the best so many queries before."""
            return (best[:, steps:, :, None] == best[:, :-steps, None, :]).any(dim=-1).float().mean().item()

        assert shared(1) > 2 * shared(60)

    def test_reproducible_and_of_the_dtype_asked_for(self) -> None:
        first, second = (SyntheticKeys(2, 16, CPU, seed=3) for _ in range(2))
        assert torch.equal(first.keys(50, torch.bfloat16), second.keys(50, torch.bfloat16))
        assert torch.equal(first.queries(4, 5), second.queries(4, 5))
        assert not torch.equal(first.keys(50), first.keys(50))
        assert first.values(7, torch.float16).shape == (2, 7, 16)
