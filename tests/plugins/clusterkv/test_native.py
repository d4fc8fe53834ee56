"""ClusterKV's compiled kernel against the PyTorch reference: the rows it chooses from the same clusters and codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.reference.codes import stores
from tests.plugins.index_cases import (
    KV_HEADS,
    check_batch_order_and_threads,
    extend,
    keys_of_slots,
    native_context,
    select,
    select_rows,
)
from torch import Tensor

from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.errors import KernelError
from kvseek.core.index_context import IndexContext
from kvseek.kernels.reference.codes.key_codes import estimate_at, round_lanes
from kvseek.kernels.reference.codes.rotation import rotate
from kvseek.kernels.reference.codes.store import CodeStore
from kvseek.plugins.clusterkv import method
from kvseek.plugins.clusterkv.config import Config
from kvseek.plugins.clusterkv.native import NativeIndex
from kvseek.plugins.clusterkv.reference import ReferenceIndex
from kvseek.plugins.group import softmax_mean

# The kernel's arrays, each with what fills the entries that nothing has written.
POISON: dict[str, float] = {
    "centroids": float("nan"),
    "sizes": 10**9,
    "starts": 10**9,
    "spreads": float("nan"),
    "places": -(10**9),
}
SPREAD = 3.0


def make_context(
    library: CpuLibrary | None, config: Config, group: int, dim: int, lengths: Sequence[int], dtype: torch.dtype
) -> IndexContext:
    context = native_context(method.traits, library, config, group, dim, lengths, dtype)
    return replace(context, layer=config.dense_layers)


def arrays(index: ReferenceIndex) -> dict[str, Tensor]:
    """What a selection reads beside codes, all of it poisoned or written."""
    return {name: getattr(index, name) for name in (*POISON, "clusters")}


def make_pair(
    library: CpuLibrary, config: Config, group: int, dim: int, keys: Sequence[Tensor]
) -> tuple[ReferenceIndex, NativeIndex]:
    """The same keys [G, n, D] per slot in both indexes, with the reference's clusters and codes; the rest is poisoned."""
    lengths = [part.shape[1] for part in keys]
    expected = ReferenceIndex(make_context(None, config, group, dim, lengths, keys[0].dtype))
    found = NativeIndex(make_context(library, config, group, dim, lengths, keys[0].dtype))
    for name, value in POISON.items():
        arrays(expected)[name].fill_(value)
    if expected.codes:
        stores.poison(expected.codes)
    for slot, part in enumerate(keys):
        expected.build(slot, part, part)
    for name, array in arrays(found).items():
        array.copy_(arrays(expected)[name])
    if expected.codes and found.codes:
        stores.copy(expected.codes, found.codes)
    return expected, found


def values_of(index: ReferenceIndex, codes: CodeStore, queries: Tensor, slot: int) -> list[dict[int, float]]:
    """For each KV head what the rows of the best clusters are ranked by: queries [H, D] to value by place."""
    n, config = index.context.lengths[slot], index.config
    grouped = queries.unflatten(0, (KV_HEADS, -1))
    places = index.candidates(grouped, slot, n)[:, : min(n, config.rows_of_clusters)].long()
    lanes = round_lanes(rotate(grouped.float(), codes.signs))
    estimates = estimate_at(codes.read(slot, n), places, lanes)
    values = softmax_mean(estimates, index.context.scaling)
    return [dict(zip(*pair, strict=True)) for pair in zip(places.tolist(), values.tolist(), strict=True)]


def check_choice(expected: ReferenceIndex, found: NativeIndex, queries: Tensor, slots: Sequence[int]) -> None:
    """The same rows in the same order, but for those whose value differs from the last one's by rounding."""
    wanted, chosen = select_rows(expected, queries, slots), select_rows(found, queries, slots)
    assert (chosen.rows.dtype, chosen.page) == (torch.int32, 1)
    for request, slot in enumerate(slots):
        ours, theirs = chosen.rows[request], wanted.rows[request]
        if expected.context.lengths[slot] <= expected.config.top_k:
            assert torch.equal(ours.sort().values, theirs.sort().values)
        elif expected.codes is None:
            assert torch.equal(ours, theirs)
        else:
            values = values_of(expected, expected.codes, queries[request], slot)
            for head, value_of in enumerate(values):
                check_head(ours[head].tolist(), theirs[head].tolist(), value_of)


