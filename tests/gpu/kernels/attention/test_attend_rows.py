"""Where the attention kernel of the GPU finds rows and keeps copies: places in any order, hot rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.gpu.conftest import MakeKernels
from tests.gpu.kernels.attention.attention_runs import (
    ENTRIES,
    KV_HEADS,
    check,
    make_attention,
    make_queries,
    run,
)
from tests.gpu.kernels.attention.random_cache import POISON, RandomCache
from torch import Tensor

from kvseek.kernels.cuda.attention.hot_rows import NO_FRAME

pytestmark = pytest.mark.gpu


def scattered(rows: Tensor, entries: int) -> Tensor:
    """The same rows in another order among more entries, the others -1."""
    wide = torch.full((*rows.shape[:2], entries), -1, dtype=torch.int32, device=rows.device)
    wide[..., : rows.shape[2]] = rows
    order = torch.rand(wide.shape, device=rows.device).argsort(-1)
    return wide.gather(-1, order)


GAP_SHAPES = [("bfloat16", 128, 4), ("float16", 96, 3), ("bfloat16", 256, 11), ("float32", 128, 5), ("float32", 96, 13)]


@pytest.mark.parametrize("host_rows", [False, True], ids=["device", "host"])
@pytest.mark.parametrize(("dtype", "dim", "group"), GAP_SHAPES)
def test_places_in_any_order_with_gaps(
    dtype: str, dim: int, group: int, host_rows: bool, kernels: MakeKernels, device: torch.device
) -> None:
    """Scattered places and pages; some lists are empty, one request attends to its window alone, one to all rows."""
    torch.manual_seed(7)
    lengths, entries = (3000, 1500, 40, 2048), 600
    cache = RandomCache(
        lengths, kv_heads=KV_HEADS, dim=dim, dtype=getattr(torch, dtype), device=device, host_rows=host_rows
    )
    requests = [cache.request(slot, 16, 3, 60, 76 + slot, slot == 1) for slot in range(4)] + [cache.padding()]
    few, many = cache.select(requests, 250), cache.select(requests, entries)
    lists = [scattered(few, entries), scattered(many, entries), cache.pages(requests, entries, 32)]
    for kept_steps in (0, 1):
        attention = make_attention(kernels, cache, group, entries, kept_steps)
        for selected in lists:
            selected[3] = -1
            selected[0, 1] = -1
            selected[1] = 2**30  # dense: must not be read
            check(attention, cache, group, requests, selected)
            check(attention, cache, group, requests[3:], selected[3:].contiguous())


@pytest.mark.parametrize(("dtype", "dim", "group"), GAP_SHAPES)
def test_log_sum_exp(dtype: str, dim: int, group: int, kernels: MakeKernels, device: torch.device) -> None:
    torch.manual_seed(9)
    cache = RandomCache((3000, 1500, 0, 700), kv_heads=KV_HEADS, dim=dim, dtype=getattr(torch, dtype), device=device)
    requests = [cache.request(slot, 16, 3, 60, 76 + slot, slot == 1) for slot in range(4)]
    requests[2] = cache.request(2, 0, 0, 0, 0, True)  # without any row
    selected = scattered(cache.select(requests, 300), 400)
    attention = make_attention(kernels, cache, group, 400)
    queries = make_queries(cache, 4, group)
    for rows in (selected, None):
        lse = torch.full(queries.shape[:2], POISON, device=device)
        run(attention, cache, queries, requests, rows, lse)
        expected = cache.expected_lse(queries, requests, rows, dim**-0.5)
        assert torch.isinf(lse[2]).all()
        assert (lse[2] < 0).all()
        finite = [0, 1, 3]
        torch.testing.assert_close(lse[finite].cpu(), expected[finite], rtol=0, atol=2e-3)


def drift(selected: Tensor, length: int, share: float) -> Tensor:
    """Replace about `share` of the places of a selection, which stays ascending and without repetition."""
    changed = selected.clone()
    for rows in changed.view(-1, changed.shape[-1]):
        kept = rows[rows >= 0]
        kept = kept[torch.rand(len(kept), device=kept.device) > share]
        free = torch.ones(length, dtype=torch.bool, device=kept.device)
        free[kept.long()] = False
        candidates = free.nonzero().flatten()
        count = int((rows >= 0).sum()) - len(kept)
        fresh = candidates[torch.randperm(len(candidates), device=kept.device)[:count]]
        merged = torch.cat((kept, fresh.int())).sort().values
        rows.fill_(-1)[: len(merged)] = merged
    return changed


@pytest.mark.parametrize("kept_steps", [1, 3])
@pytest.mark.parametrize(("dtype", "dim", "group"), [("bfloat16", 128, 4), ("bfloat16", 256, 11), ("float32", 128, 13)])
@pytest.mark.parametrize("entries", [5, ENTRIES, 300])
def test_hot_rows_change_nothing_but_where_rows_come_from(
    dtype: str, dim: int, group: int, entries: int, kept_steps: int, kernels: MakeKernels, device: torch.device
) -> None:
    """Selections drift. Rows of the last steps are found, whatever their order; all others are read from the pool."""
    torch.manual_seed(4)
    lengths = (3000, 1500, 40)  # the last has fewer rows than entries
    cache = RandomCache(lengths, kv_heads=KV_HEADS, dim=dim, dtype=getattr(torch, dtype), device=device, host_rows=True)
    warm = make_attention(kernels, cache, group, entries, kept_steps)
    cold = make_attention(kernels, cache, group, entries, 0)
    assert warm.hot is not None
    requests = [cache.request(slot, 16, 3, 60, 76 + slot, False) for slot in range(3)]
    selected = cache.select(requests, entries)
    kept: dict[int, list[Tensor]] = {slot: [] for slot in range(3)}
    for step in range(8):
        batch = [
            replace(request, position=request.position + step, dense=request.slot == 1 and step == 5)
            for request in requests
            if not (request.slot == 2 and step == 4)  # not in every batch
        ]
        rows = scattered(selected[[request.slot for request in batch]], entries)
        queries = make_queries(cache, len(batch), group)
        warm.hot.hits.zero_()
        found = run(warm, cache, queries, batch, rows)
        assert torch.equal(found, run(cold, cache, queries, batch, rows)), step
        for request, own in zip(batch, rows, strict=True):
            hits = warm.hot.hits[request.slot]
            if request.dense:
                assert not hits.any(), "nothing is selected"
                continue
            # Once a slot has left a step out, the step's buffer holds older rows instead: then this bound holds.
            gap, earlier = step > 3 and request.slot > 0, kept[request.slot]
            for head in range(KV_HEADS):
                places = own[head][own[head] >= 0]
                before = torch.cat([rows[head] for rows in (earlier if gap else earlier[-kept_steps:])] or [places[:0]])
                selected_before = int(torch.isin(places, before).sum())
                found_hits, read = hits[head].tolist()
                assert found_hits + read == len(places)
                assert found_hits <= selected_before if gap else found_hits == selected_before, step
            kept[request.slot].append(own)
        selected = torch.stack([drift(selected[slot], lengths[slot], 0.3) for slot in range(3)])


def test_rows_that_changed_places_are_read_again(kernels: MakeKernels, device: torch.device) -> None:
    torch.manual_seed(6)
    cache = RandomCache((500,), kv_heads=KV_HEADS, dim=64, dtype=torch.bfloat16, device=device)
    attention = make_attention(kernels, cache, 4)
    assert attention.hot is not None
    request = cache.request(0, 16, 0, 40, 556, False)
    selected = cache.select([request], ENTRIES)
    check(attention, cache, 4, [request], selected)
    cache.rows.mul_(-1)
    attention.hot.frames.fill_(NO_FRAME)
    check(attention, cache, 4, [replace(request, position=557)], selected)
    assert attention.hot.hits.sum(dim=(0, 1)).tolist() == [0, 2 * KV_HEADS * ENTRIES]


def test_forgotten_rows_are_read_again(kernels: MakeKernels, device: torch.device) -> None:
    torch.manual_seed(5)
    cache = RandomCache((500, 500), kv_heads=KV_HEADS, dim=64, dtype=torch.float32, device=device)
    attention = make_attention(kernels, cache, 3)
    requests = [cache.request(slot, 16, 0, 40, 556, False) for slot in range(2)]
    selected = cache.select(requests, ENTRIES)
    check(attention, cache, 3, requests, selected)
    cache.rows.mul_(-1)  # another request has the slots
    assert attention.hot is not None
    attention.hot.forget(0)
    attention.hot.forget(1)
    check(attention, cache, 3, [replace(request, position=557) for request in requests], selected)
