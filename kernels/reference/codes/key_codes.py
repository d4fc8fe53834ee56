"""Nested key codes: 4 bits a channel and one scale a key, whose 2 highest bits are a coarser code of the key; or 2 bits alone.

A key x of a KV head is encoded after rotation, and less the mean of its block, y = R x - m with P channels (rotation.py). A
block is some neighbouring keys that enter the retrieval region together (store.py). m is R times their mean, rounded to 16 bits
a channel with one step a block, m = t M. (8 bits would leave much of a large mean: keys of models with biases lie far from zero.)

Divided by its root mean square, a channel u = y √P / ‖y‖ is nearly standard normal, so one uniform quantiser serves every
channel of every model: code c = floor(u / Δ) + 2^(B-1), clamped to 0 .. 2^B - 1, for the value v = Δ (c - (2^B - 1) / 2). B is 4
or 2, and the width of a cell Δ = STEPS[B]. The scale s = ‖y‖² / <v, y> makes the estimate <s v, y> of ‖y‖² exact, so that
estimates of q·k are not too small on average (docs/nested_codes.md).

The b highest bits of a code, h = c >> (B - b), stand for the middle of the codes that begin with them:
v_b = Δ 2^(B-b) (h - (2^b - 1) / 2). They use the same scale.

    q·x ≈ s <v_b, R q> + t <M, R q>

Rotated queries are rounded to 8-bit integers, so that both products are integer arithmetic, the same on every machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BITS = 4  # of a code whose highest bits are used alone as well
# Width of a cell for the bits of a code, in root mean squares of a channel (docs/nested_codes.md, Measurements).
STEPS = {2: 1.0, 4: 0.32}
FIELDS = 4  # channels of a byte of a plane
LARGEST = 127  # largest integer of a rounded query
LARGEST_OF_MEAN = 127 * 256 + 127  # of a mean, which is stored as two signed bytes
LARGEST_SCALE = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class KeyCodes:
    """Codes of keys.

    Attributes
    ----------
    high, low : Tensor, uint8 [..., P/4]
        The 2 high and the 2 low bits of every code; `low` is [..., 0] if codes have 2 bits. Bits 2f and 2f+1 of byte b belong to
        channel f·P/4 + b, so one shift and one mask bring P/4 neighbouring channels to the bytes of a vector.
    scales : Tensor, float16 [...]
    means : Tensor, int8 [..., 2, P]
        M of each key's block, as 256 times the first byte plus the second.
    mean_steps : Tensor, float32 [...]
        t of each key's block.
    """

    high: Tensor
    low: Tensor
    scales: Tensor
    means: Tensor
    mean_steps: Tensor

    @property
    def bits(self) -> int:
        """Bits of a code: 2 or 4."""
        return 4 if self.low.shape[-1] else 2

    def at(self, places: Tensor) -> KeyCodes:
        """Take the keys at places [G, c] of codes [G, n, ...]."""
        heads = torch.arange(places.shape[0], device=places.device)[:, None]
        arrays = (self.high, self.low, self.scales, self.means, self.mean_steps)
        return KeyCodes(*(array[heads, places] for array in arrays))


@dataclass(frozen=True)
class QueryLanes:
    """Rotated queries, rounded to 8 bits.

    Attributes
    ----------
    integers : Tensor, float32 [G, lanes, P]
        Whole numbers from -127 to 127.
    steps : Tensor, float32 [G, lanes, 1]
        What an integer is worth.
    """

    integers: Tensor
    steps: Tensor

    def of_length_one(self) -> QueryLanes:
        """Divide each query by its length, so that keys can be compared between query heads of unequal length."""
        length = self.integers.square().sum(dim=-1, keepdim=True).sqrt()
        return QueryLanes(self.integers, torch.where(length > 0, 1.0 / length, 0.0))


def round_lanes(lanes: Tensor) -> QueryLanes:
    """Round rotated queries float32 [G, lanes, P] to 8 bits (round_vectors)."""
    return QueryLanes(*round_vectors(lanes))


def round_vectors(vectors: Tensor, most: int = LARGEST) -> tuple[Tensor, Tensor]:
    """Round vectors float32 [..., P] to integers: the largest channel of each becomes ±`most`, ties go to even.

    Returns
    -------
    integers : Tensor, float32 [..., P]
    steps : Tensor, float32 [..., 1]
        What an integer is worth.
    """
    largest = vectors.abs().amax(dim=-1, keepdim=True)
    return (vectors * torch.where(largest > 0, most / largest, 0.0)).round(), largest / most


def round_means(rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Round rotated means float32 [..., P]: means int8 [..., 2, P] and steps float32 [...] of KeyCodes."""
    integers, steps = round_vectors(rotated, LARGEST_OF_MEAN)
    first = ((integers + 128) / 256).floor()  # the second byte is signed: -128 to 127
    return torch.stack((first, integers - 256 * first), dim=-2).to(torch.int8), steps[..., 0]


