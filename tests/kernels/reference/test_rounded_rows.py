"""Rows in 8 bits: how far they are from the rows, that rounding twice changes nothing, and what attention over them loses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvseek.kernels.reference.attention.rounded_rows import LARGEST, SCALE_DTYPE, round_rows, widen_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rows_with(outliers: float, magnitude: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows [300, 2, 64] of which some channels are larger by a factor, as those of keys are."""
    torch.manual_seed(seed)
    rows = torch.randn(300, 2, 64) * torch.rand(300, 2, 1)
    rows[..., ::17] *= outliers
    return (rows * 2.0**magnitude).to(dtype)


ROWS = {
    "outliers": st.floats(0.01, 50),
    "magnitude": st.integers(-3, 6),
    "dtype": st.sampled_from(DTYPES),
    "seed": st.integers(0, 2**31),
}


@settings(max_examples=60, deadline=None)
@given(**ROWS)
def test_no_number_is_off_by_more_than_half_a_step(
    outliers: float, magnitude: int, dtype: torch.dtype, seed: int
) -> None:
    rows = rows_with(outliers, magnitude, dtype, seed)
    integers, scales = round_rows(rows)
    assert (integers.dtype, scales.dtype, scales.shape) == (torch.int8, SCALE_DTYPE, rows.shape[:-1])
    off = (widen_rows(integers, scales) - rows.float()).abs() / scales.float()[..., None]
    assert off[integers.abs() < LARGEST].max() <= 0.5001
    assert off.max() <= 1, "the largest of a row whose scale has another one's place"
    assert (integers.abs().amax(dim=-1) == LARGEST).all()


@settings(max_examples=60, deadline=None)
@given(**ROWS)
def test_rows_that_are_widened_and_rounded_again_stay(
    outliers: float, magnitude: int, dtype: torch.dtype, seed: int
) -> None:
    once = round_rows(rows_with(outliers, magnitude, dtype, seed))
    again = round_rows(widen_rows(*once, dtype=dtype))
    assert torch.equal(once[0], again[0])
    assert torch.equal(once[1], again[1])


def test_every_scale_leads_back_to_itself() -> None:
    scales = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    scales = scales[(scales > 1e-35) & (scales < 1e35)]
    once = round_rows(scales[:, None] * torch.tensor([127.0, -20.3, 0.0]))
    again = round_rows(widen_rows(*once, dtype=torch.bfloat16))
    assert torch.equal(once[0], again[0])
    assert torch.equal(once[1], again[1])


def test_zeros_stay_and_what_is_not_finite_stays_so() -> None:
    assert (widen_rows(*round_rows(torch.zeros(2, 64))) == 0).all()
    for poison in (torch.nan, torch.inf):
        rows = torch.ones(1, 64)
        rows[0, 3] = poison
        assert not widen_rows(*round_rows(rows)).isfinite().any()


@pytest.mark.parametrize("seed", range(5))
def test_attention_loses_at_most_a_fiftieth(seed: int) -> None:
    torch.manual_seed(seed)
    keys, values = torch.randn(2, 4000, 64)
    query = 2 * torch.randn(64)
    rounded = widen_rows(*round_rows(torch.stack((keys, values), dim=1)))
    exact = (keys @ query / 8).softmax(0) @ values
    found = (rounded[:, 0] @ query / 8).softmax(0) @ rounded[:, 1]
    assert (found - exact).norm() < 0.02 * exact.norm()
