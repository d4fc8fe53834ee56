"""PRKV's new static sets on the GPU: what they are, and that every step sees one order of the rows."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from tests.gpu.plugins.prkv_world import (
    KV_HEADS,
    SHAPES,
    World,
    attend,
    check_attended,
    check_request,
    check_summaries,
    make_pair,
    picked_of,
    random_rows,
)
from tests.plugins.prkv.settings import BOXES
from torch import Tensor

from kvseek.core.streams import SideStream, SideWork
from kvseek.plugins.prkv.config import PAGE_SCORES, Config
from kvseek.plugins.prkv.device import CudaIndex
from kvseek.plugins.prkv.update import PUBLISH_STEPS

pytestmark = pytest.mark.gpu


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
