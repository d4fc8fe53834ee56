"""What nested key codes store of a key, against their definition in plain loops, and what their estimates are worth."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.plugins.index_cases import random_keys
from torch import Tensor

from kvseek.kernels.reference.codes.key_codes import (
    LARGEST,
    LARGEST_OF_MEAN,
    STEPS,
    KeyCodes,
    encode,
    estimate_all,
    estimate_at,
    leading_bits,
    mean_integers,
    pack_plane,
    round_lanes,
    round_means,
    unpack_plane,
)
from kvseek.kernels.reference.codes.rotation import padded_dim, rotate, rotation_signs, walsh_hadamard


def rotate_by_hand(vector: np.ndarray, signs: np.ndarray) -> np.ndarray:
    padded = np.zeros(len(signs))
    padded[: len(vector)] = vector
    rotated: np.ndarray = scipy.linalg.hadamard(len(signs)) @ (signs * padded) / math.sqrt(len(signs))
    return rotated


def encode_by_hand(key: np.ndarray, mean: np.ndarray, signs: np.ndarray, bits: int) -> tuple[list[int], float]:
    """Codes and scale of one key in float64 (docs/nested_codes.md); `mean` is rotated and rounded already."""
    step, cells = STEPS[bits], 2**bits
    size = len(signs)
    rotated = rotate_by_hand(key, signs) - mean
    u = rotated * math.sqrt(size) / np.linalg.norm(rotated)
    codes = [min(cells - 1, max(0, math.floor(channel / step) + cells // 2)) for channel in u]
    values = np.array([step * (code - (cells - 1) / 2) for code in codes])
    return codes, rotated @ rotated / (values @ rotated)


def codes_of(keys: Tensor, bits: int = 4) -> KeyCodes:
    """Codes of keys [G, n, D] of one block."""
    signs = rotation_signs(0, padded_dim(keys.shape[2]))
    means, steps = round_means(rotate(keys.double().mean(dim=1), signs))
    means, steps = means[:, None].expand(-1, keys.shape[1], -1, -1), steps[:, None].expand(-1, keys.shape[1])
    return KeyCodes(*encode(rotate(keys, signs) - mean_integers(means) * steps[..., None], bits), means, steps)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("head_dim", [8, 20, 64, 128])
def test_codes_equal_the_definition(head_dim: int, bits: int) -> None:
    keys, signs = random_keys(20, head_dim), rotation_signs(0, padded_dim(head_dim))
    codes = codes_of(keys, bits)
    assert (codes.high.dtype, codes.low.dtype, codes.scales.dtype) == (torch.uint8, torch.uint8, torch.float16)
    assert codes.high.shape == (2, 20, padded_dim(head_dim) // 4)
    assert codes.low.shape == (codes.high.shape if bits == 4 else (2, 20, 0))
    found = leading_bits(codes, bits)
    for head in range(2):
        mean = rotate_by_hand(keys[head].double().mean(dim=0).numpy(), signs.double().numpy())
        step = np.abs(mean).max() / LARGEST_OF_MEAN
        mean = np.round(mean / step) * step
        for place in range(20):
            expected, scale = encode_by_hand(keys[head, place].double().numpy(), mean, signs.double().numpy(), bits)
            assert found[head, place].tolist() == expected
            assert codes.scales[head, place].item() == pytest.approx(scale, rel=1e-3)


def test_a_byte_of_a_plane_has_four_channels_a_quarter_apart() -> None:
    values = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0], dtype=torch.uint8)  # channels 0, 2, 4, 6 are byte 0
    assert pack_plane(values).tolist() == [0 | 2 << 2 | 3 << 4 | 1 << 6, 1 | 3 << 2 | 2 << 4 | 0 << 6]


@given(st.lists(st.integers(0, 3), min_size=16, max_size=16))
def test_planes_survive_packing(values: list[int]) -> None:
    assert unpack_plane(pack_plane(torch.tensor(values, dtype=torch.uint8))).tolist() == values


def test_fewer_bits_are_the_leading_bits_of_more() -> None:
    codes = codes_of(random_keys(50, 64))
    for bits in (1, 2, 3):
        assert torch.equal(leading_bits(codes, bits), leading_bits(codes, 4) >> (4 - bits))


def test_zero_keys_weigh_nothing() -> None:
    rotated = torch.zeros(2, 3, 16)
    rotated[:, 1] = 1
    assert encode(rotated)[2].gt(0).tolist() == [[False, True, False]] * 2


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e15, 1e30])
def test_scales_stay_finite(scale: float) -> None:
    scales = encode(rotate(random_keys(50, 64) * scale, rotation_signs(0, 64)))[2]
    assert scales.isfinite().all()
    assert scales.ge(0).all()


def test_rounded_queries_keep_their_value_and_largest_channel() -> None:
    lanes = torch.randn(2, 3, 64) * torch.tensor([1e-3, 1.0, 1e3])[:, None]
    lanes[1, 1] = 0
    rounded = round_lanes(lanes)
    largest = rounded.integers.abs().amax(dim=-1)
    assert largest.eq(torch.tensor([[LARGEST] * 3, [LARGEST, 0, LARGEST]])).all()
    assert ((rounded.integers * rounded.steps - lanes).abs() <= rounded.steps * 0.501).all()
    lengths = rounded.integers * rounded.of_length_one().steps
    assert torch.allclose(lengths.norm(dim=-1), largest.gt(0).float())


@pytest.mark.parametrize(("kept", "bits"), [(4, 4), (4, 3), (4, 2), (4, 1), (2, 2), (2, 1)])
def test_estimates_equal_the_definition(kept: int, bits: int) -> None:
    """Products of values in the middle of the cells with rounded queries, by numpy in float64."""
    codes, lanes = codes_of(random_keys(60, 64), kept), round_lanes(torch.randn(2, 3, 64))
    middle = (2**bits - 1) / 2
    values = (
        STEPS[kept]
        * 2 ** (kept - bits)
        * (leading_bits(codes, bits).double() - middle)
        * codes.scales.double()[..., None]
    )
    values += mean_integers(codes.means).double() * codes.mean_steps.double()[..., None]
    expected = (lanes.integers * lanes.steps).double() @ values.transpose(1, 2)
    found = estimate_all(codes, lanes, bits)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    places = torch.tensor([[3, 59, 0], [7, 8, 30]])
    assert torch.equal(estimate_at(codes, places, lanes, bits), found.gather(2, places[:, None].expand(-1, 3, -1)))
    assert bits < kept or torch.equal(estimate_all(codes, lanes), found), "all bits unless told"


def test_more_bits_estimate_better_and_a_keys_own_length_is_exact() -> None:
    keys = random_keys(3000, 64)
    codes = codes_of(keys)
    signs, means = rotation_signs(0, 64), mean_integers(codes.means) * codes.mean_steps[..., None]
    assert (means - rotate(keys.mean(dim=1, keepdim=True), signs)).abs().max() <= 0.501 * codes.mean_steps.max()
    queries = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(4))
    lanes = round_lanes(rotate(queries, rotation_signs(0, 64)))
    of_means = rotate(queries, signs) @ means.transpose(1, 2)
    exact = queries @ keys.transpose(1, 2) - of_means
    found = [estimate_all(codes, lanes, bits) for bits in (1, 2, 3, 4)] + [estimate_all(codes_of(keys, 2), lanes)]
    *errors, two_alone = [float((estimates - of_means - exact).norm() / exact.norm()) for estimates in found]
    # Of a normal channel: Δ/√12 with 4 bits, and the error of the levels ±2Δ and ±6Δ with 2. Alone they have a better Δ.
    assert errors == sorted(errors, reverse=True)
    assert errors[3] == pytest.approx(STEPS[4] / math.sqrt(12), rel=0.05)
    assert errors[1] == pytest.approx(0.366, rel=0.05)
    assert two_alone < errors[1]
    values = STEPS[4] * (leading_bits(codes, 4).float() - 7.5) * codes.scales.float()[..., None]
    rotated = rotate(keys, signs) - means
    assert torch.allclose((values * rotated).sum(-1), rotated.square().sum(-1), rtol=1e-3)


@pytest.mark.parametrize("size", [8, 64, 128])
def test_walsh_hadamard_is_the_orthonormal_hadamard_matrix(size: int) -> None:
    expected = torch.from_numpy(scipy.linalg.hadamard(size)).float() / math.sqrt(size)
    assert torch.allclose(walsh_hadamard(torch.eye(size)), expected, atol=1e-6)


@pytest.mark.parametrize(("head_dim", "padded"), [(2, 8), (8, 8), (64, 64), (80, 128), (96, 128), (128, 128)])
def test_rotation_pads_and_keeps_inner_products(head_dim: int, padded: int) -> None:
    signs = rotation_signs(3, padded_dim(head_dim))
    a, b = torch.randn(2, 50, head_dim, generator=torch.Generator().manual_seed(0)).unbind()
    rotated = rotate(a, signs), rotate(b, signs)
    assert rotated[0].shape == (50, padded)
    assert torch.allclose((rotated[0] * rotated[1]).sum(-1), (a * b).sum(-1), atol=1e-4)


def test_signs_follow_the_seed() -> None:
    signs = rotation_signs(7, 128)
    assert torch.equal(signs, rotation_signs(7, 128))
    assert not torch.equal(signs, rotation_signs(8, 128))
    assert signs.abs().eq(1).all()
    assert 40 < int((signs > 0).sum()) < 88