def mean_integers(means: Tensor) -> Tensor:
    """Undo `round_means`: int8 [..., 2, P] to whole numbers, float32 [..., P]."""
    first, second = means.float().unbind(dim=-2)
    return 256 * first + second


def encode(rotated: Tensor, bits: int = BITS) -> tuple[Tensor, Tensor, Tensor]:
    """Encode rotated centred keys y with 2 or 4 bits: float32 [..., P] to planes `high` and `low` [..., P/4] and scales [...].

    The scale of a zero key is 0, and a scale beyond float16 becomes its largest number.
    """
    half, step = 1 << bits - 1, STEPS[bits]  # codes below `half` are negative channels
    square = rotated.square().sum(dim=-1, keepdim=True)
    cells = math.sqrt(rotated.shape[-1]) / (step * square.sqrt())
    centred = (rotated * torch.where(square > 0, cells, 0.0)).floor().clamp(-half, half - 1)
    product = step * ((centred + 0.5) * rotated).sum(dim=-1)
    scales = torch.where(product > 0, square[..., 0] / product, 0.0).clamp(max=LARGEST_SCALE)
    codes = (centred + half).to(torch.uint8)
    high = pack_plane(codes >> bits - 2)
    return high, pack_plane(codes & 3) if bits == BITS else high[..., :0], scales.half()


def pack_plane(values: Tensor) -> Tensor:
    """Pack uint8 [..., P] of values 0 .. 3 to a plane [..., P/4] as in `KeyCodes`."""
    first, second, third, fourth = values.chunk(FIELDS, dim=-1)
    return first | second << 2 | third << 4 | fourth << 6


def unpack_plane(plane: Tensor) -> Tensor:
    """Undo `pack_plane`: uint8 [..., P/4] to uint8 [..., P]."""
    return torch.cat([plane >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)


def leading_bits(codes: KeyCodes, bits: int) -> Tensor:
    """Return the `bits` highest bits of every code, at most as many as it has: uint8 [..., P]."""
    high = unpack_plane(codes.high)
    return high >> (2 - bits) if bits <= 2 else (high << 2 | unpack_plane(codes.low)) >> (BITS - bits)


def estimate_all(codes: KeyCodes, lanes: QueryLanes, bits: int = 0) -> Tensor:
    """Estimate q·x of every key from the `bits` highest bits of its codes, or from all that they have, and from its mean.

    Parameters
    ----------
    codes : KeyCodes [G, n, ...]
    lanes : QueryLanes [G, lanes, P]
    bits : int
        1 to `codes.bits`; 0: all.

    Returns
    -------
    Tensor, float32 [G, lanes, n]
        (2 <h, integers> - (2^bits - 1) Σ integers), a whole number below 2^24 and so exact, times the key's scale, times the
        query's step times half the width of a cell; plus <M, integers>, times the mean's step, times the query's.
    """
    integers, bits = lanes.integers, bits or codes.bits
    products = integers @ leading_bits(codes, bits).float().transpose(1, 2)
    twice = 2 * products - ((1 << bits) - 1) * integers.sum(dim=-1, keepdim=True)
    centred = twice * codes.scales.float()[:, None] * (lanes.steps * (STEPS[codes.bits] * (1 << codes.bits - bits) / 2))
    return centred + mean_products(codes, lanes) * lanes.steps


def mean_products(codes: KeyCodes, lanes: QueryLanes) -> Tensor:
    """Multiply the integers of queries [G, lanes, P] with the mean of every key's block: float32 [G, lanes, n]."""
    products = lanes.integers.double() @ mean_integers(codes.means).double().transpose(1, 2)  # exact, beyond 2^24
    return products.float() * codes.mean_steps[:, None]


def estimate_at(codes: KeyCodes, places: Tensor, lanes: QueryLanes, bits: int = 0) -> Tensor:
    """Estimate as `estimate_all` does, of the keys at places int64 [G, c] alone: float32 [G, lanes, c]."""
    return estimate_all(codes.at(places), lanes, bits)