def check_head(ours: list[int], theirs: list[int], value_of: dict[int, float]) -> None:
    assert len(set(ours)) == len(theirs)
    order = {place: number for number, place in enumerate(value_of)}  # KeyError below: a row of no cluster taken
    assert ours == sorted(ours, key=lambda place: order[place])
    last = min(value_of[place] for place in theirs)
    for place in set(ours) ^ set(theirs):
        assert value_of[place] == pytest.approx(last, rel=1e-5, abs=1e-5 * max(value_of.values()))


SHAPES = [
    (8, 2, torch.float32),
    (20, 2, torch.bfloat16),
    (64, 3, torch.float32),
    (96, 7, torch.bfloat16),
    (128, 1, torch.float32),
    (256, 16, torch.float32),
]
# Whole clusters, codes of few and of many candidates, and candidates beyond the shorter regions.
RANKINGS: list[dict[str, Any]] = [
    {"rerank_bits": 0, "spread_weight": 0.0},
    {"rerank_bits": 0},
    {"rerank_bits": 2, "candidates": 8},
    {"rerank_bits": 2, "candidates": 3, "spread_weight": 0.0},
    {"rerank_bits": 2, "candidates": 1},
]


@pytest.mark.parametrize("ranking", RANKINGS)
@pytest.mark.parametrize(("dim", "group", "dtype"), SHAPES)
def test_selection_equals_the_reference(
    library: CpuLibrary, dim: int, group: int, dtype: torch.dtype, ranking: dict[str, Any]
) -> None:
    torch.manual_seed(group)
    lengths = [1500, 1, 3000 if dim < 256 else 200, 100]
    config = Config(**{"top_k": 100, "spread_weight": SPREAD, "iterations": 2, **ranking})
    expected, found = make_pair(library, config, group, dim, keys_of_slots(lengths, dim, dtype))
    check_choice(expected, found, torch.randn(4, KV_HEADS * group, dim).to(dtype), [2, 0, 3, 1])


@pytest.mark.parametrize("ranking", RANKINGS[1:4])
@pytest.mark.parametrize(("dim", "group", "dtype"), SHAPES)
def test_every_level_selects_as_the_reference(
    library: CpuLibrary, level: int, dim: int, group: int, dtype: torch.dtype, ranking: dict[str, Any]
) -> None:
    torch.manual_seed(dim)
    config = Config(**{"top_k": 30, "spread_weight": SPREAD, "iterations": 2, **ranking})
    expected, found = make_pair(library, config, group, dim, keys_of_slots([3100 if dim < 256 else 300], dim, dtype))
    check_choice(expected, found, torch.randn(1, KV_HEADS * group, dim).to(dtype), [0])


@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(1, 2000),
    top_k=st.integers(1, 60),
    group=st.integers(1, 9),
    candidates=st.integers(1, 9),
    distinct=st.integers(1, 40),
    per_cluster=st.integers(1, 50),
    seed=st.integers(0, 2**31),
)
def test_ties_are_cut_as_the_reference_cuts_them(
    library: CpuLibrary, n: int, top_k: int, group: int, candidates: int, distinct: int, per_cluster: int, seed: int
) -> None:
    """Few distinct keys, so that rows tie and clusters are empty; and no query at all, so that everything ties."""
    torch.manual_seed(seed)
    config = Config(
        top_k=top_k,
        candidates=candidates,
        tokens_per_cluster=per_cluster,
        rerank_bits=2,
        spread_weight=SPREAD,
        iterations=2,
    )
    keys = torch.randn(KV_HEADS, distinct, 64)[:, torch.randint(distinct, (n,)).sort().values]
    expected, found = make_pair(library, config, group, 64, [keys])
    check_choice(expected, found, torch.randn(1, KV_HEADS * group, 64), [0])
    nothing = torch.zeros(1, KV_HEADS * group, 64)
    if n > top_k:
        assert torch.equal(select_rows(found, nothing, [0]).rows, select_rows(expected, nothing, [0]).rows)


