"""Kernels of products without a GPU: their shapes are those of the source, and which products they make."""

from __future__ import annotations

import re
from pathlib import Path

from kvseek.engine.model import product_kernels
from kvseek.engine.model.graphs import BUCKETS
from kvseek.engine.model.product_kernels import SHAPES, Shape

SHARED_BYTES = 99 << 10  # of a block on sm_89 and sm_120, the least of all architectures (CUDA guide)


def test_shapes_are_those_of_the_source() -> None:
    source = (Path(product_kernels.__file__).parent / "cuda/products.cu").read_text(encoding="utf-8")
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
