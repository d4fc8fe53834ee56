"""ParisKV's PyTorch reference against its definition written out with plain loops, and the laws that it must obey."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvseek.engine.config import from_dict
from kvseek.engine.errors import ConfigError
from kvseek.engine.memory import ExtentTable
from kvseek.plugins.base import IndexContext
from kvseek.plugins.common.group import GROUP_REDUCTIONS, best_positions, query_lanes, reduce_scores
from kvseek.plugins.flat import config as flat_config
from kvseek.plugins.flat.method import FlatIndex
from kvseek.plugins.pariskv import codebook
from kvseek.plugins.pariskv.config import DEFAULT_SCHEDULE, Config, ScheduleStep
from kvseek.plugins.pariskv.reference import ReferenceIndex, estimate_scores

# Printed by the public release for blocks of 8 (METHODS: ParisKV, item 4).
RELEASE_LEVELS = [0.0420, 0.1266, 0.2130, 0.3025, 0.3973, 0.5001, 0.6169, 0.7633]
RELEASE_THRESHOLDS = [0.0843, 0.1698, 0.2578, 0.3499, 0.4487, 0.5585, 0.6901]
KV_HEADS = 2


def make_context(config: object, head_dim: int, group: int, lengths: list[int], extents: int = 8) -> IndexContext:
    table = ExtentTable(len(lengths), extents, extents)
    for slot in range(len(lengths)):
        table.reserve(slot, lengths[slot])
    books = codebook.build_codebooks(config, head_dim) if isinstance(config, Config) else {}
    return IndexContext(
        layer=0,
        num_heads=KV_HEADS * group,
        num_kv_heads=KV_HEADS,
        head_dim=head_dim,
        scaling=head_dim**-0.5,
        config=config,
        codebooks=books,
        extents=table,
        lengths=lengths,
        dtype=torch.float32,
        device=torch.device("cpu"),
        library=None,
    )


def random_keys(n: int, head_dim: int, seed: int = 0) -> Tensor:
    """Keys with a common offset and a few loud channels, as real ones have."""
    generator = torch.Generator().manual_seed(seed)
    scale = 1 + 5 * (torch.rand(KV_HEADS, 1, head_dim, generator=generator) > 0.9)
    return (torch.randn(KV_HEADS, n, head_dim, generator=generator) + 0.5) * scale


def random_queries(batch: int, heads: int, head_dim: int, seed: int = 1) -> Tensor:
    return torch.randn(batch, heads, head_dim, generator=torch.Generator().manual_seed(seed))


def make_index(config: Config, head_dim: int, group: int, keys: Tensor) -> ReferenceIndex:
    index = ReferenceIndex(make_context(config, head_dim, group, [keys.shape[1]]))
    index.build(0, keys, torch.empty(0))
    return index


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

    @pytest.mark.parametrize("size", [8, 64, 128])
    def test_walsh_hadamard_is_the_orthonormal_hadamard_matrix(self, size: int) -> None:
        expected = torch.from_numpy(scipy.linalg.hadamard(size)).float() / math.sqrt(size)
        assert torch.allclose(codebook.walsh_hadamard(torch.eye(size)), expected, atol=1e-6)

    @pytest.mark.parametrize(("head_dim", "padded"), [(2, 8), (8, 8), (64, 64), (80, 128), (96, 128), (128, 128)])
    def test_rotation_pads_and_keeps_inner_products(self, head_dim: int, padded: int) -> None:
        signs = codebook.rotation_signs(3, codebook.padded_dim(head_dim))
        a, b = torch.randn(2, 50, head_dim, generator=torch.Generator().manual_seed(0)).unbind()
        rotated = codebook.rotate(a, signs), codebook.rotate(b, signs)
        assert rotated[0].shape == (50, padded)
        assert torch.allclose((rotated[0] * rotated[1]).sum(-1), (a * b).sum(-1), atol=1e-4)

    def test_signs_follow_the_seed(self) -> None:
        signs = codebook.rotation_signs(7, 128)
        assert torch.equal(signs, codebook.rotation_signs(7, 128))
        assert not torch.equal(signs, codebook.rotation_signs(8, 128))
        assert signs.abs().eq(1).all()
        assert 40 < int((signs > 0).sum()) < 88

    @given(st.lists(st.integers(0, 15), min_size=8, max_size=8))
    def test_nibbles_survive_packing(self, values: list[int]) -> None:
        nibbles = torch.tensor([values], dtype=torch.uint8)
        packed = codebook.pack_nibbles(nibbles)
        expected = [values[i] + 16 * values[i + 1] for i in range(0, 8, 2)]
        assert packed.tolist() == [expected]
        assert torch.equal(codebook.unpack_nibbles(packed), nibbles)


def encode_by_hand(key: np.ndarray, books: dict[str, Tensor]) -> tuple[list[int], list[int], list[float]]:
    """METHODS, ParisKV, items 1 to 5, in float64 for one key."""
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

    def test_without_alpha_the_weight_is_the_radius(self) -> None:
        index = ReferenceIndex(make_context(Config(alpha_correction=False), 64, 1, [0]))
        keys = random_keys(20, 64)
        radius = codebook.split_blocks(codebook.rotate(keys, index.signs)).norm(dim=-1)
        assert torch.equal(index.encode(keys)[2], radius.half())

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

    def test_alpha_makes_the_estimate_better(self) -> None:
        keys, queries = random_keys(2000, 64), random_queries(1, KV_HEADS, 64)[0][:, None]
        exact = queries @ keys.transpose(1, 2)
        errors = []
        for corrected in (True, False):
            index = ReferenceIndex(make_context(Config(alpha_correction=corrected), 64, 1, [0]))
            _, codes, weights = index.encode(keys)
            estimate = estimate_scores(codebook.rotate(queries, index.signs), codes, weights, index.levels)
            errors.append(float((estimate - exact).norm() / exact.norm()))
        assert errors[0] < errors[1]
        # A random query sees the quantiser's own error: √(8 · 8.6e-4), its squared error over 8 coordinates.
        assert errors[0] == pytest.approx(0.083, rel=0.05)

    def test_a_region_may_be_indexed_in_parts(self) -> None:
        keys = random_keys(2500, 64)
        whole, parts = (ReferenceIndex(make_context(Config(), 64, 1, [2500, 0])) for _ in range(2))
        whole.build(0, keys, torch.empty(0))
        parts.build(0, random_keys(40, 64, seed=9), torch.empty(0))  # replaced by the next build
        for stop, start in ((900, 0), (1156, 900), (2500, 1156)):
            parts.context.lengths[0] = stop
            (parts.extend(0, keys[:, start:stop]) if start else parts.build(0, keys[:, :stop], torch.empty(0)))
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
    """METHODS, ParisKV, "Select for a query", for the queries [g, D] of one KV head."""
    config, n = index.config, index.context.lengths[0]
    read = index.context.extents.read
    ids, codes, weights = (read(array, 0, n)[head] for array in (index.ids, index.codes, index.weights))
    rho, beta = config.schedule(n)
    budget = math.ceil(rho * n)
    lanes = query.mean(dim=0, keepdim=True) if config.group_reduce == "mean" else query
    lanes = codebook.rotate(lanes, index.signs)
    votes = torch.zeros(len(lanes), n, dtype=torch.int64)
    for lane, block in ((lane, block) for lane in range(len(lanes)) for block in range(index.blocks)):
        part = lanes[lane, 8 * block : 8 * block + 8].double()
        scores = [sum(float(-q if c >> j & 1 else q) for j, q in enumerate(part)) for c in range(256)]
        preceding = 0
        for centroid in sorted(range(256), key=lambda c: (-scores[c], c)):
            members = ids[:, block] == centroid
            shares = ((6, 0.05), (5, 0.15), (4, 0.30), (3, 0.50), (2, 0.75), (1, 1.0))
            votes[lane, members] += next((tier for tier, share in shares if preceding < share * budget), 0)
            preceding += int(members.sum())
    best = votes.max(dim=0).values.tolist()
    count = min(n, max(config.top_k, math.ceil(beta * n)))
    candidates = sorted(sorted(range(n), key=lambda i: (-best[i], i))[:count])
    vectors = codebook.dequantise(codes, index.levels) * weights.float().repeat_interleave(8, dim=-1)
    scores_of = lanes @ vectors[candidates].T
    if config.group_reduce == "mean":
        values = scores_of[0]
    else:
        softmax = (scores_of * index.context.scaling).softmax(dim=-1)
        values = softmax.max(dim=0).values if config.group_reduce == "max" else softmax.mean(dim=0)
    kept = sorted(range(count), key=lambda i: (-float(values[i]), i))[: config.top_k]
    return sorted(candidates[i] for i in kept)


class TestSelect:
    @pytest.mark.parametrize("group_reduce", GROUP_REDUCTIONS)
    @pytest.mark.parametrize(("head_dim", "group", "n"), [(64, 3, 700), (80, 2, 1100), (16, 1, 300)])
    def test_equals_the_definition(self, group_reduce: str, head_dim: int, group: int, n: int) -> None:
        steps = (ScheduleStep(1000, 0.3, 0.2), ScheduleStep(None, 0.2, 0.1))
        config = Config(top_k=23, group_reduce=group_reduce, schedule_steps=steps)
        index = make_index(config, head_dim, group, random_keys(n, head_dim))
        queries = random_queries(2, KV_HEADS * group, head_dim)
        selection = index.select(queries, [0, 0])
        assert (selection.rows.dtype, selection.block, selection.counts) == (torch.int32, 1, (23, 23))
        for request in range(2):
            for head in range(KV_HEADS):
                query = queries[request, head * group : (head + 1) * group]
                assert selection.rows[request, head].tolist() == select_by_hand(index, query, head)

    @pytest.mark.parametrize("group_reduce", GROUP_REDUCTIONS)
    @pytest.mark.parametrize("n", [1, 99, 100, 101, 1500])
    def test_rows_ascend_and_short_regions_are_whole(self, group_reduce: str, n: int) -> None:
        index = make_index(Config(group_reduce=group_reduce), 64, 2, random_keys(n, 64))
        selection = index.select(random_queries(1, KV_HEADS * 2, 64), [0])
        assert selection.rows.shape == (1, KV_HEADS, 100)
        assert selection.counts == (min(100, n),)
        for rows in selection.rows[0].tolist():
            held, padding = rows[: min(100, n)], rows[min(100, n) :]
            assert held == sorted(set(held))
            assert held[0] >= 0
            assert held[-1] < n
            assert set(padding) <= {-1}
            assert n > 100 or held == list(range(n))

    @given(n=st.integers(101, 700), scale=st.floats(0.01, 100.0), seed=st.integers(0, 99))
    @settings(max_examples=15, deadline=None)
    def test_scaling_all_keys_changes_nothing_for_averaged_queries(self, n: int, scale: float, seed: int) -> None:
        keys, queries = random_keys(n, 16, seed), random_queries(1, KV_HEADS, 16, seed)
        scale = 2.0 ** round(math.log2(scale))  # a power of two, so that rounding commutes
        config = Config(top_k=20, group_reduce="mean")
        rows = [make_index(config, 16, 1, k).select(queries, [0]).rows for k in (keys, keys * scale)]
        assert torch.equal(*rows)

    def test_requests_and_slots_do_not_mix(self) -> None:
        lengths = [1300, 0, 400]
        index = ReferenceIndex(make_context(Config(), 64, 2, lengths))
        keys = {slot: random_keys(lengths[slot], 64, seed=slot) for slot in (0, 2)}
        for slot in (2, 0):
            index.build(slot, keys[slot], torch.empty(0))
        queries = random_queries(2, KV_HEADS * 2, 64)
        both = index.select(queries, [0, 2]).rows
        assert torch.equal(both, index.select(queries.flip(0), [2, 0]).rows.flip(0))
        for request, slot in enumerate((0, 2)):
            alone = make_index(Config(), 64, 2, keys[slot])
            assert torch.equal(both[request], alone.select(queries[request : request + 1], [0]).rows[0])

    def test_equal_keys_are_taken_from_the_front(self) -> None:
        index = make_index(Config(top_k=10), 64, 1, random_keys(1, 64).expand(-1, 500, -1))
        assert index.select(random_queries(1, KV_HEADS, 64), [0]).rows[0, 0].tolist() == list(range(10))

    @pytest.mark.parametrize("group_reduce", GROUP_REDUCTIONS)
    def test_finds_most_of_the_exact_top_k(self, group_reduce: str) -> None:
        keys, queries = random_keys(4000, 64), random_queries(4, KV_HEADS * 2, 64)
        found = make_index(Config(group_reduce=group_reduce), 64, 2, keys).select(queries, [0] * 4).rows
        exact = make_flat(100, group_reduce, keys, 2).select(queries, [0] * 4).rows
        shared = [
            len(set(a) & set(b))
            for a, b in zip(found.flatten(0, 1).tolist(), exact.flatten(0, 1).tolist(), strict=True)
        ]
        assert sum(shared) / len(shared) > 75


def make_flat(top_k: int, group_reduce: str, keys: Tensor, group: int) -> FlatIndex:
    config = flat_config.Config(top_k=top_k, group_reduce=group_reduce)
    index = FlatIndex(make_context(config, keys.shape[2], group, [keys.shape[1]]))
    index.build(0, keys, torch.empty(0))
    return index


class TestFlat:
    def test_mean_is_top_k_of_the_averaged_query(self) -> None:
        keys, queries = random_keys(1500, 64), random_queries(1, KV_HEADS * 3, 64)
        rows = make_flat(50, "mean", keys, 3).select(queries, [0]).rows
        for head in range(KV_HEADS):
            scores = keys[head] @ queries[0, head * 3 : head * 3 + 3].mean(dim=0)
            assert rows[0, head].tolist() == scores.topk(50).indices.sort().values.tolist()

    @pytest.mark.parametrize(("group_reduce", "reduce"), [("max", "amax"), ("softmax_mean", "mean")])
    def test_others_reduce_the_softmax(self, group_reduce: str, reduce: str) -> None:
        keys, queries = random_keys(1500, 64), random_queries(1, KV_HEADS * 3, 64)
        rows = make_flat(50, group_reduce, keys, 3).select(queries, [0]).rows
        for head in range(KV_HEADS):
            weights = (queries[0, head * 3 : head * 3 + 3] @ keys[head].T / 8).softmax(dim=-1)
            values = getattr(weights, reduce)(dim=0)
            assert rows[0, head].tolist() == values.topk(50).indices.sort().values.tolist()

    def test_extends_across_extents(self) -> None:
        keys, queries = random_keys(1400, 64), random_queries(1, KV_HEADS, 64)
        index = FlatIndex(make_context(flat_config.Config(), 64, 1, [1400]))
        index.context.lengths[0] = 1000
        index.build(0, keys[:, :1000], torch.empty(0))
        index.context.lengths[0] = 1400
        index.extend(0, keys[:, 1000:])
        assert torch.equal(
            index.select(queries, [0]).rows, make_flat(100, "softmax_mean", keys, 1).select(queries, [0]).rows
        )


class TestGroup:
    def test_one_head_is_the_same_under_every_reduction(self) -> None:
        queries, keys = torch.randn(KV_HEADS, 1, 16), torch.randn(KV_HEADS, 200, 16)
        chosen = [
            best_positions(reduce_scores(query_lanes(queries, name) @ keys.transpose(1, 2), name, 0.25), 10)
            for name in GROUP_REDUCTIONS
        ]
        assert torch.equal(chosen[0], chosen[1])
        assert torch.equal(chosen[1], chosen[2])

    def test_ties_go_to_the_lowest_position(self) -> None:
        assert best_positions(torch.tensor([[1.0, 3.0, 1.0, 1.0, 2.0]]), 3).tolist() == [[0, 1, 4]]


class TestConfig:
    def test_default_schedule(self) -> None:
        lengths = (1, 4_999, 5_000, 9_999, 10_000, 29_999, 30_000, 10**6)
        found = [Config().schedule(n) for n in lengths]
        expected = [(0.5, 0.5)] * 2 + [(0.3, 0.25)] * 2 + [(0.25, 0.2)] * 2 + [(0.2, 0.1)] * 2
        assert found == expected

    def test_goes_through_json_values(self) -> None:
        config = Config(top_k=64, group_reduce="max", schedule_steps=DEFAULT_SCHEDULE[2:])
        assert from_dict(Config, dataclasses.asdict(config), "pariskv") == config

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"top_k": 0}, "top_k = 0: must be >= 1"),
            ({"group_reduce": "median"}, "group_reduce = 'median': must be one of"),
            ({"block_size": 16}, "block_size = 16: must be 8, the only size supported"),
            ({"rotation_seed": -1}, "rotation_seed = -1: must be in"),
            ({"schedule_steps": ()}, "schedule_steps"),
            ({"schedule_steps": ({"below_tokens": 9, "rho": 1.0, "beta": 1.0},)}, "below_tokens null"),
            ({"schedule_steps": ({"below_tokens": None, "rho": 0.0, "beta": 1.0},)}, "schedule_steps.rho = 0.0"),
            ({"schedule_steps": ({"below_tokens": None, "rho": 0.5, "beta": 1.5},)}, "schedule_steps.beta = 1.5"),
            ({"schedule_steps": ({"below_tokens": 0, "rho": 0.5, "beta": 0.5},)}, "below_tokens = 0: must be > 0"),
        ],
    )
    def test_errors_name_field_value_and_limit(self, fields: dict[str, object], message: str) -> None:
        with pytest.raises(ConfigError) as error:
            from_dict(Config, fields, "pariskv")
        assert message in str(error.value)

    @pytest.mark.parametrize("bounds", [(9, 5, None), (5, 5, None), (None, 5, None)])
    def test_schedule_must_ascend(self, bounds: tuple[int | None, ...]) -> None:
        with pytest.raises(ConfigError, match="schedule_steps"):
            Config(schedule_steps=tuple(ScheduleStep(bound, 0.5, 0.5) for bound in bounds))
