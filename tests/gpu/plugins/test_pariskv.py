"""ParisKV's CUDA kernels against the PyTorch reference: codes, votes, candidates, estimates, rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from tests.gpu.plugins import gpu_context
from tests.gpu.plugins.gpu_context import check_shared_extents
from tests.plugins.index_cases import KV_HEADS, select_rows
from torch import Tensor

from kvseek.core.extents import extents_for
from kvseek.plugins.pariskv.config import GROUP_REDUCTIONS, Config, ScheduleStep
from kvseek.plugins.pariskv.device import CudaIndex
from kvseek.plugins.pariskv.reference import (
    ReferenceIndex,
    collision_scores,
    estimate_scores,
    take_rows,
    tier_table,
)
from kvseek.plugins.ranking import best_positions, softmax_mean

pytestmark = pytest.mark.gpu

SHAPES = [(*shape, "mean" if shape[2] in (2, 7) else "softmax_mean") for shape in gpu_context.SHAPES]
EFFORT = (ScheduleStep(None, 0.3, 0.25),)


make_context = partial(gpu_context.make_context, "pariskv")


def make_pair(
    config: Config, dtype: str, dim: int, group: int, lengths: Sequence[int]
) -> tuple[ReferenceIndex, CudaIndex]:
    """The same keys in a reference on the CPU and in the index on the GPU, whose arrays start poisoned."""
    keys = gpu_context.keys_of_slots(lengths, dim, dtype)
    expected = ReferenceIndex(make_context(config, dtype, dim, group, lengths, "cpu"))
    found = CudaIndex(make_context(config, dtype, dim, group, lengths, "cuda"))
    poison(found)
    for slot, part in enumerate(keys):
        expected.build(slot, part, part)
        found.build(slot, part.cuda(), part.cuda())
    return expected, found


def poison(index: CudaIndex) -> None:
    for array in (index.ids, index.codes, index.workspace.scores):
        array.fill_(255)
    for array in (index.counts, index.workspace.candidates, index.workspace.keys):
        array.fill_(-7)
    index.weights.fill_(float("nan"))
    index.workspace.estimates.fill_(float("nan"))


def region(index: ReferenceIndex | CudaIndex, array: Tensor, slot: int) -> Tensor:
    """The places of a slot in an array of extents, on the CPU."""
    return index.context.extents.read(array, slot, index.context.lengths[slot]).cpu()


def scratch(array: Tensor, first: int, length: int) -> Tensor:
    """What a selection has written for a region that begins at a scratch extent: [G, length, ...] on the CPU."""
    return array[first : first + extents_for(length)].transpose(0, 1).flatten(1, 2)[:, :length].cpu()


@pytest.mark.parametrize(("dtype", "dim", "group", "reduce"), SHAPES)
def test_keys_are_encoded_as_by_the_reference(dtype: str, dim: int, group: int, reduce: str) -> None:
    torch.manual_seed(dim + group)
    expected, found = make_pair(Config(group_reduce=reduce), dtype, dim, group, [1, 1023, 1025, 5000])
    for slot in range(4):
        for name in ("ids", "codes"):
            want = region(expected, getattr(expected, name), slot)
            have = region(found, getattr(found, name), slot)
            assert torch.equal(want, have), f"{name} of slot {slot}: {(want != have).sum()} differ"
        want, have = region(expected, expected.weights, slot), region(found, found.weights, slot)
        assert (want.view(torch.int16) - have.view(torch.int16)).abs().max() <= 1, "one unit in the last place"
    assert torch.equal(expected.counts, found.counts.cpu())


def test_zero_and_huge_keys() -> None:
    config = Config()
    expected = ReferenceIndex(make_context(config, "float32", 64, 1, [70], "cpu"))
    found = CudaIndex(make_context(config, "float32", 64, 1, [70], "cuda"))
    keys = torch.randn(KV_HEADS, 70, 64)
    keys[:, 3] = 0
    keys[:, 4] *= 1e6
    keys[0, 5, :32] = 0
    expected.build(0, keys, keys)
    found.build(0, keys.cuda(), keys.cuda())
    for name in ("ids", "codes", "weights"):
        assert torch.equal(region(expected, getattr(expected, name), 0), region(found, getattr(found, name), 0))


@pytest.mark.parametrize("lengths", [[101, 1], [5000, 1024, 1025], [70_000, 3]], ids=str)
@pytest.mark.parametrize(("dtype", "dim", "group", "reduce"), SHAPES)
def test_selection(dtype: str, dim: int, group: int, reduce: str, lengths: list[int]) -> None:
    torch.manual_seed(dim + group + len(lengths))
    config = Config(group_reduce=reduce, schedule_steps=EFFORT)
    expected, found = make_pair(config, dtype, dim, group, lengths)
    queries = (3 * torch.randn(len(lengths), KV_HEADS * group, dim)).to(getattr(torch, dtype))
    slots = list(reversed(range(len(lengths))))
    selection = select_rows(found, queries.cuda(), slots)
    first = 0
    for request, slot in enumerate(slots):
        check_request(expected, found, queries[request], slot, selection.rows[request].cpu(), first)
        first += extents_for(lengths[slot])


def check_request(
    expected: ReferenceIndex, found: CudaIndex, queries: Tensor, slot: int, rows: Tensor, first: int = 0
) -> None:
    """Against the reference, and what the kernels left in the scratch extents from `first` on."""
    config, n = expected.config, expected.context.lengths[slot]
    lanes = expected.lanes(queries.view(KV_HEADS, -1, queries.shape[-1]))
    budget, count = found.budget(n).method_fields
    ids = region(expected, expected.ids, slot)
    votes = collision_scores(tier_table(lanes, expected.counts[slot], budget), ids)
    if n > config.top_k:
        scores = scratch(found.workspace.scores, first, n).int()
        assert torch.equal(votes, scores), f"{(votes != scores).sum()} of {n} votes differ"
    candidates = best_positions(votes, count)
    have = scratch(found.workspace.candidates, first, n)[:, :count].long()
    assert torch.equal(candidates, have)
    codes = take_rows(region(expected, expected.codes, slot), candidates)
    weights = take_rows(region(expected, expected.weights, slot), candidates)
    estimates = estimate_scores(lanes, codes, weights, expected.levels)
    close = scratch(found.workspace.estimates, first, n)[:, :count].transpose(1, 2)
    error = (close - estimates).norm() / estimates.norm()
    assert error < 1e-3, f"estimates differ by {error:.2e}"
    # From the kernel's own estimates, the choice is exact up to keys whose values agree to rounding.
    of_mean = config.group_reduce == "mean"
    values = close[:, 0] if of_mean else softmax_mean(close, expected.context.scaling)
    kept = min(n, config.top_k)
    assert (rows[:, kept:] == -1).all()
    assert (rows[:, :kept].diff(dim=-1) > 0).all(), "rows ascend"
    chosen = torch.zeros_like(values, dtype=torch.bool)
    for head in range(KV_HEADS):
        places = torch.searchsorted(candidates[head], rows[head, :kept].long())
        assert torch.equal(candidates[head][places], rows[head, :kept].long()), "rows are candidates"
        chosen[head, places] = True
    smallest = torch.where(chosen, values, torch.inf).amin(dim=-1)
    largest = torch.where(chosen, -torch.inf, values).amax(dim=-1)
    scale = values.abs().amax(dim=-1)
    assert (largest <= smallest + 1e-5 * scale).all()


def test_evicted_keys_become_visible_when_they_are_published() -> None:
    config = Config(schedule_steps=EFFORT)
    old, new = 1000, 256
    keys = gpu_context.keys_of_slots([old + new], 128, "bfloat16")[0]
    found = CudaIndex(make_context(config, "bfloat16", 128, 4, [old], "cuda", room=new))
    found.build(0, keys[:, :old].cuda(), keys.cuda())
    queries = torch.randn(1, KV_HEADS * 4, 128, dtype=torch.bfloat16, device="cuda")
    before = select_rows(found, queries, [0]).rows
    found.append(0, old, keys[:, old:].cuda())
    assert torch.equal(select_rows(found, queries, [0]).rows, before)
    found.publish(0, old, new)
    found.context.lengths[0] = old + new
    whole = CudaIndex(make_context(config, "bfloat16", 128, 4, [old + new], "cuda"))
    whole.build(0, keys.cuda(), keys.cuda())
    assert torch.equal(select_rows(found, queries, [0]).rows, select_rows(whole, queries, [0]).rows)
    assert torch.equal(found.counts, whole.counts)


@pytest.mark.parametrize("reduce", GROUP_REDUCTIONS)
def test_many_candidates_are_ranked_by_several_blocks(reduce: str) -> None:
    """All keys are candidates: the last kernel works in two rounds, and the choice is that of one sort."""
    torch.manual_seed(5)
    config = Config(group_reduce=reduce, top_k=300, schedule_steps=(ScheduleStep(None, 1.0, 1.0),))
    n = 100_000
    expected, found = make_pair(config, "bfloat16", 128, 4, [n])
    queries = torch.randn(1, KV_HEADS * 4, 128, dtype=torch.bfloat16)
    rows = select_rows(found, queries.cuda(), [0]).rows[0].cpu()
    check_request(expected, found, queries[0], 0, rows)
    assert math.ceil(n / 16) > 4096, "several blocks had a share"


@pytest.mark.parametrize("top_k", [100, 1500])
def test_equal_keys_are_taken_in_order(top_k: int) -> None:
    """Every vote and every estimate is the same: the first candidates, and of those the first rows."""
    config = Config(top_k=top_k, schedule_steps=(ScheduleStep(None, 0.2, 0.9),))
    n = 30_000
    found = CudaIndex(make_context(config, "bfloat16", 128, 4, [n], "cuda"))
    keys = torch.randn(KV_HEADS, 1, 128, dtype=torch.bfloat16, device="cuda").expand(-1, n, -1).contiguous()
    found.build(0, keys, keys)
    queries = torch.randn(1, KV_HEADS * 4, 128, dtype=torch.bfloat16, device="cuda")
    rows = select_rows(found, queries, [0]).rows[0].cpu()
    assert torch.equal(rows, torch.arange(top_k, dtype=torch.int32).expand(KV_HEADS, -1))


def test_a_long_list_is_taken_too() -> None:
    """More rows than the quick way takes: digit after digit."""
    torch.manual_seed(7)
    config = Config(top_k=1200, schedule_steps=(ScheduleStep(None, 0.3, 0.5),))
    expected, found = make_pair(config, "bfloat16", 128, 4, [50_000])
    queries = torch.randn(1, KV_HEADS * 4, 128, dtype=torch.bfloat16)
    check_request(expected, found, queries[0], 0, select_rows(found, queries.cuda(), [0]).rows[0].cpu())


@pytest.mark.parametrize("shape", [("bfloat16", 128, 4), ("float32", 64, 2)])
def test_slots_may_share_extents(shape: tuple[str, int, int]) -> None:
    check_shared_extents("pariskv", Config(schedule_steps=EFFORT), shape, CudaIndex)
