"""ParisKV codebooks: Lloyd–Max magnitude levels, nibble packing (paper, section 4).

After the rotation (kernels/reference/codes/rotation.py) a block of m coordinates points in a nearly uniform direction u of the
unit sphere, so each u_j² is Beta(1/2, (m-1)/2) (proposition 4.1) whatever the model: the levels below need no data.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import beta, betainc, betaincinv
from torch import Tensor

from kvseek.kernels.reference.codes.rotation import padded_dim, rotation_signs

from .config import Config

BLOCK = 8  # coordinates per block
LEVELS = 8  # a 4-bit code is a sign and one of 8 magnitudes
# About 100 rounds that start from the quantiles give the levels that the public release prints. The fixed point, reached
# after some 500 rounds, lies up to 0.003 away and has 0.02 % less squared error: not worth differing from the release.
ROUNDS = 100


def build_codebooks(config: Config, head_dim: int) -> dict[str, Tensor]:
    """Compute the codebooks: everything that encoding needs beside the keys, float32 on the CPU.

    Returns
    -------
    dict
        "levels" [8] and "thresholds" [7], magnitudes of a direction's coordinate; "signs" [padded head size], ±1.
    """
    levels, thresholds = lloyd_max(BLOCK, LEVELS)
    return {
        "levels": torch.from_numpy(levels).float(),
        "thresholds": torch.from_numpy(thresholds).float(),
        "signs": rotation_signs(config.rotation_seed, padded_dim(head_dim)),
    }


def lloyd_max(block_size: int, levels: int, rounds: int = ROUNDS) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute the Lloyd–Max quantiser of x = |u_j|, u uniform on the unit sphere in `block_size` >= 2 dimensions.

    x has density c (1 - x²)^((m-3)/2) on [0, 1], so the mass and the first moment of a cell are differences of a
    regularised incomplete beta function and of a power: no quadrature error, no sampling.

    Returns
    -------
    levels : float64 [levels]
        Conditional means of the cells, ascending.
    thresholds : float64 [levels - 1]
        Midpoints of neighbouring levels.
    """
    shape = (block_size - 1) / 2
    density_scale = 2 / beta(0.5, shape)
    points = np.sqrt(betaincinv(0.5, shape, (np.arange(levels) + 0.5) / levels))
    for _ in range(rounds):
        borders = np.concatenate([[0.0], (points[1:] + points[:-1]) / 2, [1.0]])
        mass = np.diff(betainc(0.5, shape, borders**2))
        moment = -np.diff((1 - borders**2) ** shape) * density_scale / (2 * shape)
        points = moment / mass
    return points, (points[1:] + points[:-1]) / 2


def split_blocks(vectors: Tensor) -> Tensor:
    """Cut vectors into blocks of 8 coordinates: [..., P] to [..., B, 8]."""
    return vectors.reshape(*vectors.shape[:-1], -1, BLOCK)


def pack_bits(negative: Tensor) -> Tensor:
    """Pack signs to centroid ids: bool [..., 8] to uint8 [...]; bit j is set if coordinate j is negative."""
    powers = 1 << torch.arange(BLOCK, device=negative.device)
    return (negative * powers).sum(dim=-1).to(torch.uint8)


def pack_nibbles(nibbles: Tensor) -> Tensor:
    """Pack uint8 [..., P] of values 0..15 to uint8 [..., P/2]: coordinate 2i in the low half of byte i."""
    pairs = nibbles.reshape(*nibbles.shape[:-1], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Undo `pack_nibbles`: uint8 [..., P/2] to uint8 [..., P]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def dequantise(codes: Tensor, levels: Tensor) -> Tensor:
    """Compute quantised directions: packed codes uint8 [..., P/2] to float32 [..., P], level times sign."""
    signed = torch.cat((levels, -levels))  # a nibble with bit 3 set is negative
    return signed[unpack_nibbles(codes).long()]
