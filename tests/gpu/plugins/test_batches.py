"""What holds for the batches of all methods: each request selects what it selects alone, in a graph too, whatever the others are.

Units of work are cut by lengths, blocks by the batch.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from tests.gpu.plugins import gpu_context
from tests.plugins.cases import CASES, SELECTING
from tests.plugins.index_cases import KV_HEADS, batch_of
from torch import Tensor

from kvseek.plugins.contract import Index
from kvseek.plugins.peers.base import PeerIndex
from kvseek.plugins.registry import get_method

pytestmark = pytest.mark.gpu

LENGTHS = [70_000, 9_000, 2_600, 300, 40, 5_000, 1_024, 20_000, 1_500, 1, 3_000, 40_000, 700, 1_025, 12_000, 6_000]
DENSE = {3, 4, 9, 12}  # requests that attend to everything
LAYER = 5  # some methods select nothing in the first layers
GROUP, DIM = 4, 128
STATELESS = {"ctkvr": {"update": False}}  # every selection would replace a centroid
CONTESTANTS = {
    name: (method, dict(settings))
    for method in SELECTING
    for name, settings in ((method, {}), *CASES[method].on_gpu.items())
    if CASES[method].on_gpu and settings.get("execution") != "cpu"
}


def make_index(method: str, settings: dict[str, object], lengths: Sequence[int], **fields: Any) -> Index:
    entry = get_method(method)
    config = entry.configure({**settings, **STATELESS.get(method, {})})
    context = gpu_context.make_context(method, config, "bfloat16", DIM, GROUP, lengths, "cuda", layer=LAYER, **fields)
    index = entry.create(context)
    for slot, keys in enumerate(gpu_context.keys_of_slots(lengths, DIM, "bfloat16")):
        queries = torch.randn(KV_HEADS * GROUP, min(keys.shape[1], 500), DIM).to(keys).to(gpu_context.PLACE)
        work = index.build(slot, keys.to(gpu_context.PLACE), queries)
        if work is not None:
            work.wait()
    return index


def select(index: Index, queries: Tensor, slots: list[int], dense: Collection[int] = DENSE) -> Tensor:
    selection = index.select(queries[slots], batch_of(index, slots, dense))
    assert selection is not None
    return selection.rows


def check_batches(index: Index, scale: float, sizes: Sequence[int], times: int) -> None:
    """Requests alone, and in random batches of these sizes."""
    chance, every = random.Random(3), list(range(len(index.context.lengths)))
    for _ in range(times):
        queries = (scale * torch.randn(len(every), KV_HEADS * GROUP, DIM)).bfloat16().to(gpu_context.PLACE)
        alone = {slot: select(index, queries, [slot])[0] for slot in every if slot not in DENSE}
        for size in sizes:
            slots = chance.sample(every, size)
            together = select(index, queries, slots)
            for number, slot in enumerate(slots):
                assert slot in DENSE or torch.equal(together[number], alone[slot]), (slot, slots)


@pytest.mark.parametrize("scale", [1.0, 1e-4], ids=["queries", "queries that hardly tell keys apart"])
@pytest.mark.parametrize("name", CONTESTANTS)
def test_a_request_selects_the_same_rows_in_any_batch(name: str, scale: float) -> None:
    torch.manual_seed(3)
    check_batches(make_index(*CONTESTANTS[name], LENGTHS), scale, (2, 3, 8, 16), 4)


def check_positions(index: Index, batches: Sequence[Sequence[int]]) -> None:
    """Several requests of a slot, as a step that verifies drafts has: each selects what it selects alone."""
    for slots in batches:
        queries = torch.randn(len(slots), KV_HEADS * GROUP, DIM).bfloat16().to(gpu_context.PLACE)
        together = index.select(queries, batch_of(index, slots, DENSE))
        assert together is not None
        for number, slot in enumerate(slots):
            if slot not in DENSE:
                alone = index.select(queries[[number]], batch_of(index, [slot]))
                assert alone is not None
                assert torch.equal(together.rows[number], alone.rows[0]), (number, slots)


def verifies_drafts(method: str) -> bool:
    traits = get_method(method).traits()
    return traits.verifies_drafts and traits.prefix_reuse == "entries"


@pytest.mark.parametrize("name", [name for name in CONTESTANTS if verifies_drafts(CONTESTANTS[name][0])])
def test_positions_of_a_slot_select_what_each_selects_alone(name: str) -> None:
    torch.manual_seed(4)
    batches = ([0] * 8, [2, 0, 0, 0, 3, 3, 5, 5], [7] * 5 + [1] * 2 + [0], [9, 9] + [11] * 3, [6] * 16)
    check_positions(make_index(*CONTESTANTS[name], LENGTHS, shares_extents=True), batches)


@pytest.mark.parametrize("name", CONTESTANTS)
def test_a_captured_selection_follows_requests_and_skips_dense_ones(name: str) -> None:
    torch.manual_seed(3)
    index = make_index(*CONTESTANTS[name], [3000, 40_000, 12_000])
    queries = torch.randn(3, KV_HEADS * GROUP, DIM, device="cuda").bfloat16()
    batch = batch_of(index, [0, 1, 2])
    first, last = (index.select(queries, batch_of(index, slots)) for slots in ([0, 1, 2], [2, 0, 1]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = index.select(queries, batch)
    assert captured is not None
    assert first is not None
    assert last is not None
    captured.rows.fill_(-9)
    graph.replay()
    assert torch.equal(captured.rows, first.rows)
    batch.requests.copy_(batch_of(index, [2, 0, 1], dense=[1]).requests)
    captured.rows.fill_(-9)
    graph.replay()
    assert torch.equal(captured.rows[:2], last.rows[:2])
    if not isinstance(index, PeerIndex):  # which selects for equal ground, not for speed
        assert (captured.rows[2] == -9).all(), "nothing is selected for a dense request"


def check_bad_queries(index: Index) -> None:
    """Softmax weights that are NaN, or far above 1: keys of such weights must not lie outside of a histogram."""
    slots, length = [0, 1, 2, 3], index.context.lengths[0]
    queries = torch.randn(4, KV_HEADS * GROUP, DIM).bfloat16().to(gpu_context.PLACE)
    want, bad = select(index, queries, slots, dense=()).clone(), queries.clone()
    bad[0, :, 5], bad[1, 0, 0] = float("inf"), float("nan")
    bad[3] *= 1e30
    rows = select(index, bad, slots, dense=())
    assert torch.equal(rows[2], want[2])
    ordered = rows.sort(dim=-1).values
    assert ((rows >= -1) & (rows < length)).all()
    assert ((ordered.diff(dim=-1) > 0) | (ordered[..., 1:] == -1)).all(), "no row twice"
    assert ((rows < 0).sum(dim=-1) <= getattr(index.context.config, "page", 0)).all(), (
        "pages that do not fit are left out"
    )
    assert torch.equal(select(index, queries, slots, dense=()), want), "nothing is left behind for the next selection"


@pytest.mark.parametrize("name", CONTESTANTS)
def test_a_bad_query_hurts_no_other_request(name: str) -> None:
    torch.manual_seed(6)
    check_bad_queries(make_index(*CONTESTANTS[name], [9000] * 4))