def test_evictions_are_found(library: CpuLibrary) -> None:
    """Keys that join the last cluster, and clusters of generated tokens across the border of an extent."""
    torch.manual_seed(2)
    config = Config(top_k=40, candidates=4, rerank_bits=2, spread_weight=SPREAD)
    keys = keys_of_slots([1700], 64)[0]
    pair = [
        kind(make_context(given_library, config, 3, 64, [900], torch.float32))
        for kind, given_library in ((ReferenceIndex, None), (NativeIndex, library))
    ]
    expected, found = pair
    for index in pair:
        index.context.extents.reserve(0, 1700)
        index.build(0, keys[:, :900], keys)
        for start, count in ((900, 320), (1220, 5), (1225, 100), (1325, 320), (1645, 55)):
            extend(index, 0, keys[:, start : start + count])
    assert isinstance(found, NativeIndex)
    for name, array in arrays(found).items():
        array.copy_(arrays(expected)[name])  # a code at the border of two cells may differ
    check_choice(expected, found, torch.randn(1, 3 * KV_HEADS, 64), [0])


def test_selection_does_not_depend_on_batch_order_or_threads(library: CpuLibrary) -> None:
    torch.manual_seed(3)
    config = Config(top_k=20, candidates=40, rerank_bits=2, spread_weight=SPREAD)
    _, found = make_pair(library, config, 3, 64, keys_of_slots([900, 3100, 1300], 64))
    check_batch_order_and_threads(found)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("bits", [0, 2])
def test_strange_queries_still_give_valid_rows(library: CpuLibrary, level: int, poison: float, bits: int) -> None:
    config = Config(top_k=20, candidates=4, rerank_bits=bits, spread_weight=SPREAD)
    _, found = make_pair(library, config, 3, 64, keys_of_slots([3000], 64))
    check_valid(select_rows(found, torch.full((1, 3 * KV_HEADS, 64), poison), [0]).rows, 20, 3000)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_strange_keys_still_give_valid_rows(library: CpuLibrary, level: int, poison: float) -> None:
    config = Config(top_k=20, candidates=4, rerank_bits=2, spread_weight=SPREAD)
    found = NativeIndex(make_context(library, config, 3, 64, [900], torch.float32))
    keys = keys_of_slots([900], 64)[0]
    keys[:, 5] = poison
    found.build(0, keys, keys)
    check_valid(select_rows(found, torch.randn(1, 3 * KV_HEADS, 64), [0]).rows, 20, 900)


def check_valid(rows: Tensor, top_k: int, n: int) -> None:
    for head in rows.flatten(0, 1).tolist():
        assert len(set(head)) == top_k
        assert 0 <= min(head) <= max(head) < n


def test_create_follows_the_library(library: CpuLibrary) -> None:
    for given_library, kind in ((library, NativeIndex), (None, ReferenceIndex)):
        assert type(method.create(make_context(given_library, Config(), 1, 64, [10], torch.float32))) is kind


def test_dense_layers_select_nothing(library: CpuLibrary) -> None:
    context = make_context(library, Config(), 1, 64, [10], torch.float32)
    index = NativeIndex(replace(context, layer=0))
    assert select(index, torch.zeros(1, KV_HEADS, 64), [0]) is None


def test_unsupported_queries_are_refused(library: CpuLibrary) -> None:
    index = NativeIndex(make_context(library, Config(), 1, 64, [10], torch.float32))
    with pytest.raises(KernelError, match=r"queries: torch\.bfloat16 on cpu: must be torch\.float32 on cpu"):
        select_rows(index, torch.zeros(1, KV_HEADS, 64, dtype=torch.bfloat16), [0])


@pytest.mark.parametrize("bits", [0, 2])
def test_unsupported_shapes_are_refused(library: CpuLibrary, bits: int) -> None:
    config = Config(rerank_bits=bits, spread_weight=0.0, candidates=4)
    with pytest.raises(KernelError, match=r"native .*: head_dim = 264: must be at most 256; build the engine with"):
        NativeIndex(make_context(library, config, 1, 264, [10], torch.float32))
