"""Matrix products of engines on the CPU against products in float64, for every number of rows that changes what multiplies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvseek.core.errors import EngineDirectoryError
from kvseek.engine.model.host_products import (
    FEW_ROWS_OF_BFLOAT16,
    FEW_ROWS_OF_BYTES,
    ByteLinear,
    HostProducts,
    PackedLinear,
    WidenedLinear,
)
from kvseek.engine.model.linear import Linear, Products
from kvseek.engine.model.weight_only import dequantise, quantise

ROWS = (1, 2, FEW_ROWS_OF_BFLOAT16, FEW_ROWS_OF_BFLOAT16 + 1, FEW_ROWS_OF_BYTES, FEW_ROWS_OF_BYTES + 1, 150)
DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((96, 64), (33, 112), (7, 40), (1, 16))


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(linear: Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Compare with float64: sums may be rounded as float32 is, and the result once or, with a bias, twice."""
    found = linear(x)
    assert (found.dtype, found.shape) == (x.dtype, (x.shape[0], weight.shape[0]))
    exact, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    limit = size * weight.shape[1] * 2.0**-24 + size * torch.finfo(x.dtype).eps
    assert ((found.double() - exact).abs() <= limit).all()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_weights(dtype: torch.dtype, native: bool, with_bias: bool) -> None:
    for outputs, inputs in SHAPES:
        weight = random(outputs, inputs, dtype=dtype, seed=1)
        bias = random(outputs, dtype=dtype, seed=2) if with_bias else None
        linear = HostProducts(dtype, native).linear(weight, bias)
        assert isinstance(linear, WidenedLinear if dtype is torch.bfloat16 and not native else PackedLinear)
        for rows in ROWS:
            check(linear, random(rows, inputs, dtype=dtype), weight, bias)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_8_bits(dtype: torch.dtype, precision: str, native: bool, with_bias: bool) -> None:
    for outputs, inputs in SHAPES:
        stored, scale = quantise(random(outputs, inputs, seed=1), precision)
        bias = random(outputs, dtype=dtype, seed=2) if with_bias else None
        linear = HostProducts(dtype, native).linear(stored, bias, scale)
        kept = dtype is torch.bfloat16 and precision == "int8" and inputs % 16 == 0
        assert isinstance(linear, ByteLinear) == kept
        for rows in ROWS:
            # Few rows are multiplied before the scale rounds anything; many with the dequantised weight, which is rounded.
            exact = kept and (rows <= FEW_ROWS_OF_BYTES or not native)
            weight = stored.double() * scale.double()[:, None] if exact else dequantise(stored, scale, dtype)
            check(linear, random(rows, inputs, dtype=dtype), weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_larger_tensor(dtype: torch.dtype) -> None:
    """Attention's output is a view; a view must be multiplied like its copy."""
    weight, x = random(48, 64, dtype=dtype, seed=1), random(6, 128, dtype=dtype)[:, 32:96]
    stored, scale = quantise(weight, "int8")
    for linear in (HostProducts(dtype).linear(weight), HostProducts(dtype).linear(stored, None, scale)):
        assert torch.equal(linear(x), linear(x.contiguous()))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_infinity_stays_in_its_row(dtype: torch.dtype, native: bool) -> None:
    weight, products = random(32, 64, seed=1), HostProducts(dtype, native)
    for linear in (products.linear(weight.to(dtype)), products.linear(*_with_scale(weight))):
        for rows in ROWS[1:]:
            x = random(rows, 64, dtype=dtype)
            clean = linear(x)
            x[1, 3] = float("inf")
            found = linear(x)
            assert not found[1].isfinite().any()
            others = [row for row in range(rows) if row != 1]
            torch.testing.assert_close(found[others], clean[others])


def _with_scale(weight: Tensor) -> tuple[Tensor, None, Tensor]:
    stored, scale = quantise(weight, "int8")
    return stored, None, scale


def test_scales_of_an_older_engine_are_refused() -> None:
    stored, scale = quantise(random(32, 64), "int8")
    with pytest.raises(EngineDirectoryError, match="older kvseek: build the engine again"):
        HostProducts(torch.bfloat16).linear(stored, None, scale * (1 + 2.0**-10))


def test_without_onednn_products_are_those_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvseek.engine.model.host_products._has_onednn", lambda: False)
    weight, x = random(32, 64, seed=1), random(3, 64)
    linear = HostProducts(torch.float32).linear(weight)
    assert type(linear) is Linear
    assert torch.equal(linear(x), Products(torch.float32).linear(weight)(x))
