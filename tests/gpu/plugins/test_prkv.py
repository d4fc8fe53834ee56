"""PRKV's CUDA kernels against the PyTorch reference: static sets and their updates, boxes, codes, pages."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from tests.gpu.plugins.prkv_world import (
    KV_HEADS,
    SHAPES,
    World,
    attend,
    boxes_of,
    check_attended,
    check_request,
    check_summaries,
    make_pair,
    picked_of,
    random_rows,
)
from tests.plugins.prkv.settings import BOXES
from torch import Tensor

from kvseek.bench.methods import method_kernels
from kvseek.core.streams import SideStream, SideWork
from kvseek.plugins.prkv.config import PAGE_SCORES, Config
from kvseek.plugins.prkv.device import CudaIndex, observe
from kvseek.plugins.prkv.static import observation_scores
from kvseek.plugins.prkv.update import PUBLISH_STEPS

pytestmark = pytest.mark.gpu
# Codes are of 64 channels or more.
SCORED_SHAPES = [
    *((*shape, "box") for shape in SHAPES),
    *((*shape, "codes") for shape in SHAPES if shape[1] >= 64),
]


@pytest.mark.parametrize(("dtype", "dim", "group", "page", "page_score"), SCORED_SHAPES)
def test_prompts_are_indexed_as_by_the_reference(dtype: str, dim: int, group: int, page: int, page_score: str) -> None:
    torch.manual_seed(dim + group)
    config = Config(top_k=512, page=page, page_score=page_score)
    lengths = [1, 1023, 1025, 5000]
    expected, found = make_pair(config, dtype, dim, group, lengths)
    for slot, n in enumerate(lengths):
        want, have = expected.static(slot), found.static(slot)
        assert want.shape == have.shape
        assert (have.diff(dim=1) > 0).all()
        same = [len(set(a.tolist()) & set(b.tolist())) for a, b in zip(have, want, strict=True)]
        assert all(count >= 0.97 * want.shape[1] for count in same), "near ties alone differ"
        check_summaries(found, slot, n)


@pytest.mark.parametrize(
    ("lengths", "radius"), [([600, 513], 1.0), ([5000, 1024, 1025], 0.4), ([70_000, 3], 0.5)], ids=str
)
@pytest.mark.parametrize(("dtype", "dim", "group", "page", "page_score"), SCORED_SHAPES)
def test_selection(
    dtype: str, dim: int, group: int, page: int, page_score: str, lengths: list[int], radius: float
) -> None:
    torch.manual_seed(dim + group + len(lengths))
    config = Config(top_k=512, page=page, page_score=page_score, box_radius=radius)
    found = World(config, dtype, dim, group, lengths)
    for slot, n in enumerate(lengths):
        found.prompt(slot, random_rows(n, dim, found.dtype), torch.randn(KV_HEADS * group, 100, dim).to(found.dtype))
    queries = (2 * torch.randn(len(lengths), KV_HEADS * group, dim)).to(found.dtype)
    slots = list(reversed(range(len(lengths))))
    selection = found.select(queries.cuda(), slots)
    assert [found.index.budget(lengths[slot]).rows for slot in slots] == [min(512, lengths[slot]) for slot in slots]
    for request, slot in enumerate(slots):
        check_request(found, queries[request], slot, selection.rows[request].cpu())


@pytest.mark.parametrize("page_score", PAGE_SCORES)
@pytest.mark.parametrize("config", [Config(), Config(top_k=4096, page=8, static_share=0.0)], ids=["default", "most"])
def test_selection_of_many_pages(config: Config, page_score: str) -> None:
    """More than 32 pages, and as many as threads: each thread is a group of its own (best.cuh)."""
    torch.manual_seed(6)
    lengths = [5000, 70_000]
    world = World(replace(config, page_score=page_score), "bfloat16", 128, 4, lengths)
    for slot, n in enumerate(lengths):
        world.prompt(slot, random_rows(n, 128, world.dtype), torch.randn(KV_HEADS * 4, 64, 128).bfloat16())
    queries = (2 * torch.randn(2, KV_HEADS * 4, 128)).bfloat16()
    rows = world.select(queries.cuda(), [0, 1]).rows.cpu()
    for slot in range(2):
        check_request(world, queries[slot], slot, rows[slot])


def test_rows_that_were_selected_before_are_hot() -> None:
    torch.manual_seed(1)
    world = World(Config(top_k=256, static_share=0.25, page=16, **BOXES), "bfloat16", 64, 3, [3000, 4001])
    for slot, n in enumerate(world.context.lengths):
        world.prompt(slot, random_rows(n, 64, world.dtype), torch.randn(KV_HEADS * 3, 64, 64).bfloat16())
    queries = torch.randn(2, KV_HEADS * 3, 64, dtype=world.dtype, device="cuda")
    slots, hot = [1, 0], world.hot
    assert hot is not None
    for step in range(5):
        if step == 4:
            world.prompt(0, world.truth[0], torch.randn(KV_HEADS * 3, 64, 64).bfloat16())
        hot.hits.zero_()
        selection = world.select(queries if step < 2 else -queries, slots, step)
        rows = attend(world, selection, slots, step)
        for request, slot in enumerate(slots):
            check_attended(world, slot, world.context.lengths[slot], selection.rows[request].cpu(), rows[request])
            found, read = hot.hits[slot].sum(dim=0).tolist()
            if step == 0 or (step == 4 and slot == 0):
                assert not found, "the prompt is new"
            elif step != 2:
                assert not read, "the same pages again: all are there"
            else:
                assert read, "other pages are read"
                kept = hot.places[slot, :, 1 - step % 2]
                assert torch.equal(kept[:, :64].cpu(), world.static(slot).int()), (
                    "static rows are among those of the last step"
                )
                assert found >= 64 * KV_HEADS


def test_a_step_records_its_queries_and_counts_its_pages() -> None:
    world = World(Config(top_k=256, static_share=0.25, page=16, **BOXES), "bfloat16", 64, 3, [3000])
    world.prompt(0, random_rows(3000, 64, world.dtype), torch.randn(KV_HEADS * 3, 64, 64).bfloat16())
    queries = torch.randn(1, KV_HEADS * 3, 64, dtype=world.dtype, device="cuda")
    recent = world.index.recent.clone()
    assert not picked_of(world, 0, 3000).any(), "counted anew"
    for count, position in enumerate((7, 64 + 3), start=1):
        rows = world.select(queries, [0], position).rows[0].cpu()
        recent[0, position % 32] = queries[0]
        torch.testing.assert_close(world.index.recent, recent, rtol=0.0, atol=0.0, equal_nan=True)
        picked = picked_of(world, 0, 3000)
        for head in range(KV_HEADS):
            chosen = torch.zeros(picked.shape[1], dtype=torch.int32)
            tokens = world.index.summaries.tokens(world.static(0), 3000)[head]
            taken = torch.isin(tokens, rows[head, 64:][rows[head, 64:] >= 0]).any(dim=1)
            chosen[4:][taken] = count  # static tokens have the first pages
            assert torch.equal(picked[head], chosen)


@pytest.mark.parametrize("page_score", PAGE_SCORES)
def test_evicted_keys_become_visible_when_they_are_published(page_score: str) -> None:
    torch.manual_seed(2)
    old, new = 1003, 256
    rows = random_rows(old + new, 128, torch.bfloat16)
    queries = torch.randn(KV_HEADS * 4, 64, 128).bfloat16()
    world = World(Config(top_k=256, page_score=page_score), "bfloat16", 128, 4, [old], room=new)
    world.prompt(0, rows[:, :old], queries)
    probe = torch.randn(1, KV_HEADS * 4, 128, dtype=torch.bfloat16, device="cuda")
    before = world.select(probe, [0]).rows
    boxes = None if page_score == "codes" else boxes_of(world, 0, old)
    world.index.append(0, old, rows[:, old:, 0].cuda())
    assert torch.equal(world.select(probe, [0]).rows, before)
    assert boxes is None or torch.equal(boxes_of(world, 0, old), boxes), "not even the last page has changed"
    world.context.lengths[0] = old + new
    world.index.publish(0, old, new)
    world.context.extents.write(world.pool, 0, old, rows[:, old:])
    assert old % world.config.page, "some keys join a page that others began"
    world.truth[0] = rows
    check_summaries(world, 0, old + new)


@pytest.mark.parametrize("page_score", PAGE_SCORES)
@pytest.mark.parametrize("n", [20_000, 530_000])
def test_equal_pages_are_taken_in_order(n: int, page_score: str) -> None:
    """All scores are equal."""
    world = World(Config(static_share=0.0, page_score=page_score), "bfloat16", 64, 2, [n])
    rows = torch.ones(KV_HEADS, n, 2, 64, dtype=torch.bfloat16)
    world.prompt(0, rows, torch.randn(KV_HEADS * 2, 64, 64).bfloat16())
    queries = torch.randn(1, KV_HEADS * 2, 64, dtype=torch.bfloat16, device="cuda")
    chosen = world.select(queries, [0]).rows[0].cpu()
    assert torch.equal(chosen, torch.arange(1024, dtype=torch.int32).expand(KV_HEADS, -1))


def test_good_pages_that_one_thread_ranks() -> None:
    """Each 512th page is good, from 63 pages on: few threads rank them all, and more reach the limit than there is room."""
    torch.manual_seed(5)
    n, page = 512 * 8 * 40, 8
    world = World(Config(top_k=512, page=page, static_share=0.0, **BOXES), "bfloat16", 64, 2, [n])
    rows = random_rows(n, 64, world.dtype)
    numbers = torch.arange(n) // page
    rows[:, numbers % 512 < 63, 0] = (2 + 0.01 * torch.randn(KV_HEADS, int((numbers % 512 < 63).sum()), 64)).bfloat16()
    rows[:, numbers % 512 >= 63, 0] = -2
    world.prompt(0, rows, torch.randn(KV_HEADS * 2, 64, 64).bfloat16())
    queries = (0.1 + torch.rand(1, KV_HEADS * 2, 64)).bfloat16()
    check_request(world, queries[0], 0, world.select(queries.cuda(), [0]).rows[0].cpu())


@pytest.mark.parametrize(("dtype", "dim", "group", "page"), SHAPES)
def test_observation_scores(dtype: str, dim: int, group: int, page: int) -> None:
    torch.manual_seed(dim)
    kernels = method_kernels("prkv", Config(top_k=512, page=page, **BOXES), dtype, dim, group)
    numbers = getattr(torch, dtype)
    for n, window in ((1, 3), (203, 20), (10_000, 64)):
        keys = torch.randn(KV_HEADS, n, 2, dim).to(numbers)[:, :, 0]
        queries = (2 * torch.randn(KV_HEADS * group, window + 5, dim)).to(numbers)[:, 5:]
        valid = torch.tensor([n // 2, n], dtype=torch.int32)
        mask = torch.arange(n) < valid[:, None]
        found = observe(kernels, queries.cuda(), keys.cuda(), dim**-0.5, valid.cuda()).cpu()
        torch.testing.assert_close(found, observation_scores(queries, keys, dim**-0.5, mask), rtol=1e-3, atol=1e-7)
        found = observe(kernels, queries.cuda(), keys.cuda(), dim**-0.5).cpu()
        torch.testing.assert_close(found, observation_scores(queries, keys, dim**-0.5), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("page_score", PAGE_SCORES)
@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize(("dtype", "dim", "group", "page"), SHAPES[:5])
def test_an_update_is_that_of_the_reference(
    dtype: str, dim: int, group: int, page: int, on_host: bool, page_score: str
) -> None:
    """Same queries, same pages counted: then the same static set, but for near ties."""
    check_updates(dtype, dim, group, page, on_host, page_score)


def check_updates(dtype: str, dim: int, group: int, page: int, on_host: bool, page_score: str) -> None:
    torch.manual_seed(dim)
    config = Config(
        top_k=512,
        static_share=0.25,
        page=page,
        page_score=page_score,
        update_pages=20,
        update_queries=8,
        update_interval=8,
    )
    n = 4001
    expected, found = make_pair(config, dtype, dim, group, [n], on_host)
    old, new = found.index.static_of(0), expected.static(0).to(found.device)
    keys = found.truth[0][:, : n // page * page, 0]
    found.index.summaries.renew(0, old, new, found.index.summaries.prepare(keys, new))  # near ties at the prompt
    found.index.set_static(0, new)
    queries = torch.randn(8, 1, KV_HEADS * group, dim).to(found.dtype)
    for step in range(8):
        expected.select(queries[step], [0])
        found.select(queries[step].cuda(), [0], step + 5)
        found.index.picked.copy_(expected.index.picked)  # near ties of pages
        for world in (expected, found):
            world.index.refresh([0])
    before = found.static(0)
    for _ in range(PUBLISH_STEPS - 1):
        found.index.refresh([0])
    assert torch.equal(before, found.static(0)), "not before its step, however early it is ready"
    check_summaries(found, 0, n)
    found.index.refresh([0])  # publishes
    want, have = expected.static(0), found.static(0)
    assert have.shape == (KV_HEADS, 128)
    assert not torch.equal(before, have)
    for head in range(KV_HEADS):
        assert len(set(want[head].tolist()) & set(have[head].tolist())) >= 124, "near ties alone differ"
    check_summaries(found, 0, n)
    assert not picked_of(found, 0, n // page * page).any()
    probe = torch.randn(1, KV_HEADS * group, dim).to(found.dtype)
    check_request(found, probe[0], 0, found.select(probe.cuda(), [0]).rows[0].cpu())


@dataclass
class Step:
    """What a step attended to, to be checked when the device has caught up."""

    slot: int
    length: int
    chosen: Tensor
    rows: Tensor


@pytest.mark.parametrize("page_score", PAGE_SCORES)
@pytest.mark.parametrize("on_host", [True, False])
def test_every_step_sees_one_static_set(on_host: bool, page_score: str) -> None:
    """Steps, evictions, updates and reopened slots, interleaved at random; nothing waits for the side streams."""
    torch.manual_seed(4)
    chance = random.Random(4)
    fields = {"update_pages": 24, "update_queries": 4, "update_interval": 5}
    config = Config(top_k=256, static_share=0.25, page=16, page_score=page_score, **fields)  # type: ignore[arg-type]
    world = World(config, "bfloat16", 64, 3, [900, 1500, 2311], room=3000, on_host=on_host)
    index = world.index
    assert isinstance(index, CudaIndex)
    evictions = SideStream(world.device)
    appended: dict[int, tuple[Tensor, SideWork]] = {}
    whole = [random_rows(n + 3000, 64, world.dtype) for n in world.context.lengths]
    first = list(world.context.lengths)
    for slot in range(3):
        world.prompt(slot, whole[slot][:, : first[slot]], torch.randn(KV_HEADS * 3, 64, 64).bfloat16())
        world.truth[slot] = whole[slot].cuda()
    steps: list[Step] = []
    moved, base = 0, torch.empty(0)
    for number in range(160):
        slots = chance.sample(range(3), chance.randint(1, 3))
        if number % 9 == 0:
            base = 2 * torch.randn(1, KV_HEADS * 3, 64)  # queries resemble each other for a while
        queries = (base + 0.3 * torch.randn(len(slots), KV_HEADS * 3, 64)).to(world.dtype).cuda()
        for slot in [slot for slot in slots if slot in appended and chance.random() < 0.4]:
            keys, work = appended.pop(slot)
            work.wait()
            start = world.context.lengths[slot]
            world.context.lengths[slot] += keys.shape[1]
            index.publish(slot, start, keys.shape[1])
        selection = world.select(queries, slots, number)
        rows = attend(world, selection, slots, number)
        for request, slot in enumerate(slots):
            steps.append(Step(slot, world.context.lengths[slot], selection.rows[request].clone(), rows[request]))
        for slot in slots:
            start, count = world.context.lengths[slot], chance.choice((16, 24, 40))
            if slot in appended or chance.random() < 0.5 or start + count > first[slot] + 3000:
                continue
            part = whole[slot][:, start : start + count].cuda()

            def evict(slot: int = slot, start: int = start, part: Tensor = part) -> None:
                world.context.extents.write(world.pool, slot, start, part.to(world.pool.device))
                index.append(slot, start, part[:, :, 0].contiguous())

            appended[slot] = (part, evictions.run(evict))
        index.refresh(slots)
        moved += len(index.updater)
        if number % 50 == 49:  # a slot ends while an update may be under way, and gets another prompt
            slot = chance.randrange(3)
            world.context.lengths[slot] = first[slot]
            appended.pop(slot, None)
            torch.cuda.synchronize()
            check_steps(world, steps)
            world.prompt(slot, whole[slot][:, : first[slot]], torch.randn(KV_HEADS * 3, 64, 64).bfloat16())
            world.truth[slot] = whole[slot].cuda()
    check_steps(world, steps)
    assert moved, "updates were under way"
    for slot in range(3):
        check_summaries(world, slot, world.context.lengths[slot])


def check_steps(world: World, steps: list[Step]) -> None:
    torch.cuda.synchronize()
    for step in steps:
        check_attended(world, step.slot, step.length, step.chosen.cpu(), step.rows)
    steps.clear()


def test_an_update_of_a_closed_slot_is_dropped() -> None:
    torch.manual_seed(5)
    config = Config(top_k=256, static_share=0.25, page=16, update_queries=4, update_interval=4, **BOXES)
    world = World(config, "bfloat16", 64, 3, [2000])
    rows = random_rows(2000, 64, world.dtype)
    world.prompt(0, rows, torch.randn(KV_HEADS * 3, 64, 64).bfloat16())
    index = world.index
    assert isinstance(index, CudaIndex)
    for step in range(4):
        world.select(torch.randn(1, KV_HEADS * 3, 64, device="cuda").bfloat16(), [0], step)
        index.refresh([0])
    assert len(index.updater) == 1
    world.prompt(0, rows, torch.randn(KV_HEADS * 3, 64, 64).bfloat16())
    before = world.static(0)
    for _ in range(PUBLISH_STEPS - 1):
        index.refresh([0])
    assert torch.equal(world.static(0), before)
    check_summaries(world, 0, 2000)
