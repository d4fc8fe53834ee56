"""Causal attention by the compiled kernel against float64, at every instruction level."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.instruction_levels import limited
from torch import Tensor

from kvseek.builder.compile.cpu import instruction_levels
from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.errors import KernelError
from kvseek.engine.model import reference as in_pytorch
from kvseek.kernels.cpu.attention.attend import causal_attention

DTYPES = [torch.float32, torch.bfloat16]
# q, n, heads, KV heads, head size: several blocks of keys and units, groups that a tile of 6 rows straddles, padding
SHAPES = [
    *((1, 1, 2, 2, 2), (7, 333, 6, 6, 96), (37, 300, 4, 1, 16), (50, 50, 3, 1, 10), (65, 200, 8, 2, 128)),
    *((90, 91, 2, 2, 80), (20, 600, 16, 1, 256), (100, 513, 14, 2, 64), (3, 1025, 9, 3, 64)),
]


@pytest.fixture(params=[*instruction_levels(), None])
def level(request: pytest.FixtureRequest, library: CpuLibrary) -> Iterator[int | None]:
    """Each level, or the processor's best if that is lower; None allows AVX512-BF16 too."""
    with limited(library, request.param):
        yield request.param


def make(q: int, n: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as a model has them: views, with NaN in the rows before and behind the keys and values."""
    queries = torch.randn(q, heads, dim).to(dtype).transpose(0, 1)
    rows = torch.full((2, kv_heads, n + 5, dim), torch.nan, dtype=dtype)
    rows[:, :, 2 : n + 2] = torch.randn(2, kv_heads, n, dim).to(dtype)
    return queries, rows[0, :, 2 : n + 2], rows[1, :, 2 : n + 2]


def exact(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, window: int | None = None) -> Tensor:
    """Causal attention in float64, [q, H, D]."""
    group, (q, n) = queries.shape[0] // keys.shape[0], (queries.shape[1], keys.shape[1])
    keys, values = (part.double().repeat_interleave(group, dim=0) for part in (keys, values))
    behind = torch.arange(n - q, n)[:, None] - torch.arange(n)
    unseen = (behind < 0) | (behind >= (window or n))
    scores = (queries.double() @ keys.mT * scaling).masked_fill(unseen, -torch.inf)
    return (scores.softmax(dim=-1) @ values).transpose(0, 1)


def check(library: CpuLibrary, parts: tuple[Tensor, Tensor, Tensor], scaling: float, window: int | None = None) -> None:
    """Float32 is compared with float64; bfloat16 must be as near to it as PyTorch's flash attention."""
    found, expected = causal_attention(*parts, scaling, library, window), exact(*parts, scaling, window)
    assert found.is_contiguous()
    assert found.dtype is parts[0].dtype
    error = (found - expected).norm() / expected.norm()
    if found.dtype is torch.float32:
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    else:
        reference = in_pytorch.causal_attention(*parts, scaling, window)
        assert error <= 1.05 * (reference - expected).norm() / expected.norm()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_it_is_as_near_to_float64_as_it_can_be(
    library: CpuLibrary, level: int | None, dtype: torch.dtype, shape: tuple[int, int, int, int, int]
) -> None:
    torch.manual_seed(sum(shape))
    check(library, make(*shape, dtype), shape[-1] ** -0.5)


@pytest.mark.parametrize("window", [1, 2, 31, 32, 256, 500])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_a_window(library: CpuLibrary, shape: tuple[int, int, int, int, int], window: int) -> None:
    torch.manual_seed(sum(shape))
    check(library, make(*shape, torch.float32), shape[-1] ** -0.5, window)


@settings(max_examples=20)
@given(
    q=st.integers(1, 150),
    past=st.integers(0, 400),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 16),
    pairs=st.integers(1, 128),
    seed=st.integers(0, 2**31),
)
def test_any_shape(library: CpuLibrary, q: int, past: int, kv_heads: int, group: int, pairs: int, seed: int) -> None:
    torch.manual_seed(seed)
    check(library, make(q, q + past, kv_heads * group, kv_heads, 2 * pairs, torch.float32), (2 * pairs) ** -0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 90])
def test_a_query_depends_neither_on_threads_nor_on_its_chunk(
    library: CpuLibrary, level: int | None, dtype: torch.dtype, window: int | None
) -> None:
    queries, keys, values = make(300, 700, 6, 2, 64, dtype)
    whole = causal_attention(queries, keys, values, 0.125, library, window)  # with one thread: tests/conftest.py
    torch.set_num_threads(3)
    assert torch.equal(causal_attention(queries, keys, values, 0.125, library, window), whole)
    for start, stop in [(0, 100), (100, 101), (101, 300)]:
        own = keys[:, : 400 + stop], values[:, : 400 + stop]
        found = causal_attention(queries[:, start:stop], *own, 0.125, library, window)
        assert torch.equal(found, whole[start:stop])


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_large_scores_do_not_overflow(library: CpuLibrary, level: int | None, dtype: torch.dtype) -> None:
    queries, keys, values = make(40, 300, 2, 1, 64, dtype)
    found = causal_attention(1e4 * queries, keys, values, 1.0, library)
    best = exact(1e4 * queries, keys, values, 1.0)  # of one key, nearly
    torch.testing.assert_close(found.double(), best, rtol=1e-2, atol=1e-2)


def test_weights_of_bfloat16_add_up_to_one(library: CpuLibrary, level: int | None) -> None:
    queries, keys, values = make(70, 330, 3, 1, 64, torch.bfloat16)
    assert causal_attention(queries, keys, torch.ones_like(values), 0.125, library).eq(1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_poisoned_row_shows(library: CpuLibrary, level: int | None, dtype: torch.dtype, poison: float) -> None:
    queries, keys, values = make(30, 400, 2, 1, 64, dtype)
    keys[0, 5] = poison
    assert causal_attention(queries, keys, values, 0.125, library).isnan().all()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda q, k, v: (q.double(), k.double(), v.double(), 1.0), "dtype = torch.float64"),
        (lambda q, k, v: (q[..., :3], k[..., :3], v[..., :3], 1.0), "head_dim = 3"),
        (lambda q, k, v: (q[:3], k, v, 1.0), "num_heads = 3"),
        (lambda q, k, v: (q, k[:, :4], v[:, :4], 1.0), "queries = 5: must be 1 to 4"),
        (lambda q, k, v: (q[:, :0], k, v, 1.0), "queries = 0"),
        (lambda q, k, v: (q, k, v, 0.0), "scaling = 0.0"),
        (lambda q, k, v: (q, k, v[:, 1:], 1.0), r"values = \(\(2, 8, 8\)"),
        (lambda q, k, v: (q, k.bfloat16(), v, 1.0), "keys = .*bfloat16"),
        (lambda q, k, v: (q, k.mT.contiguous().mT, v, 1.0), "keys' device and strides"),
        (lambda q, k, v: (q.to("meta"), k, v, 1.0), "queries' device and strides"),
    ],
)
def test_what_the_kernel_does_not_support_is_refused(
    library: CpuLibrary, change: Callable[..., tuple[Any, ...]], names: str
) -> None:
    with pytest.raises(KernelError, match=f"native causal attention: {names}.*--kernels reference"):
        causal_attention(*change(*make(5, 9, 4, 2, 8, torch.float32)), library)
