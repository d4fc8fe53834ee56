"""The randomised Hadamard transform that codes of keys share."""

from __future__ import annotations

import math

import pytest
import scipy.linalg
import torch

from kvseek.kernels.reference.codes.rotation import padded_dim, rotate, rotation_signs, walsh_hadamard


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
