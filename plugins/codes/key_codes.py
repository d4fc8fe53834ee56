"""Nested key codes: 4 bits a channel and one scale a key, whose 2 highest bits are a coarser code of the key; or 2 bits alone.

A key x of a KV head with mean key μ is encoded after rotation, y = R (x - μ) with P channels (rotation.py). Divided by its
root mean square, a channel u = y √P / ‖y‖ is nearly standard normal, so one uniform quantiser serves every channel of every
model: code c = floor(u / Δ) + 2^(B-1), clamped to 0 .. 2^B - 1, for the value v = Δ (c - (2^B - 1) / 2). B is 4 or 2, and the
width of a cell Δ = STEPS[B]. The scale s = ‖y‖² / <v, y> makes the estimate <s v, y> of ‖y‖² exact, so that estimates of q·k are
not too small on average (docs/nested_codes.md).

The b highest bits of a code, h = c >> (B - b), stand for the middle of the codes that begin with them:
v_b = Δ 2^(B-b) (h - (2^b - 1) / 2). They use the same scale.

    q·x ≈ s <v_b, R q> + q·μ

Rotated queries are rounded to 8-bit integers, so that <v_b, R q> is integer arithmetic, the same on every machine.
`estimate_all` and `estimate_at` leave out q·μ, which all keys of a query share.
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
QUERY_LARGEST = 127  # largest integer of a rounded query
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
    """

    high: Tensor
    low: Tensor
    scales: Tensor

    @property
    def bits(self) -> int:
        """Bits of a code: 2 or 4."""
        return 4 if self.low.shape[-1] else 2

    def at(self, places: Tensor) -> KeyCodes:
        """Take the keys at places [G, c] of codes [G, n, ...]."""
        high, low = (p.gather(1, places[..., None].expand(-1, -1, p.shape[-1])) for p in (self.high, self.low))
        return KeyCodes(high, low, self.scales.gather(1, places))


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
    """Round rotated queries float32 [G, lanes, P] to 8 bits: the largest channel of each becomes ±127, ties go to even."""
    largest = lanes.abs().amax(dim=-1, keepdim=True)
    integers = (lanes * torch.where(largest > 0, QUERY_LARGEST / largest, 0.0)).round()
    return QueryLanes(integers, largest / QUERY_LARGEST)


def encode(rotated: Tensor, bits: int = BITS) -> KeyCodes:
    """Encode rotated centred keys y with 2 or 4 bits: float32 [..., P] to codes [..., P/4] and scales [...].

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
    return KeyCodes(high, pack_plane(codes & 3) if bits == BITS else high[..., :0], scales.half())


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
    """Estimate q·(x - μ) of every key from the `bits` highest bits of its codes, or from all that they have.

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
        query's step times half the width of a cell.
    """
    integers, bits = lanes.integers, bits or codes.bits
    products = integers @ leading_bits(codes, bits).float().transpose(1, 2)
    twice = 2 * products - ((1 << bits) - 1) * integers.sum(dim=-1, keepdim=True)
    return twice * codes.scales.float()[:, None] * (lanes.steps * (STEPS[codes.bits] * (1 << codes.bits - bits) / 2))


def estimate_at(codes: KeyCodes, places: Tensor, lanes: QueryLanes, bits: int = 0) -> Tensor:
    """Estimate as `estimate_all` does, of the keys at places int64 [G, c] alone: float32 [G, lanes, c]."""
    return estimate_all(codes.at(places), lanes, bits)
