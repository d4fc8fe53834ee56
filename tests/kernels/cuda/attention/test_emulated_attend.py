"""The attention kernel of the GPU by emulated threads: what tests/gpu/kernels/attention asks of it, of small shapes."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.kernels.attention import test_attend as on_gpu
from tests.support.emulated_kernels import emulated_attention

CPU = torch.device("cpu")
# Type, head size, query heads of a KV head, whether rows are rounded.
SHAPES = [
    ("bfloat16", 64, 3, False),
    ("bfloat16", 64, 3, True),
    ("bfloat16", 96, 3, True),
    ("float16", 32, 9, False),
]


@pytest.mark.parametrize(("dtype", "dim", "group", "rounded"), SHAPES)
def test_matches_the_reference(dtype: str, dim: int, group: int, rounded: bool) -> None:
    on_gpu.test_matches_the_reference(dtype, dim, group, rounded, True, emulated_attention, CPU)


@pytest.mark.parametrize("rounded", [False, True])
def test_places_in_any_order_with_gaps(rounded: bool) -> None:
    on_gpu.test_places_in_any_order_with_gaps("bfloat16", 64, 3, rounded, True, emulated_attention, CPU)


@pytest.mark.parametrize(("dtype", "dim", "group", "rounded"), SHAPES)
def test_log_sum_exp(dtype: str, dim: int, group: int, rounded: bool) -> None:
    on_gpu.test_log_sum_exp(dtype, dim, group, rounded, emulated_attention, CPU)


@pytest.mark.parametrize("rounded", [False, True])
def test_hot_rows_change_nothing_but_where_rows_come_from(rounded: bool) -> None:
    on_gpu.test_hot_rows_change_nothing_but_where_rows_come_from(
        "bfloat16", 64, 3, rounded, 100, 1, emulated_attention, CPU
    )
