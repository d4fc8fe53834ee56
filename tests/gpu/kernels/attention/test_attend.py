"""The attention kernel of the GPU against the reference, in all the places where rows may lie."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.conftest import MakeKernels
from tests.gpu.kernels.attention.attention_runs import (
    ENTRIES,
    KV_HEADS,
    LIMITS,
    check,
    error,
    make_attention,
    make_queries,
    run,
)
from tests.gpu.kernels.attention.random_cache import POISON, RandomCache
from torch import Tensor

from kvseek.core.batch import Selection, pack

pytestmark = pytest.mark.gpu

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


@pytest.mark.parametrize("host_rows", [False, True], ids=["device", "host"])
@pytest.mark.parametrize(("dtype", "dim", "group"), SHAPES)
def test_matches_the_reference(
    dtype: str, dim: int, group: int, host_rows: bool, kernels: MakeKernels, device: torch.device
) -> None:
    """Every length with every state of the window; selected, dense and padding requests in one batch."""
    torch.manual_seed(dim + group)
    cache = RandomCache(
        LENGTHS, kv_heads=KV_HEADS, dim=dim, dtype=getattr(torch, dtype), device=device, host_rows=host_rows
    )
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


@pytest.mark.parametrize("host_rows", [False, True], ids=["device", "host"])
def test_long_context(host_rows: bool, kernels: MakeKernels, device: torch.device) -> None:
    torch.manual_seed(2)
    cache = RandomCache((70000, 3), kv_heads=1, dim=128, dtype=torch.bfloat16, device=device, host_rows=host_rows)
    attention = make_attention(kernels, cache, 4)
    for dense in (False, True):
        requests = [cache.request(0, 16, 70, 40, 70056, dense), cache.request(1, 16, 3, 40, 59, dense)]
        check(attention, cache, 4, requests, cache.select(requests, ENTRIES))


@pytest.mark.parametrize("host_rows", [False, True], ids=["device", "host"])
@pytest.mark.parametrize(("dtype", "dim", "group"), [("bfloat16", 128, 4), ("float16", 96, 16), ("float32", 64, 3)])
def test_a_request_attends_the_same_in_any_batch(
    dtype: str, dim: int, group: int, host_rows: bool, kernels: MakeKernels, device: torch.device
) -> None:
    """Equal to the bit, beside requests of other lengths, dense ones and padding among them."""
    torch.manual_seed(4)
    lengths, entries = (30_000, 7, 5000, 900, 12_000, 0, 2500, 1024), 600
    where = {"dtype": getattr(torch, dtype), "device": device, "host_rows": host_rows}
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
