"""Rows in 8 bits: integers with a scale a key and a scale a value. The definition of correct for all that writes or reads them.

A row's scale is its largest magnitude divided by 127, as bfloat16, which has float32's range; the integers are rounded after
that, so that no number is off by more than half a step, but for the largest of a row whose scale is the one named below.

Rows that are widened to the engine's dtype and rounded again, as those of a prefix are that moves to another extent, give the
same integers and scales: the largest integer is 127, and 127 · scale, rounded to the 8 bits of bfloat16, leads back to the
scale. It does not where the scale's significand is 1.5, so the one below takes its place.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_DTYPE = torch.bfloat16
LARGEST = 127
SIGNIFICAND, ONE_AND_A_HALF = 0x7F, 0x40  # of a bfloat16's bits


def round_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round keys and values [..., D] to integers, int8 [..., D], and scales, bfloat16 [...].

    A row with a number that is not finite gets a scale that is not finite, and so stays without meaning.
    """
    numbers = rows.to(torch.float32, copy=True)
    # On the CPU a norm of infinite order takes 20 times as long.
    most = torch.maximum(numbers.amax(dim=-1), -numbers.amin(dim=-1))
    scales = (most / LARGEST).to(SCALE_DTYPE)
    bits = scales.view(torch.int16)
    bits -= ((bits & SIGNIFICAND) == ONE_AND_A_HALF).to(torch.int16)
    steps = scales.float()
    numbers /= steps.where(steps > 0, 1.0)[..., None]
    return numbers.round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scales


def widen_rows(
    integers: Tensor, scales: Tensor, out: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the keys and values [..., D] of integers and scales in `dtype`, or in `out` and its dtype."""
    if out is None:
        out = torch.empty(integers.shape, dtype=dtype, device=integers.device)
    return torch.mul(integers, scales.float()[..., None], out=out)
