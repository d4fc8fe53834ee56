"""Launches of the attention kernel over a random cache, and their comparison with the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tests.gpu.conftest import MakeKernels
from tests.gpu.kernels.attention.random_cache import POISON, RandomCache
from torch import Tensor

from kvseek.core.batch import RequestState, Selection
from kvseek.kernels.cuda.attention.attend import DeviceAttention
from kvseek.kernels.cuda.attention.hot_rows import HotRows, empty_frames

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # relative, by norm
KV_HEADS, ENTRIES = 2, 100


def make_attention(
    kernels: MakeKernels, cache: RandomCache, group: int, entries: int = ENTRIES, kept_steps: int = 1, **options: Any
) -> DeviceAttention:
    """Attention over a cache that keeps the rows of `kept_steps` steps, with poisoned memory."""
    dtype, hot = cache.window.dtype, None
    if kept_steps and entries:
        sizes = {"slots": cache.window.shape[0], "entries": entries, "steps": kept_steps, "head_dim": cache.dim}
        hot = HotRows.make(empty_frames(cache.extents, cache.kv_heads), dtype=dtype, **sizes)
        assert hot is not None
        hot.rows.fill_(POISON)
        hot.frames.random_(0, 2 * entries + 3)  # another request may have left anything there
    options = {"max_batch": 16, **options}
    attention = DeviceAttention(
        kernels(str(dtype).removeprefix("torch."), cache.dim, group),
        num_heads=cache.kv_heads * group,
        kv_heads=cache.kv_heads,
        head_dim=cache.dim,
        dtype=dtype,
        window_rows=cache.window.shape[2],
        sink=cache.sink,
        entries=entries,
        scaling=cache.dim**-0.5,
        device=cache.device,
        hot=hot,
        **options,
    )
    attention.scratch.partials.fill_(POISON)
    attention.scratch.statistics.fill_(POISON)
    return attention


def make_queries(cache: RandomCache, batch: int, group: int) -> Tensor:
    """Queries whose attention is neither flat nor on a single row."""
    queries = 2 * torch.randn(batch, cache.kv_heads * group, cache.dim, device=cache.device)
    return queries.to(cache.window.dtype)


def run(
    attention: DeviceAttention,
    cache: RandomCache,
    queries: Tensor,
    requests: Sequence[RequestState],
    selected: Tensor | Selection | None,
    lse: Tensor | None = None,
) -> Tensor:
    """One launch into a poisoned output."""
    out = torch.full_like(queries, POISON)
    pointer, stride = cache.rows.data_ptr(), cache.rows.stride(0)
    selection = Selection(selected) if isinstance(selected, Tensor) else selected
    where, on_host = (cache.window, pointer, stride), not cache.rows.is_cuda
    return attention.launch(queries, cache.batch(requests), *where, selection, out, lse, on_host=on_host)


def error(found: Tensor, expected: Tensor) -> float:
    """Relative error by norm; NaN if anything is."""
    return float((found.float().cpu() - expected).norm() / expected.norm())


def check(
    attention: DeviceAttention,
    cache: RandomCache,
    group: int,
    requests: Sequence[RequestState],
    selected: Tensor | None,
) -> None:
    queries = make_queries(cache, len(requests), group)
    found = run(attention, cache, queries, requests, selected)
    expected = cache.expected(queries, requests, selected, cache.dim**-0.5)
    compare(found, expected, requests)


def compare(found: Tensor, expected: Tensor, requests: Sequence[RequestState]) -> None:
    for number, request in enumerate(requests):
        assert error(found[number], expected[number]) <= LIMITS[found.dtype], request
