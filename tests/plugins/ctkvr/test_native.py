"""CTkvr's compiled kernels for the CPU: the index of CPU engines, and what host cores do in engines on a GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kernels.reference.codes import stores
from tests.plugins.ctkvr.settings import BY_KEYS
from tests.plugins.index_cases import KV_HEADS, extend, make_context, random_keys, random_queries, select_rows
from torch import Tensor

from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.errors import KernelError
from kvseek.core.index_context import LayerRows
from kvseek.kernels.reference.codes.rotation import padded_dim, rotation_signs
from kvseek.plugins.ctkvr.config import Config
from kvseek.plugins.ctkvr.host_cores import describe_step
from kvseek.plugins.ctkvr.native import HostStep, NativeIndex
from kvseek.plugins.ctkvr.reference import ReferenceIndex

CONFIG = Config(centroids=64, centroid_divisor=16, top_k=40, recent=60, probes=8, **BY_KEYS)


def _make(
    kind: type[ReferenceIndex],
    library: CpuLibrary,
    lengths: list[int],
    group: int,
    dtype: torch.dtype,
    config: Config = CONFIG,
    dim: int = 64,
) -> Any:
    """An index over slots of these lengths; every row that holds no token is NaN."""
    books = {"signs": rotation_signs(0, padded_dim(dim))}
    context = dataclasses.replace(make_context(config, dim, group, lengths), codebooks=books)
    pool = torch.full((8, 2, KV_HEADS, 1024, 2, dim), float("nan")).to(dtype)[:, 1]
    rows = LayerRows(pool, pool.data_ptr(), pool.stride(0))
    index = kind(dataclasses.replace(context, library=library, dtype=dtype, rows=rows))
    for slot, n in enumerate(lengths):
        keys = random_keys(n, dim, seed=slot).to(dtype)
        values = torch.randn(KV_HEADS, n, dim)
        context.extents.write(pool, slot, 0, torch.stack((keys, values.to(dtype)), dim=2))
        queries = random_queries(KV_HEADS * group, 200, dim, seed=slot + 50).to(dtype)
        index.build(slot, keys, queries)
    return index


CASES = [(64, 1, 0, "cpu"), (80, 3, 0, "cpu"), (64, 4, 1, "cpu"), (256, 16, 1, "cpu"), (64, 3, 0, "codes")]
CASES += [(96, 7, 1, "codes")]


@pytest.mark.parametrize(("dim", "group", "dtype", "execution"), CASES)
def test_the_native_index_selects_what_the_reference_selects(
    library: CpuLibrary, level: int, dim: int, group: int, dtype: int, execution: str
) -> None:
    config, number = dataclasses.replace(CONFIG, execution=execution), (torch.float32, torch.bfloat16)[dtype]
    native, reference = (
        _make(kind, library, [1500, 39, 2100], group, number, config, dim) for kind in (NativeIndex, ReferenceIndex)
    )
    if execution == "codes":
        for index in (native, reference):
            extend(index, 0, random_keys(300, dim, seed=9).to(number))
        stores.copy(native.codes, reference.codes)  # channels at the border of two cells may differ
    for step, slots in itertools.product(range(4), ([0], [2, 1, 0])):
        queries = random_queries(len(slots), KV_HEADS * group, dim, seed=step).to(number)
        found, expected = select_rows(native, queries, slots), select_rows(reference, queries, slots)
        assert torch.equal(found.rows, expected.rows)
        for index in (native, reference):
            index.refresh(slots)
        assert native.written == reference.written
        for slot in slots:  # what lies beyond a slot's centroids is nobody's
            held = slice(min(native.written[slot], native.ring))
            found_lists, lists = (index.lists[slot, :, held].sort(dim=-1).values for index in (native, reference))
            assert torch.equal(found_lists, lists)


@pytest.mark.parametrize("execution", ["cpu", "codes"])
def test_equal_keys_are_taken_from_the_front(library: CpuLibrary, level: int, execution: str) -> None:
    config = dataclasses.replace(CONFIG, execution=execution)
    index = _make(NativeIndex, library, [900], 4, torch.bfloat16, config)
    keys = torch.full((KV_HEADS, 900, 64), 0.5).bfloat16()
    index.context.rows.pool[:, :, :, 0] = 0.5
    index.build(0, keys, random_queries(KV_HEADS * 4, 200, 64).bfloat16())
    recalled = index.recall(random_queries(1, KV_HEADS * 4, 64)[0], 0)
    rows = select_rows(index, random_queries(1, KV_HEADS * 4, 64).bfloat16(), [0]).rows[0]
    assert torch.equal(rows, recalled[:, :40])


def test_selections_depend_neither_on_the_batch_nor_on_threads(library: CpuLibrary) -> None:
    index = _make(NativeIndex, library, [2900, 39, 1500], 4, torch.bfloat16)
    queries = random_queries(3, KV_HEADS * 4, 64).bfloat16()
    together = select_rows(index, queries, [0, 1, 2]).rows
    torch.set_num_threads(3)  # the next test has as many as at first (conftest.py)
    assert torch.equal(select_rows(index, queries.flip(0), [2, 1, 0]).rows.flip(0), together)
    for slot in range(3):
        assert torch.equal(select_rows(index, queries[slot : slot + 1], [slot]).rows[0], together[slot])


def test_the_native_index_refuses_what_it_cannot(library: CpuLibrary) -> None:
    context = dataclasses.replace(make_context(CONFIG, 260, 2, [100]), library=library)
    with pytest.raises(KernelError, match=r"head_dim = 260: must be at most 256.*--kernels reference"):
        NativeIndex(context)
    index = _make(NativeIndex, library, [100], 2, torch.float32)
    with pytest.raises(KernelError, match=r"queries: torch\.bfloat16.*must be torch\.float32"):
        select_rows(index, torch.zeros(1, 4, 64, dtype=torch.bfloat16), [0])


def host_buffers(index: ReferenceIndex, queries: Tensor, slots: list[int], threads: int) -> Any:
    """HostBuffers of memory that is not pinned, as the recall kernel leaves them; the first request is dense."""
    batch, heads, kv_heads = len(slots), index.context.num_heads, index.context.num_kv_heads
    recalled = torch.stack([index.recall(queries[request], slot) for request, slot in enumerate(slots)])
    counts = (recalled >= 0).sum(dim=2, dtype=torch.int32)
    counts[0] = 0
    return SimpleNamespace(
        recalled=recalled,
        counts=counts,
        slots=torch.tensor(slots, dtype=torch.int32),
        queries=queries,
        out=torch.full((batch, heads, index.context.head_dim), torch.nan),
        lse=torch.full((batch, heads), torch.nan),
        best=torch.full((batch, kv_heads, index.width), -2, dtype=torch.int32),
        selected=torch.full((batch, kv_heads, index.config.top_k), -2, dtype=torch.int32),
        threads=threads,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("dim", "group"), [(64, 3), (160, 16), (128, 4)])
def test_host_cores_rank_and_attend(library: CpuLibrary, level: int, dim: int, group: int, dtype: torch.dtype) -> None:
    index, slots = _make(ReferenceIndex, library, [1500, 39, 2100], group, dtype, dim=dim), [1, 2, 1, 0]
    queries = random_queries(len(slots), index.context.num_heads, dim).to(dtype)
    assert index.context.rows is not None
    results = []
    for threads in (1, 3):
        buffers = host_buffers(index, queries, slots, threads)
        step = describe_step(index, index.context.rows, buffers, len(slots))
        library.function("kvseek_ctkvr_host_step", HostStep)(
            ctypes.cast(ctypes.pointer(step), ctypes.POINTER(HostStep))
        )
        results.append(buffers)
    for name in ("out", "lse", "best", "selected"):
        first, second = (getattr(buffers, name) for buffers in results)
        assert torch.equal(first[1:], second[1:]), "threads make no difference"
    assert (buffers.selected[0] == -1).all(), "nothing is selected for a dense request"
    assert (buffers.out[0] == 0).all()
    assert (buffers.lse[0] == -torch.inf).all()
    for request, slot in list(enumerate(slots))[1:]:
        if index.context.lengths[slot] > CONFIG.top_k:
            rows, best = index.rerank(queries[request], slot, buffers.recalled[request])
            assert torch.equal(buffers.selected[request], rows)
            assert torch.equal(buffers.best[request], best.sort(dim=1).values)
        else:
            rows = buffers.recalled[request, :, : index.context.lengths[slot]]
        held = index.context.extents.read(index.context.rows.pool, slot, index.context.lengths[slot]).double()
        for head in range(KV_HEADS):
            keys, values = held[head, rows[head].long()].unbind(dim=1)
            own = slice(head * group, (head + 1) * group)
            scores = queries[request, own].double() @ keys.T * dim**-0.5
            torch.testing.assert_close(
                buffers.out[request, own].double(), scores.softmax(dim=1) @ values, rtol=2e-5, atol=2e-5
            )
            torch.testing.assert_close(
                buffers.lse[request, own].double(), scores.logsumexp(dim=1), rtol=2e-5, atol=2e-5
            )
