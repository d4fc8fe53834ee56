"""ParisKV's codebooks and indexes: the reference against the definition, the compiled kernels against the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plugins.index_cases import (
    KV_HEADS,
    NativePair,
    check_definition,
    check_near,
    extend,
    keys_of_slots,
    make_context,
    make_index,
    random_keys,
    random_queries,
    select_rows,
    shared_with_exact,
)
from torch import Tensor

from kvseek.core.cpu_library import CpuLibrary
from kvseek.kernels.reference.codes.rotation import rotate
from kvseek.plugins.pariskv import codebook, method, reference
from kvseek.plugins.pariskv.config import GROUP_REDUCTIONS, Config, ScheduleStep
from kvseek.plugins.pariskv.native import NativeIndex
from kvseek.plugins.pariskv.reference import ReferenceIndex, estimate_scores
from kvseek.plugins.ranking import best_positions, softmax_mean

# Printed by ParisKV's public release for blocks of 8.
RELEASE_LEVELS = [0.0420, 0.1266, 0.2130, 0.3025, 0.3973, 0.5001, 0.6169, 0.7633]
RELEASE_THRESHOLDS = [0.0843, 0.1698, 0.2578, 0.3499, 0.4487, 0.5585, 0.6901]


class TestCodebook:
    def test_levels_agree_with_the_public_release_to_three_decimals(self) -> None:
        levels, thresholds = codebook.lloyd_max(8, 8)
        assert np.abs(levels - RELEASE_LEVELS).max() < 5e-4
        assert np.abs(thresholds - RELEASE_THRESHOLDS).max() < 5e-4

    def test_levels_are_exact_where_the_density_is_uniform(self) -> None:
        # On the sphere in three dimensions |u_j| is uniform on [0, 1] (Archimedes).
        levels, thresholds = codebook.lloyd_max(3, 8)
        assert levels == pytest.approx((np.arange(8) + 0.5) / 8)
        assert thresholds == pytest.approx(np.arange(1, 8) / 8)

    @pytest.mark.parametrize("block_size", [2, 4, 8, 16])
    def test_more_rounds_reach_the_optimum_for_sampled_directions(self, block_size: int) -> None:
        directions = np.random.default_rng(0).standard_normal((400_000, block_size))
        x = np.abs(directions / np.linalg.norm(directions, axis=1, keepdims=True))[:, 0]
        levels, thresholds = codebook.lloyd_max(block_size, 8, rounds=3000)
        cell = np.digitize(x, thresholds)
        means = np.array([x[cell == i].mean() for i in range(8)])
        assert np.abs(means - levels).max() < 2e-3

        def squared_error(quantiser: tuple[np.ndarray, np.ndarray]) -> float:
            return float(np.mean((x - quantiser[0][np.digitize(x, quantiser[1])]) ** 2))

        best = squared_error((levels, thresholds))
        assert squared_error(codebook.lloyd_max(block_size, 8)) < 1.005 * best
        assert squared_error((levels * 1.05, thresholds * 1.05)) > best

    @given(st.lists(st.integers(0, 15), min_size=8, max_size=8))
    def test_nibbles_survive_packing(self, values: list[int]) -> None:
        nibbles = torch.tensor([values], dtype=torch.uint8)
        packed = codebook.pack_nibbles(nibbles)
        expected = [values[i] + 16 * values[i + 1] for i in range(0, 8, 2)]
        assert packed.tolist() == [expected]
        assert torch.equal(codebook.unpack_nibbles(packed), nibbles)


def encode_by_hand(key: np.ndarray, books: dict[str, Tensor]) -> tuple[list[int], list[int], list[float]]:
    """Centroid ids, packed codes and weights of one key, in float64 (plugins/pariskv/README.md, item 1)."""
    levels, thresholds = books["levels"].double().numpy(), books["thresholds"].double().numpy()
    signs = books["signs"].double().numpy()
    padded = np.zeros(len(signs))
    padded[: len(key)] = key / np.linalg.norm(key)
    rotated = scipy.linalg.hadamard(len(signs)) @ (signs * padded) / math.sqrt(len(signs))
    ids, nibbles, weights = [], [], []
    for block in rotated.reshape(-1, 8):
        radius = np.linalg.norm(block)
        direction = block / radius
        ids.append(sum(1 << j for j in range(8) if direction[j] < 0))
        level = [int(np.sum(abs(u) > thresholds)) for u in direction]
        quantised = np.array([levels[i] * (-1 if u < 0 else 1) for i, u in zip(level, direction, strict=True)])
        nibbles += [i + 8 * (u < 0) for i, u in zip(level, direction, strict=True)]
        weights.append(np.linalg.norm(key) * radius / (quantised @ direction))
    codes = [int(nibbles[i] + 16 * nibbles[i + 1]) for i in range(0, len(nibbles), 2)]
    return ids, codes, weights


class TestEncode:
    @pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
    def test_equals_the_definition(self, head_dim: int) -> None:
        index = ReferenceIndex(make_context(Config(), head_dim, 1, [0]))
        keys = random_keys(20, head_dim)
        ids, codes, weights = index.encode(keys)
        assert (ids.dtype, codes.dtype, weights.dtype) == (torch.uint8, torch.uint8, torch.float16)
        for head in range(KV_HEADS):
            for position in range(20):
                expected = encode_by_hand(keys[head, position].double().numpy(), index.context.codebooks)
                assert ids[head, position].tolist() == expected[0]
                assert codes[head, position].tolist() == expected[1]
                assert weights[head, position].tolist() == pytest.approx(expected[2], rel=1e-3)

    def test_zero_keys_and_zero_blocks_weigh_nothing(self) -> None:
        index = ReferenceIndex(make_context(Config(), 16, 1, [0]))
        keys = torch.zeros(KV_HEADS, 2, 16)
        keys[:, 1] = index.signs  # after the sign flips constant, which the transform maps to coordinate 0 alone
        _, _, weights = index.encode(keys)
        assert weights[:, 0].eq(0).all()
        assert weights[:, 1, 0].gt(0).all()
        assert weights[:, 1, 1].eq(0).all()

    @pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e15])
    def test_weights_stay_finite(self, scale: float) -> None:
        index = ReferenceIndex(make_context(Config(), 64, 1, [0]))
        weights = index.encode(random_keys(50, 64) * scale)[2]
        assert weights.isfinite().all()
        assert weights.ge(0).all()

    def test_the_estimate_is_off_by_the_quantiser(self) -> None:
        keys, queries = random_keys(2000, 64), random_queries(1, KV_HEADS, 64)[0][:, None]
        index = ReferenceIndex(make_context(Config(), 64, 1, [0]))
        _, codes, weights = index.encode(keys)
        estimate, exact = estimate_scores(rotate(queries, index.signs), codes, weights, index.levels), queries @ keys.mT
        # A random query sees the quantiser's own error: √(8 · 8.6e-4), its squared error over 8 coordinates.
        assert float((estimate - exact).norm() / exact.norm()) == pytest.approx(0.083, rel=0.05)

    def test_a_region_may_be_indexed_in_parts(self) -> None:
        keys = random_keys(2500, 64)
        whole, parts = (ReferenceIndex(make_context(Config(), 64, 1, [2500, 0])) for _ in range(2))
        whole.build(0, keys, torch.empty(0))
        parts.build(0, random_keys(40, 64, seed=9), torch.empty(0))  # replaced by the next build
        parts.context.lengths[0] = 900
        parts.build(0, keys[:, :900], torch.empty(0))
        for start, stop in ((900, 1156), (1156, 2500)):
            extend(parts, 0, keys[:, start:stop])
        read = whole.context.extents.read
        for name in ("ids", "codes", "weights"):
            assert torch.equal(read(getattr(whole, name), 0, 2500), read(getattr(parts, name), 0, 2500))
        assert torch.equal(whole.counts, parts.counts)
        for head, block in ((0, 0), (1, 7)):
            expected = torch.bincount(read(whole.ids, 0, 2500)[head, :, block].long(), minlength=256)
            assert torch.equal(whole.counts[0, head, block].long(), expected)
        assert whole.counts[1].eq(0).all()

    def test_bytes_per_token(self) -> None:
        for head_dim, expected in ((64, 56), (128, 112)):
            index = ReferenceIndex(make_context(Config(), head_dim, 1, [0]))
            assert index.bytes_per_token == KV_HEADS * expected


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


class OwnEntries(NativePair):
    """Both indexes search what they have written themselves."""

    method, kinds = method, (ReferenceIndex, NativeIndex)
    configs = tuple(  # a rerank; and as many candidates as rows, so that the choice is the votes' alone
        Config(top_k=100, group_reduce=reduce, schedule_steps=(ScheduleStep(None, 0.3, beta),))
        for beta in (0.25, 1e-9)
        for reduce in sorted(GROUP_REDUCTIONS, reverse=True)
    )

    def fill(self, keys: Sequence[Tensor]) -> None:
        self.found.ids.fill_(255)
        self.found.codes.fill_(255)
        self.found.weights.fill_(float("nan"))
        self.found.counts.fill_(-7)
        for slot, part in enumerate(keys):
            self.expected.build(slot, part, part)
            self.found.build(slot, part, part)

    def check_choice(self, ours: Tensor, theirs: Tensor, queries: Tensor, slot: int) -> None:
        values = values_of(self.expected, queries.unflatten(0, (KV_HEADS, -1)), slot)
        for head in range(KV_HEADS):
            assert ours[head].tolist() == sorted(ours[head].tolist())
            check_near(ours[head].tolist(), theirs[head].tolist(), dict(enumerate(values[head].tolist())))


class Pair(OwnEntries):
    """Both search the reference's."""

    def fill(self, keys: Sequence[Tensor]) -> None:
        super().fill(keys)
        for slot, part in enumerate(keys):
            for name in ("ids", "codes", "weights"):
                rows = self.expected.context.extents.read(getattr(self.expected, name), slot, part.shape[1])
                self.found.context.extents.write(getattr(self.found, name), slot, 0, rows)


