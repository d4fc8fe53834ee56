"""Kernels of products without a GPU: their shapes are those of the source, and which products they make."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from kvseek.core.batch import BUCKETS
from kvseek.core.weight_only import dequantise, quantise
from kvseek.engine.model.cuda.products import KernelHead, RowCounts
from kvseek.kernels.cuda.layer import products as product_kernels
from kvseek.kernels.cuda.layer.products import SHAPES, ProductKernels, Shape

SHARED_BYTES = 99 << 10  # of a block on sm_89 and sm_120, the least of all architectures (CUDA guide)


def test_shapes_are_those_of_the_source() -> None:
    source = (Path(product_kernels.__file__).parent / "products.cu").read_text(encoding="utf-8")
    for bits, name in ((16, "linear, Number"), (8, "weight_only_linear, Byte")):
        compiled = re.findall(rf"^KVSEEK_PRODUCT\({name}, (\d+), (\d+), (\d+), (\d+)\)", source, re.MULTILINE)
        shapes = {shape for listed in SHAPES[bits].values() for _, shape in listed}
        assert {Shape(*map(int, numbers)) for numbers in compiled} == shapes
        assert max(shape.shared_bytes for shape in shapes) <= SHARED_BYTES
        assert all(shape.rows == rows for rows, listed in SHAPES[bits].items() for _, shape in listed)
        assert all(listed[-1][0] == 0 for listed in SHAPES[bits].values()), "a weight of any size has a shape"


def test_decode_steps_never_dequantise() -> None:
    """Their graphs would hold a matrix of the engine's dtype, which no memory plan counts."""
    assert BUCKETS[-1] <= max(SHAPES[8])


class Launches:
    """Stands in for ProductKernels on the CPU, and refuses more rows than those have room for."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def most_rows(self, weight: Tensor) -> int:
        return max(SHAPES[8 * weight.itemsize])

    def linear(
        self, x: Tensor, weight: Tensor, scale: Tensor, bias: None, *, out: Tensor, kernel_rows: int | None
    ) -> Tensor:
        assert x.shape[0] <= self.most_rows(weight)
        assert kernel_rows in (None, self.most_rows(weight))
        assert out.is_contiguous()
        self.rows.append(x.shape[0])
        return out.copy_(x @ dequantise(weight, scale, x.dtype).T)


def test_a_head_of_8_bits_multiplies_rows_in_groups() -> None:
    generator = torch.Generator().manual_seed(1)
    weight, scale = quantise(torch.randn(101, 32, generator=generator), "int8")
    x = torch.randn(150, 32, generator=generator)
    for rows, groups in ((1, [1]), (64, [64]), (65, [64, 1]), (150, [64, 64, 22])):
        launches = Launches()
        found = KernelHead(cast("ProductKernels", launches), weight, scale)(x[:rows], prompt=rows == 65)
        torch.testing.assert_close(found, x[:rows] @ dequantise(weight, scale, torch.float32).T)
        assert launches.rows == groups


def test_rows_of_a_prompt_are_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the next number of rows that is summed in the same order; more than the largest are multiplied in parts."""
    weight, bias, x = torch.randn(7, 16), torch.randn(7), torch.randn(300, 16)
    linear, rows = torch.nn.functional.linear, list[int]()

    def counted(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows.append(x.shape[0])
        return linear(x, weight, bias)

    monkeypatch.setattr("kvseek.engine.model.cuda.products.F.linear", counted)
    counts = RowCounts((32, 128))
    for given, filled in ((1, [32]), (32, [32]), (33, [128]), (128, [128]), (300, [128, 128, 128])):
        rows.clear()
        torch.testing.assert_close(counts.multiply(x[:given], weight, bias), linear(x[:given], weight, bias))
        assert rows == filled
