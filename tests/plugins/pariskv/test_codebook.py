"""What ParisKV stores of a key: quantiser, packing, and codes against their definition in plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.plugins.index_cases import KV_HEADS, extend, make_context, random_keys, random_queries
from torch import Tensor

from kvseek.kernels.reference.codes.rotation import rotate
from kvseek.plugins.pariskv import codebook
from kvseek.plugins.pariskv.config import Config
from kvseek.plugins.pariskv.reference import ReferenceIndex, estimate_scores

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
