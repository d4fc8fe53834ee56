"""Rows that ClusterKV keeps on the device from the last steps, and its selection inside a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.gpu.plugins.clusterkv_pairs import (
    KV_HEADS,
    batch_of,
    build,
    make_context,
    make_pair,
    random_keys,
    with_rows,
)
from tests.plugins.index_cases import select_rows

from kvseek.plugins.clusterkv.config import Config
from kvseek.plugins.clusterkv.device import NEVER, CudaIndex
from kvseek.plugins.selection import Selection

pytestmark = pytest.mark.gpu


def move_rows(index: CudaIndex, selection: Selection, slots: Sequence[int]) -> tuple[int, int]:
    """What the attention kernel does with a selection: read cached rows and check them, keep all. Returns found and read."""
    assert index.context.rows is not None
    assert selection.store is not None
    assert selection.cached is not None
    assert selection.keep is not None
    pool, found, read = index.context.rows.pool, 0, 0
    rows, cached, keep = (array.cpu() for array in (selection.rows, selection.cached, selection.keep))
    store = selection.store
    for request, slot in enumerate(slots):
        held = index.context.extents.read(pool, slot, index.context.lengths[slot]).cuda()
        for head in range(KV_HEADS):
            own = rows[request, head]
            used = own >= 0
            assert ((keep[request, head] >= 0) == used).all()
            there = cached[request, head] >= 0
            assert not (there & ~used).any()
            assert not set(cached[request, head][there].tolist()) & set(keep[request, head][used].tolist())
            wanted = held[head, own[there].long().cuda()]
            assert torch.equal(store[slot, head, cached[request, head][there].long().cuda()], wanted), (
                "poisoned or stale"
            )
            found, read = found + int(there.sum()), read + int((used & ~there).sum())
            kept = keep[request, head][used].long()
            assert len(set(kept.tolist())) == len(kept)
            store[slot, head, kept.cuda()] = held[head, own[used].long().cuda()]
    return found, read


@pytest.mark.parametrize("steps", [1, 3])
def test_rows_of_the_last_steps_are_found(steps: int) -> None:
    """Queries drift for 30 steps. What is said to be in the store is there, and most rows are."""
    torch.manual_seed(steps)
    lengths = [6000, 2500]
    _, index = make_pair(Config(top_k=200, cache_steps=steps, iterations=3), "float32", 64, 2, lengths, on_host=True)
    recent = index.recent
    assert recent is not None
    recent.store.fill_(float("nan"))
    queries = torch.randn(2, KV_HEADS * 2, 64, device="cuda")
    found = read = 0
    for step in range(30):
        selection = index.select(queries, batch_of(index, [7000 + step, 3000 + step], [0, 1]))
        assert selection is not None
        counts = move_rows(index, selection, [0, 1])
        assert step > 0 or counts[0] == 0, "the first step finds nothing"
        found, read = found + counts[0], read + counts[1]
        stale = recent.store.view(2, KV_HEADS, steps + 1, 200, -1)
        for slot, position in enumerate((7001, 3001)):  # the next step's buffer: nobody may read it any more
            stale[slot, :, (position + step) % (steps + 1)] = float("nan")
        queries = 0.97 * queries + 0.24 * torch.randn_like(queries)
    assert index.hit_rate() == found / (found + read)
    assert found > 0.3 * (found + read)


def test_nothing_is_found_after_a_pause_longer_than_the_cache() -> None:
    torch.manual_seed(8)
    _, index = make_pair(Config(top_k=200, cache_steps=2, iterations=2), "float32", 64, 2, [6000], on_host=True)
    queries = torch.randn(1, KV_HEADS * 2, 64, device="cuda")

    def found(position: int) -> int:
        selection = index.select(queries, batch_of(index, [position], [0]))
        assert selection is not None
        assert selection.cached is not None
        return int((selection.cached >= 0).sum())

    everything = 200 * KV_HEADS
    assert [found(position) for position in (7000, 7001, 7001, 7003)] == [0, everything, 0, everything]
    assert found(7006) == 0, "three steps later another step has that buffer"
    assert found(7007) == everything


def test_another_request_of_a_slot_finds_nothing() -> None:
    torch.manual_seed(9)
    config = Config(top_k=100, iterations=2)
    index = CudaIndex(with_rows(make_context(config, "bfloat16", 64, 2, [3000], "cuda"), on_host=True))
    keys = random_keys(3000, 64, "bfloat16").cuda()
    queries = torch.randn(1, KV_HEADS * 2, 64, device="cuda").bfloat16()
    for _ in range(2):
        build(index, 0, keys)
        selections = [index.select(queries, batch_of(index, [position], [0])) for position in (3500, 3501)]
        cached = [selection.cached for selection in selections if selection is not None]
        assert [int((array >= 0).sum()) for array in cached if array is not None] == [0, 100 * KV_HEADS]


@pytest.mark.parametrize(("on_host", "steps"), [(False, 1), (True, 0)])
def test_no_store_where_it_is_of_no_use(on_host: bool, steps: int) -> None:
    config = Config(top_k=50, cache_steps=steps)
    _, index = make_pair(config, "float16", 64, 1, [2000], on_host)
    queries = torch.randn(1, KV_HEADS, 64, device="cuda").half()
    assert select_rows(index, queries, [0]).store is None
    assert index.recent is None
    assert index.hit_rate() is None


def test_a_captured_selection_follows_lengths_and_skips_dense_requests() -> None:
    torch.manual_seed(3)
    lengths = [3000, 40_000, 12_000]
    _, index = make_pair(Config(iterations=2), "bfloat16", 128, 4, lengths, on_host=True)
    queries = torch.randn(3, KV_HEADS * 4, 128, device="cuda").bfloat16()
    batch = batch_of(index, [50_000] * 3, [0, 1, 2])
    want = index.select(queries, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = index.select(queries, batch)
    assert want is not None
    assert found is not None
    assert found.cached is not None
    assert found.keep is not None
    found.rows.fill_(-9)
    graph.replay()
    assert torch.equal(found.rows, want.rows)
    assert (found.cached == -1).all(), "the same step again"
    batch.requests.copy_(batch_of(index, [50_001] * 3, [2, 0, 1], dense=[1]).requests)
    for array in (found.rows, found.cached, found.keep):
        array.fill_(-9)
    graph.replay()
    for array in (found.rows, found.cached, found.keep):
        assert (array[2] == -9).all(), "nothing is selected for a dense request"
    assert torch.equal(found.rows[:2], select_rows(index, queries[:2], [2, 0]).rows)


def test_memory_that_was_never_selected_from_is_never_found() -> None:
    """While memory is measured, before rows are placed, the store is there too."""
    index = CudaIndex(make_context(Config(top_k=64), "bfloat16", 64, 2, [500], "cuda"))
    recent = index.recent
    assert recent is not None
    assert (recent.clusters == NEVER).all()
    assert recent.store.shape == (1, KV_HEADS, 128, 2, 64)
