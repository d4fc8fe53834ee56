"""The nested method's compiled kernels against its PyTorch reference: the rows they choose from the same codes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.reference.codes import stores
from tests.plugins.index_cases import (
    KV_HEADS,
    check_batch_order_and_threads,
    keys_of_slots,
    native_context,
    select_rows,
)
from torch import Tensor

from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.errors import KernelError
from kvseek.kernels.reference.codes.key_codes import estimate_at
from kvseek.plugins.group import softmax_mean
from kvseek.plugins.nested import method
from kvseek.plugins.nested.config import Config
from kvseek.plugins.nested.native import NativeIndex
from kvseek.plugins.nested.reference import ReferenceIndex

make_context = partial(native_context, method.traits)


def make_pair(
    library: CpuLibrary, config: Config, group: int, dim: int, keys: Sequence[Tensor]
) -> tuple[ReferenceIndex, NativeIndex]:
    """The same keys [G, n, D] per slot in both indexes, with the reference's codes; the native arrays start poisoned."""
    lengths = [part.shape[1] for part in keys]
    expected = ReferenceIndex(make_context(None, config, group, dim, lengths, keys[0].dtype))
    found = NativeIndex(make_context(library, config, group, dim, lengths, keys[0].dtype))
    stores.poison(found.codes)
    for slot, part in enumerate(keys):
        expected.build(slot, part, part)
        stores.copy_slot(expected.codes, found.codes, slot, part.shape[1])
    return expected, found


def check_choice(expected: ReferenceIndex, found: NativeIndex, queries: Tensor, slots: Sequence[int]) -> None:
    """The same rows, but for candidates whose values differ from the last one taken by rounding."""
    wanted, chosen = select_rows(expected, queries, slots), select_rows(found, queries, slots)
    assert (chosen.rows.dtype, chosen.page) == (torch.int32, 1)
    for request, slot in enumerate(slots):
        n = expected.context.lengths[slot]
        if n <= expected.config.top_k:
            assert torch.equal(chosen.rows[request], wanted.rows[request])
            continue
        lanes = expected.lanes(queries[request].unflatten(0, (KV_HEADS, -1)))
        candidates = expected.candidates(lanes, slot, n)
        estimates = estimate_at(expected.codes.read(slot, n), candidates, lanes)
        values = softmax_mean(estimates, expected.context.scaling)
        for head in range(KV_HEADS):
            value_of = dict(zip(candidates[head].tolist(), values[head].tolist(), strict=True))
            ours, theirs = chosen.rows[request, head].tolist(), wanted.rows[request, head].tolist()
            assert ours == sorted(set(ours))
            last = min(value_of[place] for place in theirs)
            for place in set(ours) ^ set(theirs):  # KeyError: not a candidate
                assert value_of[place] == pytest.approx(last, rel=1e-5, abs=1e-5 * float(values[head].max()))


SHAPES = [
    (8, 2, torch.float32),
    (16, 2, torch.bfloat16),
    (64, 3, torch.float32),
    (96, 7, torch.bfloat16),
    (128, 1, torch.float32),
    (256, 16, torch.float32),
]


@pytest.mark.parametrize(("dim", "group", "dtype"), SHAPES)
def test_selection_equals_the_reference(library: CpuLibrary, dim: int, group: int, dtype: torch.dtype) -> None:
    torch.manual_seed(group)
    lengths = [1500, 1, 3000 if dim < 256 else 200, 100]
    config = Config(top_k=100, candidates=5)
    expected, found = make_pair(library, config, group, dim, keys_of_slots(lengths, dim, dtype))
    check_choice(expected, found, torch.randn(4, KV_HEADS * group, dim).to(dtype), [2, 0, 3, 1])


@pytest.mark.parametrize(("dim", "group", "dtype"), SHAPES)
def test_every_level_selects_as_the_reference(
    library: CpuLibrary, level: int, dim: int, group: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(dim)
    config = Config(top_k=30)
    expected, found = make_pair(library, config, group, dim, keys_of_slots([3100 if dim < 256 else 300], dim, dtype))
    check_choice(expected, found, torch.randn(1, KV_HEADS * group, dim).to(dtype), [0])


@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(1, 3000),
    top_k=st.integers(1, 60),
    group=st.integers(1, 9),
    candidates=st.integers(1, 9),
    distinct=st.integers(1, 40),
    seed=st.integers(0, 2**31),
)
def test_ties_are_cut_as_the_reference_cuts_them(
    library: CpuLibrary, n: int, top_k: int, group: int, candidates: int, distinct: int, seed: int
) -> None:
    """Few distinct keys, in runs, so that every score occurs many times."""
    torch.manual_seed(seed)
    config = Config(top_k=top_k, candidates=candidates)
    keys = torch.randn(KV_HEADS, distinct, 64)[:, torch.randint(distinct, (n,)).sort().values]
    expected, found = make_pair(library, config, group, 64, [keys])
    queries = torch.randn(1, KV_HEADS * group, 64)
    if candidates == 1:  # the choice is the candidates', and no softmax's
        assert torch.equal(select_rows(found, queries, [0]).rows, select_rows(expected, queries, [0]).rows)
    else:
        check_choice(expected, found, queries, [0])


def test_selection_does_not_depend_on_batch_order_or_threads(library: CpuLibrary) -> None:
    torch.manual_seed(3)
    _, found = make_pair(library, Config(top_k=20), 3, 64, keys_of_slots([900, 3100, 1300], 64))
    check_batch_order_and_threads(found)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 0.0])
def test_strange_queries_still_give_valid_rows(library: CpuLibrary, level: int, poison: float) -> None:
    _, found = make_pair(library, Config(top_k=20), 3, 64, keys_of_slots([3000], 64))
    rows = select_rows(found, torch.full((1, 3 * KV_HEADS, 64), poison), [0]).rows
    assert int(rows.min()) >= 0
    assert int(rows.max()) < 3000
    assert bool((rows.diff() > 0).all())


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_strange_keys_still_give_valid_rows(library: CpuLibrary, level: int, poison: float) -> None:
    config = Config(top_k=20)
    found = NativeIndex(make_context(library, config, 3, 64, [900], torch.float32))
    keys = keys_of_slots([900], 64)[0]
    keys[:, 5] = poison
    found.build(0, keys, keys)
    rows = select_rows(found, torch.randn(1, 3 * KV_HEADS, 64), [0]).rows
    assert int(rows.min()) >= 0
    assert bool((rows.diff() > 0).all())


def test_create_follows_the_library(library: CpuLibrary) -> None:
    for given_library, kind in ((library, NativeIndex), (None, ReferenceIndex)):
        assert type(method.create(make_context(given_library, Config(), 1, 64, [10], torch.float32))) is kind


def test_unsupported_queries_are_refused(library: CpuLibrary) -> None:
    index = NativeIndex(make_context(library, Config(), 1, 64, [10], torch.float32))
    with pytest.raises(KernelError, match=r"queries: torch\.bfloat16 on cpu: must be torch\.float32 on cpu"):
        select_rows(index, torch.zeros(1, KV_HEADS, 64, dtype=torch.bfloat16), [0])
