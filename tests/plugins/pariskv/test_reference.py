"""The rows that ParisKV's PyTorch reference selects: its definition written out with plain loops, and its laws."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plugins.index_cases import (
    KV_HEADS,
    check_definition,
    make_index,
    random_keys,
    random_queries,
    select_rows,
    shared_with_exact,
)
from torch import Tensor

from kvseek.kernels.reference.codes.rotation import rotate
from kvseek.plugins.pariskv import codebook
from kvseek.plugins.pariskv.config import GROUP_REDUCTIONS, Config, ScheduleStep
from kvseek.plugins.pariskv.reference import ReferenceIndex


def select_by_hand(index: ReferenceIndex, query: Tensor, head: int) -> list[int]:
    """Votes and rerank for the queries [g, D] of one KV head (plugins/pariskv/README.md, items 2 and 3)."""
    config, n = index.config, index.context.lengths[0]
    read = index.context.extents.read
    ids, codes, weights = (read(array, 0, n)[head] for array in (index.ids, index.codes, index.weights))
    rho, _ = config.schedule(n)
    budget = math.ceil(rho * n)
    lanes = query.mean(dim=0, keepdim=True) if config.group_reduce == "mean" else query
    lanes = rotate(lanes, index.signs)
    votes = torch.zeros(len(lanes), n, dtype=torch.int64)
    for lane, block in ((lane, block) for lane in range(len(lanes)) for block in range(index.blocks)):
        part = lanes[lane, 8 * block : 8 * block + 8].tolist()
        scores = [sum(-q if c >> j & 1 else q for j, q in enumerate(part)) for c in range(256)]
        preceding = 0
        for centroid in sorted(set(ids[:, block].tolist()), key=lambda c: (-scores[c], c)):
            members = ids[:, block] == centroid
            shares = ((6, 0.05), (5, 0.15), (4, 0.30), (3, 0.50), (2, 0.75), (1, 1.0))
            votes[lane, members] += next((tier for tier, share in shares if preceding < share * budget), 0)
            preceding += int(members.sum())
    best = votes.max(dim=0).values.tolist()
    count = config.candidates(n)
    candidates = sorted(sorted(range(n), key=lambda i: (-best[i], i))[:count])
    vectors = codebook.dequantise(codes, index.levels) * weights.float().repeat_interleave(8, dim=-1)
    scores_of = lanes @ vectors[candidates].T
    weights = (scores_of * index.context.scaling).softmax(dim=-1)
    values = scores_of[0] if config.group_reduce == "mean" else weights.mean(dim=0)
    kept = sorted(range(count), key=lambda i: (-float(values[i]), i))[: config.top_k]
    return sorted(candidates[i] for i in kept)


class TestSelect:
    @pytest.mark.parametrize("group_reduce", GROUP_REDUCTIONS)
    @pytest.mark.parametrize(("head_dim", "group", "n"), [(64, 3, 700), (80, 2, 1100), (16, 1, 300)])
    def test_equals_the_definition(self, group_reduce: str, head_dim: int, group: int, n: int) -> None:
        steps = (ScheduleStep(1000, 0.3, 0.2), ScheduleStep(None, 0.2, 0.1))
        config = Config(top_k=23, group_reduce=group_reduce, schedule_steps=steps)
        index = make_index(config, head_dim, group, random_keys(n, head_dim))
        check_definition(index, select_by_hand, head_dim, group)

    @given(n=st.integers(101, 700), scale=st.floats(0.01, 100.0), seed=st.integers(0, 99))
    @settings(max_examples=15, deadline=None)
    def test_scaling_all_keys_changes_nothing_for_averaged_queries(self, n: int, scale: float, seed: int) -> None:
        keys, queries = random_keys(n, 16, seed), random_queries(1, KV_HEADS, 16, seed)
        scale = 2.0 ** round(math.log2(scale))  # a power of two, so that rounding commutes
        config = Config(top_k=20, group_reduce="mean")
        rows = [select_rows(make_index(config, 16, 1, k), queries, [0]).rows for k in (keys, keys * scale)]
        assert torch.equal(*rows)

    def test_finds_most_of_the_exact_top_k(self) -> None:
        assert shared_with_exact(lambda keys: make_index(Config(), 64, 2, keys)) > 75


def test_default_schedule() -> None:
    lengths = (1, 4_999, 5_000, 9_999, 10_000, 29_999, 30_000, 10**6)
    found = [Config().schedule(n) for n in lengths]
    assert found == [(0.5, 0.5)] * 2 + [(0.3, 0.25)] * 2 + [(0.25, 0.2)] * 2 + [(0.2, 0.1)] * 2


def test_candidates_are_the_schedules_share_but_at_least_four_a_row() -> None:
    config = Config(top_k=100)
    assert [config.candidates(n) for n in (0, 350, 2000, 8000, 100_000)] == [0, 350, 1000, 2000, 10_000]
    assert Config(top_k=704).candidates(8000) == 2816
