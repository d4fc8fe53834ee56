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
    check_sorting,
    check_summaries,
    make_pair,
    random_rows,
    token_numbers,
)
from tests.plugins.codes import stores
from tests.plugins.prkv.settings import BOXES
from torch import Tensor

from kvseek.core.streams import SideStream, Ticket
from kvseek.plugins.prkv.config import PAGE_SCORES, Config
from kvseek.plugins.prkv.device import CudaIndex
from kvseek.plugins.prkv.summaries import Boxes, Codes
from kvseek.plugins.prkv.update import PUBLISH_STEPS

pytestmark = pytest.mark.gpu


def copy_summaries(source: World, target: World) -> None:
    summaries, others = source.arrays.summaries, target.arrays.summaries
    if isinstance(summaries, Boxes) and isinstance(others, Boxes):
        others.boxes.copy_(summaries.boxes)
    elif isinstance(summaries, Codes) and isinstance(others, Codes):
        stores.copy(summaries.store, others.store)


@pytest.mark.parametrize("page_score", PAGE_SCORES)
@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("scope", ["all", "selected"])
@pytest.mark.parametrize(("dtype", "dim", "group", "page"), SHAPES[:5])
def test_an_update_is_that_of_the_reference(
    dtype: str, dim: int, group: int, page: int, scope: str, on_host: bool, page_score: str
) -> None:
    """Same queries, same pages counted: then the same static set, but for near ties."""
    torch.manual_seed(dim)
    config = Config(
        top_k=512,
        static_share=0.25,
        page=page,
        page_score=page_score,
        update_scope=scope,
        update_pages=20,
        window_queries=8,
        update_interval=8,
    )
    n = 4001
    expected, found = make_pair(config, dtype, dim, group, [n], on_host)
    found.pool.copy_(expected.pool)  # near ties at the prompt: the reference's order for both
    for name in ("static_rows", "homes"):
        getattr(found.arrays, name).copy_(getattr(expected.arrays, name))
    copy_summaries(expected, found)
    queries = torch.randn(8, 1, KV_HEADS * group, dim).to(found.dtype)
    for step in range(8):
        expected.select(queries[step], [0])
        found.select(queries[step].cuda(), [0], step + 5)
        found.arrays.picked.copy_(expected.arrays.picked)  # near ties of pages
        for world in (expected, found):
            world.index.refresh([0])
    torch.cuda.synchronize()
    assert found.arrays.static_rows[0] == 128
    before = token_numbers(found.places(0))
    for _ in range(PUBLISH_STEPS - 1):
        found.index.refresh([0])
    torch.cuda.synchronize()
    assert torch.equal(before, token_numbers(found.places(0))), "not before its step, however early it is ready"
    found.index.refresh([0])  # publishes
    torch.cuda.synchronize()
    want, have = token_numbers(expected.places(0)), token_numbers(found.places(0))
    assert torch.equal(have.sort(dim=1).values, torch.arange(n).expand(KV_HEADS, -1)), "still a permutation"
    assert not torch.equal(before, have)
    for head in range(KV_HEADS):
        same = len(set(want[head, :128].tolist()) & set(have[head, :128].tolist()))
        assert same >= 124, "near ties alone differ"
    check_summaries(found, 0, n)
    assert not found.arrays.by_page(found.arrays.picked, 0, n // page * page).any()


@dataclass
class Step:
    """What a step attended to, to be checked when the device has caught up."""

    slot: int
    length: int
    chosen: Tensor
    rows: Tensor


@pytest.mark.parametrize("page_score", PAGE_SCORES)
@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("scope", ["all", "selected"])
def test_every_step_sees_one_order(scope: str, on_host: bool, page_score: str) -> None:
    """Steps, evictions, updates and reopened slots, interleaved at random; nothing waits for the side streams."""
    torch.manual_seed(4)
    chance = random.Random(4)
    fields = {"update_scope": scope, "update_pages": 24, "window_queries": 4, "update_interval": 5}
    config = Config(top_k=256, static_share=0.25, page=16, page_score=page_score, **fields)  # type: ignore[arg-type]
    world = World(config, "bfloat16", 64, 3, [900, 1500, 2311], room=3000, on_host=on_host)
    index = world.index
    assert isinstance(index, CudaIndex)
    evictions = SideStream(world.device)
    appended: dict[int, tuple[Tensor, Ticket]] = {}
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
            keys, ticket = appended.pop(slot)
            ticket.wait()
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
        n = world.context.lengths[slot]
        tokens = token_numbers(world.places(slot))
        assert torch.equal(tokens.sort(dim=1).values, torch.arange(n).expand(KV_HEADS, -1))
        check_sorting(world, slot, (0, 1024, n)[slot])


def check_steps(world: World, steps: list[Step]) -> None:
    torch.cuda.synchronize()
    for step in steps:
        check_attended(world, step.slot, step.length, step.chosen.cpu(), step.rows)
    steps.clear()


def test_an_update_of_a_closed_slot_is_dropped() -> None:
    torch.manual_seed(5)
    fields = {"window_queries": 4, "update_interval": 4, "update_scope": "all"}
    config = Config(top_k=256, static_share=0.25, page=16, **BOXES, **fields)  # type: ignore[arg-type]
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
    before = world.places(0)
    for _ in range(PUBLISH_STEPS):
        index.refresh([0])
    assert torch.equal(world.places(0), before)
