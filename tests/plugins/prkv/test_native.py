"""PRKV's compiled kernels against its PyTorch reference: the pages they choose from the same codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.reference.codes import stores
from tests.plugins.index_cases import KV_HEADS, SHAPES, NativePair, keys_of_slots, select_rows
from tests.plugins.prkv.settings import BOXES
from torch import Tensor

from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.errors import KernelError
from kvseek.core.index_context import LayerRows
from kvseek.plugins.prkv import method
from kvseek.plugins.prkv.config import Config
from kvseek.plugins.prkv.native import NativeIndex, observe
from kvseek.plugins.prkv.reference import ReferenceIndex
from kvseek.plugins.prkv.static import observation_scores

SMALL = Config(top_k=64, static_share=0.25, page=8, window_queries=4, update_interval=8, update_queries=4)


class Pair(NativePair):
    method, kinds = method, (ReferenceIndex, NativeIndex)
    configs = tuple(replace(SMALL, top_k=256, page=page, static_share=0.5) for page in (8, 16, 128))
    few = 3
    steps = 6  # more than `recent` has room for
    ascending = False  # static rows come first

    def fill(self, keys: Sequence[Tensor]) -> None:
        store, own = self.expected.summaries.store, self.found.summaries.store
        stores.poison(own)
        heads, dim = self.expected.context.num_heads, keys[0].shape[2]
        queries = torch.randn(heads, self.expected.config.window_queries, dim).to(keys[0].dtype)
        for slot, part in enumerate(keys):
            for index in (self.expected, self.found):
                index.build(slot, part, queries)
            self.found.set_static(slot, self.expected.static_of(slot))  # near ties
            stores.copy_slot(store, own, slot, part.shape[1])

    def check(self, queries: Tensor, slots: Sequence[int]) -> None:
        """Every page taken is counted, too."""
        found = self.found
        self.picked = found.picked.clone()
        super().check(queries, slots)
        assert torch.equal(found.picked, self.picked)
        assert torch.equal(found.recent, self.expected.recent)
        assert found.received == self.expected.received

    def check_request(self, ours: Tensor, theirs: Tensor, queries: Tensor, slot: int) -> None:
        """The same rows, but for pages whose values are equal up to rounding."""
        found, page = self.found, self.found.config.page
        table, of_extent, count = found.context.extents.table, found.pages_of_extent, found.counts[slot]
        values = self.expected.page_values(queries, slot, found.context.lengths[slot])
        for head in range(KV_HEADS):
            assert torch.equal(ours[head, :count], theirs[head, :count])
            have, want = ([row for row in rows[head, count:].tolist() if row >= 0] for rows in (ours, theirs))
            assert have == sorted(set(have))
            taken, wanted = ({row // page for row in rows} for rows in (have, want))
            differing = [float(values[head, number]) for number in taken ^ wanted]
            scale, largest = max(differing, default=0.0), float(values[head].nan_to_num().abs().max())
            assert scale - min(differing, default=0.0) <= 1e-5 * scale + 1e-6 * largest
            if not differing:
                assert have == want
            for number in taken:
                self.picked[int(table[slot, number // of_extent]), head, number % of_extent] += 1


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 3000),
    pages=st.integers(1, 40),
    page=st.sampled_from((8, 32)),
    share=st.sampled_from((0.0, 0.3, 1.0)),
    group=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
def test_any_length_and_static_set(
    library: CpuLibrary, n: int, pages: int, page: int, share: float, group: int, seed: int
) -> None:
    torch.manual_seed(seed)
    config = replace(SMALL, top_k=pages * page, page=page, static_share=share)
    pair = Pair(library, config, group, 64, keys_of_slots([n], 64))
    pair.check(torch.randn(1, KV_HEADS * group, 64), [0])


def test_whole_extents_of_static_rows(library: CpuLibrary) -> None:
    config = replace(SMALL, top_k=1280, static_share=1.0)
    pair = Pair(library, config, 3, 64, keys_of_slots([3000], 64))
    for count in (1024, 1032, 1280):
        for index in (pair.expected, pair.found):
            index.set_static(0, torch.arange(count).expand(KV_HEADS, -1))
        pair.check(torch.randn(1, KV_HEADS * 3, 64), [0])


def test_pages_far_below_the_best_keep_their_order(library: CpuLibrary, level: int) -> None:
    """Weights of most pages are too small for a float if the largest exponent of an extent is taken out of all of them."""
    torch.manual_seed(0)
    config = replace(SMALL, top_k=512, static_share=0.0)
    pair = Pair(library, config, 1, 64, [60 * keys_of_slots([2000], 64)[0]])
    queries, static = torch.randn(1, KV_HEADS, 64), torch.empty(KV_HEADS, 0, dtype=torch.int64)
    summaries, scaling = pair.expected.summaries, pair.expected.context.scaling
    scores = summaries.scores(queries[0][:, None], 0, static, 2000) * scaling
    assert float(scores.amax() - scores.median()) > 200
    pair.check(queries, [0])


def test_requests_of_one_slot_count_the_same_pages(library: CpuLibrary) -> None:
    pair = Pair(library, SMALL, 3, 64, keys_of_slots([1900], 64))
    pair.check(torch.randn(3, KV_HEADS * 3, 64), [0, 0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_choose_the_static_set_that_the_reference_chooses(library: CpuLibrary, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    keys, prompt = keys_of_slots([1500], 64, dtype)[0], torch.randn(KV_HEADS * 3, 4, 64).to(dtype)
    indexes = []
    for kind, given_library in ((ReferenceIndex, None), (NativeIndex, library)):
        context = Pair.context(given_library, SMALL, 3, 64, [1500], dtype)
        pool = torch.zeros(context.extents.capacity, KV_HEADS, 1024, 2, 64, dtype=dtype)
        index = kind(replace(context, rows=LayerRows(pool, pool.data_ptr(), pool.stride(0))))
        index.build(0, keys, prompt)
        context.extents.write(pool, 0, 0, keys[:, :, None].expand(-1, -1, 2, -1))
        indexes.append(index)
    stores.copy(indexes[0].summaries.store, indexes[1].summaries.store)  # codes may differ at the border of two cells
    before = indexes[0].static_of(0)
    for _ in range(40):
        queries = torch.randn(1, KV_HEADS * 3, 64).to(dtype)
        for index in indexes:
            select_rows(index, queries, [0])
            index.refresh([0])
        assert torch.equal(indexes[0].static, indexes[1].static)
    assert not torch.equal(indexes[0].static_of(0), before)
    assert torch.equal(*(index.static_rows for index in indexes))


@pytest.mark.parametrize(("dim", "group", "dtype"), [*SHAPES, (7, 2, torch.bfloat16)])
def test_observation_equals_the_reference(
    library: CpuLibrary, level: int, dim: int, group: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(dim)
    keys = keys_of_slots([1200], dim, dtype)[0]
    queries = torch.randn(KV_HEADS * group, 5, dim).to(dtype)
    valid = torch.rand(KV_HEADS, 1200) < 0.4
    for scaling, counted in ((dim**-0.5, None), (4 * dim**-0.5, None), (dim**-0.5, valid)):
        expected = observation_scores(queries, keys, scaling, counted)
        torch.testing.assert_close(observe(library, queries, keys, scaling, counted), expected, rtol=1e-4, atol=1e-7)


def test_observation_of_parts_of_tensors(library: CpuLibrary) -> None:
    """Keys among values, queries of several slots; and no key at all."""
    rows, recent = torch.randn(KV_HEADS, 50, 2, 64), torch.randn(5, 6, 64)
    keys, queries = rows[:, :, 0], recent.transpose(0, 1)
    expected = observation_scores(queries, keys, 0.125)
    torch.testing.assert_close(observe(library, queries, keys, 0.125), expected, rtol=1e-4, atol=1e-7)
    assert observe(library, queries, keys[:, :0], 0.125).shape == (KV_HEADS, 0)


def test_observation_does_not_read_keys_that_do_not_count_nor_depend_on_threads(library: CpuLibrary) -> None:
    keys, queries = torch.randn(KV_HEADS, 2500, 64), torch.randn(6, 4, 64)
    valid = torch.arange(2500).expand(KV_HEADS, -1) % 3 > 0
    poisoned = keys.masked_fill(~valid[..., None], torch.nan)
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(observe(library, queries, poisoned, 0.125, valid))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], observation_scores(queries, keys, 0.125, valid), rtol=1e-4, atol=1e-7)


def test_observation_refuses_other_dtypes(library: CpuLibrary) -> None:
    with pytest.raises(KernelError, match=r"queries torch\.float32, keys torch\.float16: must both be"):
        observe(library, torch.zeros(2, 1, 8), torch.zeros(1, 4, 8, dtype=torch.float16), 1.0)


def test_boxes_have_no_compiled_kernels(library: CpuLibrary) -> None:
    assert type(method.create(Pair.context(library, Config(**BOXES), 1, 64, [10]))) is ReferenceIndex
