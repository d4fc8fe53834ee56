"""ParisKV's compiled kernels against its PyTorch reference: the index they write, the rows they choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plugins.index_cases import (
    KV_HEADS,
    check_batch_order_and_threads,
    extend,
    keys_of_slots,
    native_context,
    select_rows,
)
from torch import Tensor

from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.errors import KernelError
from kvseek.plugins.group import best_positions, softmax_mean
from kvseek.plugins.pariskv import codebook, method, reference
from kvseek.plugins.pariskv.config import GROUP_REDUCTIONS, Config, ScheduleStep
from kvseek.plugins.pariskv.native import NativeIndex
from kvseek.plugins.pariskv.reference import ReferenceIndex

EFFORT = (ScheduleStep(None, 0.3, 0.25),)
NO_RERANK = (ScheduleStep(None, 0.3, 1e-9),)  # as many candidates as rows: the choice is the votes' alone


make_context = partial(native_context, method.traits)


def make_pair(
    library: CpuLibrary, config: Config, group: int, dim: int, keys: Sequence[Tensor]
) -> tuple[ReferenceIndex, NativeIndex]:
    """The same keys [G, n, D] per slot in both indexes; the native arrays start poisoned."""
    lengths = [part.shape[1] for part in keys]
    expected = ReferenceIndex(make_context(None, config, group, dim, lengths, keys[0].dtype))
    found = NativeIndex(make_context(library, config, group, dim, lengths, keys[0].dtype))
    found.ids.fill_(255)
    found.codes.fill_(255)
    found.weights.fill_(float("nan"))
    found.counts.fill_(-7)
    for slot, part in enumerate(keys):
        expected.build(slot, part, part)
        found.build(slot, part, part)
    return expected, found


def check_index(expected: ReferenceIndex, found: NativeIndex) -> None:
    assert torch.equal(found.counts, expected.counts)
    for slot, n in enumerate(expected.context.lengths):
        ids, codes, weights = (
            [index.context.extents.read(getattr(index, name), slot, n) for index in (expected, found)]
            for name in ("ids", "codes", "weights")
        )
        assert torch.equal(ids[1], ids[0])
        nibbles = [codebook.unpack_nibbles(part).int() for part in codes]
        assert torch.equal(nibbles[1] & 8, nibbles[0] & 8)
        steps = ((nibbles[1] & 7) - (nibbles[0] & 7)).abs()
        assert not bool((steps > 1).any())
        assert int((steps > 0).sum()) <= max(1, steps.numel() // 10_000)  # a magnitude within rounding of a threshold
        torch.testing.assert_close(weights[1], weights[0], rtol=2e-3, atol=1e-7)


def share_index(expected: ReferenceIndex, found: NativeIndex) -> None:
    """Let both search the same arrays, so that only the search is compared."""
    for slot, n in enumerate(expected.context.lengths):
        for name in ("ids", "codes", "weights"):
            rows = expected.context.extents.read(getattr(expected, name), slot, n)
            found.context.extents.write(getattr(found, name), slot, 0, rows)


def values_of(index: ReferenceIndex, queries: Tensor, slot: int) -> Tensor:
    """What the rerank ranks: [G, n], -inf for keys that are no candidates. queries [G, g, D]."""
    config, n, extents = index.config, index.context.lengths[slot], index.context.extents
    rho, beta = config.schedule(n)
    lanes = index.lanes(queries)
    tiers = reference.tier_table(lanes, index.counts[slot], math.ceil(rho * n))
    votes = reference.collision_scores(tiers, extents.read(index.ids, slot, n))
    candidates = best_positions(votes, min(n, max(config.top_k, math.ceil(beta * n))))
    codes = reference.take_rows(extents.read(index.codes, slot, n), candidates)
    weights = reference.take_rows(extents.read(index.weights, slot, n), candidates)
    estimates = reference.estimate_scores(lanes, codes, weights, index.levels)
    of_mean = config.group_reduce == "mean"
    values = estimates[:, 0] if of_mean else softmax_mean(estimates, index.context.scaling)
    return torch.full((len(queries), n), -math.inf).scatter(1, candidates, values)


def check_choice(expected: ReferenceIndex, found: NativeIndex, queries: Tensor, slots: Sequence[int]) -> None:
    """The same rows, but for keys whose values differ from the last one taken by rounding."""
    wanted, chosen = select_rows(expected, queries, slots), select_rows(found, queries, slots)
    assert (chosen.rows.dtype, chosen.page) == (torch.int32, 1)
    for request, slot in enumerate(slots):
        if expected.context.lengths[slot] <= expected.config.top_k:
            assert torch.equal(chosen.rows[request], wanted.rows[request])
            continue
        values = values_of(expected, queries[request].unflatten(0, (KV_HEADS, -1)), slot)
        for head in range(KV_HEADS):
            ours, theirs = chosen.rows[request, head].tolist(), wanted.rows[request, head].tolist()
            assert ours == sorted(set(ours))
            last = values[head, theirs].min()
            for place in set(ours) ^ set(theirs):
                torch.testing.assert_close(values[head, place], last, rtol=1e-5, atol=1e-5 * float(values[head].max()))


@pytest.mark.parametrize("dim", [8, 20, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_encoding_equals_the_reference(library: CpuLibrary, level: int, dtype: torch.dtype, dim: int) -> None:
    torch.manual_seed(dim)
    keys = keys_of_slots([1500, 0, 1], dim, dtype)
    keys[0][:, 7] = 0  # a key without a direction
    keys[0][:, 8] *= 1e6  # and one whose weights float16 cannot hold
    check_index(*make_pair(library, Config(), 1, dim, keys))


def test_keys_appended_equal_keys_built_at_once(library: CpuLibrary) -> None:
    torch.manual_seed(0)
    keys = keys_of_slots([2300], 64)
    expected, found = make_pair(library, Config(), 1, 64, keys)
    found.context.lengths[0] = 0
    found.build(0, keys[0][:, :0], keys[0])
    for start in range(0, 2300, 256):
        extend(found, 0, keys[0][:, start : start + 256])
    check_index(expected, found)


SHAPES = [
    (16, 2, torch.bfloat16),
    (64, 3, torch.float32),
    (96, 7, torch.bfloat16),
    (128, 1, torch.float32),
    (256, 16, torch.float32),
]


@pytest.mark.parametrize("steps", [EFFORT, NO_RERANK], ids=["rerank", "no_rerank"])
@pytest.mark.parametrize("group_reduce", GROUP_REDUCTIONS)
@pytest.mark.parametrize(("dim", "group", "dtype"), SHAPES)
def test_selection_equals_the_reference(
    library: CpuLibrary,
    dim: int,
    group: int,
    dtype: torch.dtype,
    group_reduce: str,
    steps: tuple[ScheduleStep, ...],
) -> None:
    torch.manual_seed(group)
    lengths = [1500, 1, 3000 if dim < 256 else 200, 100]
    config = Config(top_k=100, group_reduce=group_reduce, schedule_steps=steps)
    expected, found = make_pair(library, config, group, dim, keys_of_slots(lengths, dim, dtype))
    share_index(expected, found)
    queries = torch.randn(4, KV_HEADS * group, dim).to(dtype)
    check_choice(expected, found, queries, [2, 0, 3, 1])


@pytest.mark.parametrize(("dim", "group", "dtype"), SHAPES)
def test_every_level_selects_as_the_reference(
    library: CpuLibrary, level: int, dim: int, group: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(dim)
    config = Config(top_k=30, schedule_steps=EFFORT)
    expected, found = make_pair(library, config, group, dim, keys_of_slots([1100 if dim < 256 else 300], dim, dtype))
    share_index(expected, found)
    check_choice(expected, found, torch.randn(1, KV_HEADS * group, dim).to(dtype), [0])


@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(1, 400),
    top_k=st.integers(1, 60),
    group=st.integers(1, 9),
    rho=st.floats(0.001, 1),
    seed=st.integers(0, 2**31),
)
def test_ties_are_cut_as_the_reference_cuts_them(
    library: CpuLibrary, n: int, top_k: int, group: int, rho: float, seed: int
) -> None:
    """Sparse small integers: equal centroid scores, equal votes, whole blocks of zeros."""
    torch.manual_seed(seed)
    config = Config(top_k=top_k, schedule_steps=(ScheduleStep(None, rho, 1e-9),))
    keys = [torch.randint(-1, 2, (KV_HEADS, n, 64)).float()]
    expected, found = make_pair(library, config, group, 64, keys)
    share_index(expected, found)
    queries = torch.randint(-1, 2, (1, KV_HEADS * group, 64)).float() * (torch.rand(1, 1, 64) < 0.1)
    assert torch.equal(select_rows(found, queries, [0]).rows, select_rows(expected, queries, [0]).rows)


def test_selection_does_not_depend_on_batch_order_or_threads(library: CpuLibrary) -> None:
    torch.manual_seed(3)
    _, found = make_pair(library, Config(top_k=20), 3, 64, keys_of_slots([900, 2100, 1300], 64))
    check_batch_order_and_threads(found)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 0.0])
def test_strange_queries_still_give_valid_rows(library: CpuLibrary, level: int, poison: float) -> None:
    _, found = make_pair(library, Config(top_k=20), 3, 64, keys_of_slots([900], 64))
    rows = select_rows(found, torch.full((1, 3 * KV_HEADS, 64), poison), [0]).rows
    assert int(rows.min()) >= 0
    assert int(rows.max()) < 900
    assert bool((rows.diff() > 0).all())


def test_create_follows_the_library(library: CpuLibrary) -> None:
    for given_library, kind in ((library, NativeIndex), (None, ReferenceIndex)):
        assert type(method.create(make_context(given_library, Config(), 1, 64, [10], torch.float32))) is kind


def test_unsupported_inputs_are_refused(library: CpuLibrary) -> None:
    with pytest.raises(KernelError, match=r"num_heads / num_kv_heads = 17: must be at most 16; .*--kernels reference"):
        NativeIndex(make_context(library, Config(), 17, 64, [10], torch.float32))
    with pytest.raises(KernelError, match="head_dim = 264"):
        NativeIndex(make_context(library, Config(), 1, 264, [10], torch.float32))
    index = NativeIndex(make_context(library, Config(), 1, 64, [10], torch.float32))
    with pytest.raises(KernelError, match=r"queries: torch\.bfloat16 on cpu: must be torch\.float32 on cpu"):
        select_rows(index, torch.zeros(1, KV_HEADS, 64, dtype=torch.bfloat16), [0])
