"""The attention kernel of the GPU against the reference, in all places where rows may lie, with copies of hot ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.gpu.conftest import MakeKernels
from tests.gpu.kernels.attention.random_cache import POISON, RandomCache
from torch import Tensor

from kvseek.core.batch import Batch, RequestState, Selection, pack
from kvseek.core.config import MOST_DRAFTED
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
        hot = HotRows.make(empty_frames(cache.extents, cache.kv_heads), dtype=cache.rows.dtype, **sizes)
        assert hot is not None
        (hot.rows if hot.scales is None else hot.scales).fill_(POISON)
        hot.frames.random_(0, 2 * entries + 3)  # another request may have left anything there
    options = {"max_batch": 16, **options}
    attention = DeviceAttention(
        kernels(str(dtype).removeprefix("torch."), cache.dim, group, rounded_rows=cache.scales is not None),
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
        rounded_rows=cache.scales is not None,
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


def check_rings(dtype: str, dim: int, group: int, window: int, kernels: MakeKernels, device: torch.device) -> None:
    """Attention of a layer with a window is that over its latest rows in order; several tokens of a slot may be in one step."""
    torch.manual_seed(window)
    rows, positions = window + MOST_DRAFTED, [0, window // 2, window - 1, window, 3 * window + 5]
    slots = [*range(len(positions)), *[4] * MOST_DRAFTED]
    positions += [positions[4] + ahead for ahead in range(1, MOST_DRAFTED + 1)]
    ring = torch.full((len(slots), KV_HEADS, rows, 2, dim), POISON, dtype=getattr(torch, dtype), device=device)
    latest = {slot: max(own for at, own in zip(slots, positions, strict=True) if at == slot) for slot in set(slots)}
    for slot, last in latest.items():
        for position in range(max(0, last + 1 - rows), last + 1):
            ring[slot, :, position % rows] = torch.randn(KV_HEADS, 2, dim, device=device).to(ring.dtype)
    table = torch.zeros(len(slots), 1, dtype=torch.int32, device=device)
    states = [RequestState(slot=slot, position=own, length=7) for slot, own in zip(slots, positions, strict=True)]
    batch = Batch.of(states, table).in_rings(window, rows)
    attention = DeviceAttention(
        kernels(dtype, dim, group, rounded_rows=False),
        num_heads=KV_HEADS * group,
        kv_heads=KV_HEADS,
        head_dim=dim,
        dtype=ring.dtype,
        window_rows=rows,
        sink=0,
        entries=0,
        max_batch=16,
        scaling=dim**-0.5,
        device=device,
        splits=1,
    )
    queries = 2 * torch.randn(len(slots), KV_HEADS * group, dim, device=device).to(ring.dtype)
    found = attention.launch(queries, batch, ring, ring.data_ptr(), 0, None)
    for number, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        places = [own % rows for own in range(max(0, position + 1 - window), position + 1)]
        keys, values = ring[slot][:, places].float().repeat_interleave(group, dim=0).unbind(2)
        weights = ((queries[number].float()[:, None] @ keys.mT) * dim**-0.5).softmax(dim=-1)
        expected = (weights @ values)[:, 0].cpu()
        assert error(found[number], expected) <= LIMITS[ring.dtype], (slot, position)


pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("window", [1, 100, 512, 5000])
@pytest.mark.parametrize(("dtype", "dim", "group"), [("bfloat16", 128, 4), ("float16", 64, 3), ("bfloat16", 256, 2)])
def test_rings(dtype: str, dim: int, group: int, window: int, kernels: MakeKernels, device: torch.device) -> None:
    check_rings(dtype, dim, group, window, kernels, device)


LENGTHS = (0, 1, 7, 100, 1023, 1024, 1025, 5000)
# Sink rows, first ring row, ring rows; the sink has 16 rows, the ring 72.
WINDOWS = ((1, 0, 0), (16, 0, 1), (16, 0, 50), (16, 30, 42), (16, 30, 72), (16, 71, 5), (16, 71, 72), (9, 0, 0))
SHAPES = [
    ("bfloat16", 128, 4),
    ("bfloat16", 128, 1),
    ("bfloat16", 128, 8),
    ("bfloat16", 128, 12),
    ("bfloat16", 64, 3),
    ("bfloat16", 96, 16),
    ("bfloat16", 256, 2),
    ("bfloat16", 256, 11),
    ("float16", 128, 5),
    ("float16", 64, 16),
    ("float16", 32, 7),
    ("float32", 128, 4),
    ("float32", 64, 3),
    ("float32", 96, 1),
    ("float32", 128, 13),
    ("float32", 256, 6),
]


def with_rounded(shapes: list[tuple[str, int, int]]) -> list[tuple[str, int, int, bool]]:
    """Shapes with rows of the engine's type, and with rows in 8 bits where there are such kernels."""
    return [(*shape, rounded) for shape in shapes for rounded in (False, True) if shape[0] != "float32" or not rounded]


