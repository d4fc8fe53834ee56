"""CTkvr's index of CPU engines: it selects what the reference selects."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from tests.kernels.reference.codes import stores
from tests.plugins.ctkvr.settings import BY_KEYS
from tests.plugins.index_cases import KV_HEADS, extend, make_context, random_keys, random_queries, select_rows

from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.errors import KernelError
from kvseek.core.index_context import LayerRows
from kvseek.kernels.reference.codes.rotation import rotation_signs
from kvseek.plugins.ctkvr.config import Config
from kvseek.plugins.ctkvr.native import NativeIndex
from kvseek.plugins.ctkvr.reference import ReferenceIndex

CONFIG = Config(centroids=64, centroid_divisor=16, top_k=40, recent=60, probes=8, **BY_KEYS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _make(
    kind: type[ReferenceIndex], library: CpuLibrary, lengths: list[int], group: int, dtype: torch.dtype, config: Config
) -> ReferenceIndex:
    context = dataclasses.replace(make_context(config, 64, group, lengths), codebooks={"signs": rotation_signs(0, 64)})
    pool = torch.full((8, 2, KV_HEADS, 1024, 2, 64), float("nan")).to(dtype)[:, 1]
    rows = LayerRows(pool, pool.data_ptr(), pool.stride(0))
    index = kind(dataclasses.replace(context, library=library, dtype=dtype, rows=rows))
    for slot, n in enumerate(lengths):
        keys = random_keys(n, 64, seed=slot).to(dtype)
        values = torch.randn(KV_HEADS, n, 64)
        context.extents.write(pool, slot, 0, torch.stack((keys, values.to(dtype)), dim=2))
        queries = random_queries(KV_HEADS * group, 200, 64, seed=slot + 50).to(dtype)
        index.build(slot, keys, queries)
    return index


CASES = [(group, dtype, "cpu") for group in (1, 3, 4) for dtype in DTYPES]
CASES += [(3, dtype, "codes") for dtype in DTYPES[:2]]


@pytest.mark.parametrize(("group", "dtype", "execution"), CASES)
def test_the_native_index_selects_what_the_reference_selects(
    library: CpuLibrary, group: int, dtype: torch.dtype, execution: str
) -> None:
    config = dataclasses.replace(CONFIG, execution=execution)
    native, reference = (
        _make(kind, library, [1500, 39, 2100], group, dtype, config) for kind in (NativeIndex, ReferenceIndex)
    )
    if native.codes is not None and reference.codes is not None:
        assert native.bytes_per_token == reference.bytes_per_token == KV_HEADS * (64 * 4 / 8 + 2 + 132 / 256)
        for index in (native, reference):
            extend(index, 0, random_keys(300, 64, seed=9).to(dtype))
        stores.copy(native.codes, reference.codes)  # channels at the border of two cells may differ
    for step, slots in itertools.product(range(4), ([0], [2, 1, 0])):
        queries = random_queries(len(slots), KV_HEADS * group, 64, seed=step).to(dtype)
        found, expected = select_rows(native, queries, slots), select_rows(reference, queries, slots)
        assert torch.equal(found.rows, expected.rows)
        for index in (native, reference):
            index.refresh(slots)
        assert native.written == reference.written
        for slot in slots:  # what lies beyond a slot's centroids is nobody's
            held = slice(min(native.written[slot], native.ring))
            found_lists, lists = (index.lists[slot, :, held].sort(dim=-1).values for index in (native, reference))
            assert torch.equal(found_lists, lists)


def test_the_native_index_refuses_what_it_cannot(library: CpuLibrary) -> None:
    context = dataclasses.replace(make_context(CONFIG, 80, 2, [100]), library=library)
    with pytest.raises(KernelError, match=r"head_dim = 80: must be a multiple of 32.*--kernels reference"):
        NativeIndex(context)
    index = _make(NativeIndex, library, [100], 2, torch.float32, CONFIG)
    with pytest.raises(KernelError, match=r"queries: torch\.bfloat16.*must be torch\.float32"):
        select_rows(index, torch.zeros(1, 4, 64, dtype=torch.bfloat16), [0])
