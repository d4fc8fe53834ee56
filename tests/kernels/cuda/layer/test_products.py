"""Kernels of products without a GPU: their shapes, and what they compute with emulated threads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import pytest
import torch
from tests.gpu.kernels.layer import test_products as checks
from tests.support.emulated_kernels import emulated_products
from torch import Tensor
from torch.nn.functional import silu

from kvseek.core.batch import BUCKETS
from kvseek.core.cuda import CudaKernels
from kvseek.core.errors import KernelError
from kvseek.core.weight_only import INT4, INT8_ASYMMETRIC, INT8_GROUPS, dequantise, quantise
from kvseek.engine.model.cuda.products import KernelHead, RowCounts
from kvseek.kernels.cuda.layer import products as product_kernels
from kvseek.kernels.cuda.layer.products import MOST_ROWS, SHAPES, Format, ProductKernels, Shape, choose_shape

FORMATS = (
    Format.of(name, 32, torch.bfloat16)
    for name in ("none", "int8", "int4", "int8_groups", "int8_asymmetric", "fp8_groups")
)
SCALE_WORDS = {form.kernel: form.scale_words for form in FORMATS}
SHARED_BYTES = 99 << 10  # of a block on sm_89 and sm_120, the least of all architectures (CUDA guide)


def test_shapes_are_those_of_the_source() -> None:
    source = (Path(product_kernels.__file__).parent / "products.cu").read_text(encoding="utf-8")
    for kernel, listed_by_size in SHAPES.items():
        form = rf"^KVSEEK_(?:GROUP_)?PRODUCT\({kernel}, \w+, ([\d, ]+), \d+, \d+\)$"
        compiled = re.findall(form, source, re.MULTILINE)
        shapes = {shape for _, listed in listed_by_size for shape in listed}
        assert {Shape(*map(int, numbers.split(", "))) for numbers in compiled} == shapes
        assert max(shape.shared_bytes(SCALE_WORDS[kernel]) for shape in shapes) <= SHARED_BYTES
        assert all([shape.rows for shape in listed] == [8, 16, 32, 64] for _, listed in listed_by_size)
        assert listed_by_size[-1][0] == 0, "a weight of any size has a shape"


@pytest.mark.parametrize("kernel", SHAPES)
def test_a_sum_is_divided_alike_for_any_number_of_rows(kernel: str) -> None:
    """So a request's bits do not depend on its batch, and no decode step leaves its rows to a library."""
    for weight_rows in (0.5, *(fewest for fewest, _ in SHAPES[kernel]), 1000):
        chosen = [choose_shape(kernel, rows, weight_rows) for rows in range(1, BUCKETS[-1] + 1)]
        assert len({shape.split for shape in chosen}) == 1
        assert all(rows <= shape.rows for rows, shape in enumerate(chosen, 1))
    with pytest.raises(KernelError, match="rows = 65: must be <= 64"):
        choose_shape(kernel, BUCKETS[-1] + 1, 10)


class Launches:
    """Stands in for ProductKernels on the CPU, and refuses more rows than those have room for."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def linear(self, x: Tensor, weight: Tensor, scale: Tensor, bias: None, *, out: Tensor) -> Tensor:
        assert x.shape[0] <= MOST_ROWS
        assert x.is_contiguous()
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


def test_rows_of_a_prompt_are_filled_up() -> None:
    """To the next number of rows that is summed in the same order; more than the largest are multiplied in parts."""
    weight, x, rows = torch.randn(7, 16), torch.randn(300, 16), list[int]()

    def multiply(x: Tensor) -> Tensor:
        rows.append(x.shape[0])
        return x @ weight.T

    counts = RowCounts((32, 128))
    for given, filled in ((1, [32]), (32, [32]), (33, [128]), (128, [128]), (300, [128, 128, 128])):
        rows.clear()
        torch.testing.assert_close(counts.multiply(x[:given], multiply), x[:given] @ weight.T)
        assert rows == filled


def emulated(precision: str, dtype: str) -> ProductKernels:
    """Kernels of a GPU of one multiprocessor, so that small matrices are multiplied in all ways."""
    own, group = checks.parts(precision)
    asymmetric, beside = own == INT8_ASYMMETRIC, own in (INT8_GROUPS, INT8_ASYMMETRIC)
    engine = INT4 if beside else own
    kernels = emulated_products(dtype, engine, group, own)
    kernels.multiprocessors = 1
    return ProductKernels(cast("CudaKernels", kernels), engine, getattr(torch, dtype), group, asymmetric=asymmetric)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "dtype"),
    [*((one, "bfloat16") for one in checks.WEIGHTS), ("int4-128", "float16"), ("fp8", "float16")],
)
def test_emulated_products(precision: str, dtype: str) -> None:
    """Of a number of rows for each kernel; a row depends on no other."""
    kernels, device = emulated(precision, dtype), torch.device("cpu")
    for fewest, _ in SHAPES[checks.kernel_of(precision)]:
        case = checks.Case(precision, dtype, device, 2 * (fewest // 2 + 17), 2352)  # two blocks for a warp
        alone = [kernels.linear(case.x(1), case.weight, case.scale, case.bias, gated=gated) for gated in (False, True)]
        for rows in (1, 9, 17, 64):
            found = kernels.linear(case.x(rows), case.weight, case.scale, case.bias)
            case.check(found, rows, case.bias)
            gated = kernels.linear(case.x(rows), case.weight, case.scale, case.bias, gated=True)
            gate, up = found.float().chunk(2, dim=1)
            info = torch.finfo(case.dtype)
            torch.testing.assert_close(gated.float(), silu(gate) * up, rtol=info.eps, atol=info.tiny)
            assert all(torch.equal(one[-1:], other) for one, other in zip((found, gated), alone, strict=True))
    if case.scale is not None:
        found = kernels.dequantise(case.weight, case.scale)
        assert torch.equal(found, dequantise(case.weight, case.scale, case.dtype))
    if precision == "fp8":
        checks.check_rounded_rows(kernels, 304, device)