@pytest.mark.parametrize("host_rows", [False, True], ids=["device", "host"])
@pytest.mark.parametrize(("dtype", "dim", "group", "rounded"), with_rounded(SHAPES))
def test_matches_the_reference(
    dtype: str, dim: int, group: int, rounded: bool, host_rows: bool, kernels: MakeKernels, device: torch.device
) -> None:
    """Every length with every state of the window; selected, dense and padding requests in one batch."""
    torch.manual_seed(dim + group)
    where = {"dtype": getattr(torch, dtype), "device": device, "host_rows": host_rows, "rounded": rounded}
    cache = RandomCache(LENGTHS, kv_heads=KV_HEADS, dim=dim, **where)
    attention = make_attention(kernels, cache, group)
    for dense in (0, 3):
        requests = [
            cache.request(slot, *WINDOWS[(slot + dense) % len(WINDOWS)], position=50 + slot, dense=slot % 3 == dense)
            for slot in range(len(LENGTHS))
        ]
        requests = [*requests, cache.padding(), cache.padding()]
        selected = cache.select(requests, ENTRIES)
        selected[[request.dense for request in requests]] = 2**30  # must not be read
        check(attention, cache, group, requests, selected)
        check(attention, cache, group, requests, None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("entries", [0, ENTRIES, 600])
@pytest.mark.parametrize("splits", [None, 1, 3, 96])
def test_any_number_of_splits(
    dtype: str, entries: int, splits: int | None, kernels: MakeKernels, device: torch.device
) -> None:
    torch.manual_seed(1)
    cache = RandomCache(
        (2500, 900), kv_heads=KV_HEADS, dim=64, dtype=getattr(torch, dtype), device=device, window_rows=700, sink=60
    )
    attention = make_attention(kernels, cache, 3, entries, splits=splits)
    requests = [cache.request(0, 60, 600, 640, 9, False), cache.request(1, 60, 3, 637, 8, False)]
    selected = cache.select(requests, entries) if entries else None
    for batch in (requests, requests[:1], requests[::-1]):
        rows = None if selected is None else selected[[request.slot for request in batch]]
        check(attention, cache, 3, batch, rows)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("host_rows", [False, True], ids=["device", "host"])
def test_long_context(host_rows: bool, rounded: bool, kernels: MakeKernels, device: torch.device) -> None:
    torch.manual_seed(2)
    where = {"dtype": torch.bfloat16, "device": device, "host_rows": host_rows, "rounded": rounded}
    cache = RandomCache((70000, 3), kv_heads=1, dim=128, **where)
    attention = make_attention(kernels, cache, 4)
    for dense in (False, True):
        requests = [cache.request(0, 16, 70, 40, 70056, dense), cache.request(1, 16, 3, 40, 59, dense)]
        check(attention, cache, 4, requests, cache.select(requests, ENTRIES))


@pytest.mark.parametrize("host_rows", [False, True], ids=["device", "host"])
@pytest.mark.parametrize(
    ("dtype", "dim", "group", "rounded"),
    with_rounded([("bfloat16", 128, 4), ("float16", 96, 16), ("float32", 64, 3)]),
)
def test_a_request_attends_the_same_in_any_batch(
    dtype: str, dim: int, group: int, rounded: bool, host_rows: bool, kernels: MakeKernels, device: torch.device
) -> None:
    """Equal to the bit, beside requests of other lengths, dense ones and padding among them."""
    torch.manual_seed(4)
    lengths, entries = (30_000, 7, 5000, 900, 12_000, 0, 2500, 1024), 600
    where = {"dtype": getattr(torch, dtype), "device": device, "host_rows": host_rows, "rounded": rounded}
    cache = RandomCache(lengths, kv_heads=KV_HEADS, dim=dim, window_rows=700, sink=60, **where)
    attention = make_attention(kernels, cache, group, entries, kept_steps=0)
    requests = [cache.request(slot, 60, slot, 640 - 90 * slot, 9, dense=slot % 3 == 0) for slot in range(len(lengths))]
    queries, selected = make_queries(cache, len(lengths), group), cache.select(requests, entries)
    for rows in (selected, None):

        def attend(numbers: list[int], rows: Tensor | None = rows) -> tuple[Tensor, Tensor]:
            lse = torch.empty(len(numbers), KV_HEADS * group, device=device)
            batch = [requests[number] for number in numbers]
            return run(attention, cache, queries[numbers], batch, None if rows is None else rows[numbers], lse), lse

        alone = [attend([number]) for number in range(len(lengths))]
        for numbers in (
            [0, 1],
            [3, 2, 0],
            [5, 6, 7, 4],
            [7, 1, 2, 3, 0, 5],
            [*range(8)],
            [0, 0, 1, *range(8), 3, 2, 7, 6, 5],
        ):
            out, lse = attend(numbers)
            for place, number in enumerate(numbers):
                assert torch.equal(out[place], alone[number][0][0]), (place, numbers)
                assert torch.equal(lse[place], alone[number][1][0]), (place, numbers)


def test_batch_of_sixty_four(kernels: MakeKernels, device: torch.device) -> None:
    torch.manual_seed(3)
    lengths = [37 * slot % 1200 for slot in range(64)]
    cache = RandomCache(lengths, kv_heads=1, dim=64, dtype=torch.bfloat16, device=device, window_rows=40, layers=1)
    attention = make_attention(kernels, cache, 3, max_batch=64)
    requests = [cache.request(slot, 16, slot % 24, 1 + slot % 24, slot, slot % 5 == 0) for slot in range(64)]
    check(attention, cache, 3, requests, cache.select(requests, ENTRIES))


def test_a_request_without_rows_gives_zeros(kernels: MakeKernels, device: torch.device) -> None:
    cache = RandomCache((0,), kv_heads=KV_HEADS, dim=64, dtype=torch.bfloat16, device=device)
    attention = make_attention(kernels, cache, 3)
    found = run(attention, cache, make_queries(cache, 1, 3), [cache.request(0, 0, 0, 0, 0, True)], None)
    assert found.count_nonzero() == 0  # NaN is not zero


def test_replays_read_what_varies_from_memory(kernels: MakeKernels, device: torch.device) -> None:
    torch.manual_seed(6)
    cache = RandomCache(
        (3000, 2000, 100), kv_heads=KV_HEADS, dim=128, dtype=torch.bfloat16, device=device, host_rows=True
    )
    attention = make_attention(kernels, cache, 4)
    steps = [
        [cache.padding(), cache.padding()],
        [cache.request(0, 16, 0, 30, 3046, False), cache.padding()],
        [cache.request(1, 16, 20, 72, 2088, True), cache.request(0, 16, 0, 31, 3047, False)],
        [cache.request(2, 16, 70, 50, 166, False), cache.request(1, 16, 21, 72, 2089, False)],
        [cache.padding(), cache.request(2, 16, 70, 51, 167, False)],
    ]
    batch = cache.batch(steps[0])
    queries = make_queries(cache, 2, 4)
    selected = torch.full((2, KV_HEADS, ENTRIES), -1, dtype=torch.int32, device=device)
    pointer, stride = cache.rows.data_ptr(), cache.rows.stride(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.launch(queries, batch, cache.window, pointer, stride, Selection(selected))
    for requests in steps:
        batch.requests.copy_(pack(requests))
        selected.copy_(cache.select(requests, ENTRIES))
        queries.copy_(make_queries(cache, 2, 4))
        out.fill_(POISON)
        graph.replay()
        expected = cache.expected(queries, requests, selected, cache.dim**-0.5)
        assert error(out, expected) <= LIMITS[torch.bfloat16], requests


def scattered(rows: Tensor, entries: int) -> Tensor:
    """The same rows in another order among more entries, the others -1."""
    wide = torch.full((*rows.shape[:2], entries), -1, dtype=torch.int32, device=rows.device)
    wide[..., : rows.shape[2]] = rows
    order = torch.rand(wide.shape, device=rows.device).argsort(-1)
    return wide.gather(-1, order)


GAP_SHAPES = [("bfloat16", 128, 4), ("float16", 96, 3), ("bfloat16", 256, 11), ("float32", 128, 5), ("float32", 96, 13)]


@pytest.mark.parametrize("host_rows", [False, True], ids=["device", "host"])
@pytest.mark.parametrize(("dtype", "dim", "group", "rounded"), with_rounded(GAP_SHAPES))
def test_places_in_any_order_with_gaps(
    dtype: str, dim: int, group: int, rounded: bool, host_rows: bool, kernels: MakeKernels, device: torch.device
) -> None:
    """Scattered places and pages; some lists are empty, one request attends to its window alone, one to all rows."""
    torch.manual_seed(7)
    lengths, entries = (3000, 1500, 40, 2048), 600
    where = {"dtype": getattr(torch, dtype), "device": device, "host_rows": host_rows, "rounded": rounded}
    cache = RandomCache(lengths, kv_heads=KV_HEADS, dim=dim, **where)
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


@pytest.mark.parametrize(("dtype", "dim", "group", "rounded"), with_rounded(GAP_SHAPES))
def test_log_sum_exp(
    dtype: str, dim: int, group: int, rounded: bool, kernels: MakeKernels, device: torch.device
) -> None:
    torch.manual_seed(9)
    where = {"dtype": getattr(torch, dtype), "device": device, "rounded": rounded}
    cache = RandomCache((3000, 1500, 0, 700), kv_heads=KV_HEADS, dim=dim, **where)
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
@pytest.mark.parametrize(
    ("dtype", "dim", "group", "rounded"),
    with_rounded([("bfloat16", 128, 4), ("bfloat16", 256, 11), ("float32", 128, 13)]),
)
@pytest.mark.parametrize("entries", [5, ENTRIES, 300])
def test_hot_rows_change_nothing_but_where_rows_come_from(
    dtype: str,
    dim: int,
    group: int,
    rounded: bool,
    entries: int,
    kept_steps: int,
    kernels: MakeKernels,
    device: torch.device,
) -> None:
    """Selections drift. Rows of the last steps are found, whatever their order; all others are read from the pool."""
    torch.manual_seed(4)
    lengths = (3000, 1500, 40)  # the last has fewer rows than entries
    where = {"dtype": getattr(torch, dtype), "device": device, "host_rows": True, "rounded": rounded}
    cache = RandomCache(lengths, kv_heads=KV_HEADS, dim=dim, **where)
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