def check_index(expected: ReferenceIndex, found: NativeIndex) -> None:
    assert torch.equal(found.counts, expected.counts)
    for slot, n in enumerate(expected.context.lengths):
        ids, codes, weights = (
            [index.context.extents.read(getattr(index, name), slot, n) for index in (expected, found)]
            for name in ("ids", "codes", "weights")
        )
        assert torch.equal(ids[1], ids[0])
        nibbles = [codebook.unpack_nibbles(part).int() for part in codes]
        assert torch.equal(nibbles[1] & 8, nibbles[0] & 8)
        steps = ((nibbles[1] & 7) - (nibbles[0] & 7)).abs()
        assert not bool((steps > 1).any())
        assert int((steps > 0).sum()) <= max(1, steps.numel() // 10_000)  # a magnitude within rounding of a threshold
        torch.testing.assert_close(weights[1], weights[0], rtol=2e-3, atol=1e-7)


def values_of(index: ReferenceIndex, queries: Tensor, slot: int) -> Tensor:
    """What the rerank ranks: [G, n], -inf for keys that are no candidates. queries [G, g, D]."""
    config, n, extents = index.config, index.context.lengths[slot], index.context.extents
    rho, beta = config.schedule(n)
    lanes = index.lanes(queries)
    tiers = reference.tier_table(lanes, index.counts[slot], math.ceil(rho * n))
    votes = reference.collision_scores(tiers, extents.read(index.ids, slot, n))
    candidates = best_positions(votes, min(n, max(config.top_k, math.ceil(beta * n))))
    codes = reference.take_rows(extents.read(index.codes, slot, n), candidates)
    weights = reference.take_rows(extents.read(index.weights, slot, n), candidates)
    estimates = reference.estimate_scores(lanes, codes, weights, index.levels)
    of_mean = config.group_reduce == "mean"
    values = estimates[:, 0] if of_mean else softmax_mean(estimates, index.context.scaling)
    return torch.full((len(queries), n), -math.inf).scatter(1, candidates, values)


@pytest.mark.parametrize("dim", [8, 20, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_encoding_equals_the_reference(library: CpuLibrary, level: int, dtype: torch.dtype, dim: int) -> None:
    torch.manual_seed(dim)
    keys = keys_of_slots([1500, 0, 1], dim, dtype)
    keys[0][:, 7] = 0  # a key without a direction
    keys[0][:, 8] *= 1e6  # and one whose weights float16 cannot hold
    pair = OwnEntries(library, Config(), 1, dim, keys)
    check_index(pair.expected, pair.found)


@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(1, 400),
    top_k=st.integers(1, 60),
    group=st.integers(1, 9),
    rho=st.floats(0.001, 1),
    seed=st.integers(0, 2**31),
)
def test_ties_are_cut_as_the_reference_cuts_them(
    library: CpuLibrary, n: int, top_k: int, group: int, rho: float, seed: int
) -> None:
    """Sparse small integers: equal centroid scores, equal votes, whole blocks of zeros."""
    torch.manual_seed(seed)
    config = Config(top_k=top_k, schedule_steps=(ScheduleStep(None, rho, 1e-9),))
    keys = [torch.randint(-1, 2, (KV_HEADS, n, 64)).float()]
    pair = Pair(library, config, group, 64, keys)
    queries = torch.randint(-1, 2, (1, KV_HEADS * group, 64)).float() * (torch.rand(1, 1, 64) < 0.1)
    rows = [select_rows(index, queries, [0]).rows for index in (pair.found, pair.expected)]
    assert torch.equal(*rows)
