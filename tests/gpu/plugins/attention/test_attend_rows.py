"""Where the attention kernel of the GPU finds rows and keeps copies: places in any order, the method's store, hot rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.gpu.conftest import MakeKernels
from tests.gpu.plugins.attention.attention_runs import (
    ENTRIES,
    KV_HEADS,
    check,
    compare,
    make_attention,
    make_queries,
    run,
)
from tests.gpu.plugins.attention.random_cache import POISON, RandomCache
from torch import Tensor

from kvseek.plugins.selection import Selection

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
    for hot_rows in (False, True):
        attention = make_attention(kernels, cache, group, entries, hot_rows=hot_rows)
        for selected in lists:
            selected[3] = -1
            selected[0, 1] = -1
            selected[1] = 2**30  # dense: must not be read
            check(attention, cache, group, requests, selected)
            check(attention, cache, group, requests[3:], selected[3:].contiguous())


@pytest.mark.parametrize(("dtype", "dim", "group"), GAP_SHAPES)
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_rows_come_from_the_methods_store_and_go_there(
    dtype: str, dim: int, group: int, share: float, kernels: MakeKernels, device: torch.device
) -> None:
    """`share` of the entries are cached; half of the others are kept. All that nothing may read is poisoned."""
    torch.manual_seed(8)
    lengths, entries, store_rows = (3000, 1500, 40), 500, 1200
    cache = RandomCache(lengths, kv_heads=KV_HEADS, dim=dim, dtype=getattr(torch, dtype), device=device, host_rows=True)
    requests = [cache.request(slot, 16, 3, 60, 76 + slot, slot == 1) for slot in (2, 0, 1)] + [cache.padding()]
    rows = scattered(cache.select(requests, 450), entries)
    store = torch.full(
        (len(lengths) + 1, KV_HEADS, store_rows, 2, dim), POISON, dtype=cache.window.dtype, device=device
    )
    cached, keep = torch.full_like(rows, -1), torch.full_like(rows, -1)
    queries = make_queries(cache, len(requests), group)
    expected = cache.expected(queries, requests, rows, dim**-0.5)
    after = store.clone()
    misses = hits = 0
    for number, request in enumerate(requests):
        if request.dense:
            cached[number], keep[number] = 7, 7  # must be left alone
            continue
        pool = cache.extents.read(cache.rows, request.slot, request.length).to(device)
        for head in range(KV_HEADS):
            named = (rows[number, head] >= 0).nonzero().flatten()
            places = rows[number, head, named].long()
            free = torch.randperm(store_rows, device=device)[: len(named)]
            hot = torch.rand(len(named), device=device) < share
            kept = ~hot & (torch.rand(len(named), device=device) < 0.5)
            cached[number, head, named[hot]] = free[hot].int()
            keep[number, head, named[kept]] = free[kept].int()
            store[request.slot, head, free[hot]] = pool[head, places[hot]]
            after[request.slot, head, free[hot | kept]] = pool[head, places[hot | kept]]
            for place in places[hot].tolist():
                (extent, inside, _), *_ = cache.extents.spans(request.slot, place, place + 1)
                cache.rows[extent, head, inside] = POISON
            hits, misses = hits + int(hot.sum()), misses + int((~hot).sum())
    counters = torch.zeros(2, dtype=torch.int64, device=device)
    attention = make_attention(kernels, cache, group, entries, hot_rows=False, counters=counters)
    found = run(attention, cache, queries, requests, Selection(rows, store=store, cached=cached, keep=keep))
    compare(found, expected, requests)
    assert counters.tolist() == [hits, misses]
    assert torch.equal(store.nan_to_num(1e4), after.nan_to_num(1e4))


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


@pytest.mark.parametrize(("dtype", "dim", "group"), [("bfloat16", 128, 4), ("bfloat16", 256, 11), ("float32", 128, 13)])
@pytest.mark.parametrize("entries", [5, ENTRIES, 300])
def test_hot_rows_change_nothing_but_where_rows_come_from(
    dtype: str, dim: int, group: int, entries: int, kernels: MakeKernels, device: torch.device
) -> None:
    torch.manual_seed(4)
    lengths = (3000, 1500, 40)  # the last has fewer rows than entries, so -1 fills its list
    cache = RandomCache(lengths, kv_heads=KV_HEADS, dim=dim, dtype=getattr(torch, dtype), device=device, host_rows=True)
    counters = torch.zeros(2, dtype=torch.int64, device=device)
    warm = make_attention(kernels, cache, group, entries, counters=counters)
    cold = make_attention(kernels, cache, group, entries, hot_rows=False)
    requests = [cache.request(slot, 16, 3, 60, 76 + slot, False) for slot in range(3)]
    selected = cache.select(requests, entries)
    held: dict[int, Tensor] = {}
    for step in range(6):
        batch = [
            replace(request, position=request.position + step, dense=request.slot == 1 and step == 3)
            for request in requests
            if not (request.slot == 2 and step == 2)  # not in every batch
        ]
        rows = selected[[request.slot for request in batch]]
        queries = make_queries(cache, len(batch), group)
        counters.zero_()
        found = run(warm, cache, queries, batch, rows)
        assert torch.equal(found, run(cold, cache, queries, batch, rows)), step
        hits = misses = 0
        for number, request in enumerate(batch):
            if request.dense:
                continue
            before = held.get(request.slot) if step not in (3, 4) or request.slot == 0 else None
            for head in range(KV_HEADS):
                own = rows[number, head][rows[number, head] >= 0]
                hot = int(torch.isin(own, before[head]).sum()) if before is not None else 0
                hits, misses = hits + hot, misses + len(own) - hot
            held[request.slot] = rows[number]
        if step not in (3, 4):  # a step left out leaves both buffers older than `held` tells
            assert counters.tolist() == [hits, misses], step
        selected = torch.stack([drift(selected[slot], lengths[slot], 0.3) for slot in range(3)])


def test_forgotten_rows_are_read_again(kernels: MakeKernels, device: torch.device) -> None:
    torch.manual_seed(5)
    cache = RandomCache((500, 500), kv_heads=KV_HEADS, dim=64, dtype=torch.float32, device=device)
    attention = make_attention(kernels, cache, 3)
    requests = [cache.request(slot, 16, 0, 40, 556, False) for slot in range(2)]
    selected = cache.select(requests, ENTRIES)
    check(attention, cache, 3, requests, selected)
    cache.rows.mul_(-1)  # another request has the slots
    attention.forget(0)
    attention.forget(1)
    check(attention, cache, 3, [replace(request, position=557) for request in requests], selected)
