"""The seeded randomised Hadamard transform R: after it, the channels of a vector are nearly normal, whatever they were.

R flips signs, which a seed draws, and applies the orthonormal Walsh-Hadamard transform: it keeps inner products, and costs
P log P additions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LEAST_DIM = 8  # shortest rotated vector


def padded_dim(head_dim: int) -> int:
    """Return the length P of a rotated vector: the smallest power of two >= head_dim, at least 8."""
    return max(LEAST_DIM, 1 << (head_dim - 1).bit_length())


def rotation_signs(seed: int, dim: int) -> Tensor:
    """Draw the diagonal of the randomised Hadamard transform: float32 [dim] of ±1, the same for a seed on every machine."""
    bits = torch.randint(0, 2, (dim,), generator=torch.Generator().manual_seed(seed))
    return (1 - 2 * bits).float()


def walsh_hadamard(values: Tensor) -> Tensor:
    """Transform the last dimension (a power of two) by the orthonormal Walsh-Hadamard transform: float32 [..., P] to [..., P].

    Passes of stride 1, 2, 4, … each replace pairs by (a + b, a - b); the result is scaled once at the end. These are additions
    only, so that another implementation can reproduce the result to the bit.
    """
    size = values.shape[-1]
    result = values
    stride = 1
    while stride < size:
        low, high = result.reshape(*values.shape[:-1], -1, 2, stride).unbind(dim=-2)
        result = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        stride *= 2
    return result * (1.0 / math.sqrt(size))


def rotate(vectors: Tensor, signs: Tensor) -> Tensor:
    """Compute R x: pad with zeros to the length of `signs`, flip signs, transform. [..., D] to float32 [..., P]."""
    padded = torch.nn.functional.pad(vectors.float(), (0, signs.shape[0] - vectors.shape[-1]))
    return walsh_hadamard(padded * signs)
