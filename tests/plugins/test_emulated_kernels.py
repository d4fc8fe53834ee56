"""Kernels of selections for a GPU, without one: threads are emulated (tests/support/emulated_kernels.py).

The checks are those of tests/gpu/plugins, at sizes that an emulation does in seconds. Races, and what other kernels do at the
same time, only a GPU shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gpu.plugins import gpu_context, prkv_world
from tests.gpu.plugins import test_batches as batch_checks
from tests.gpu.plugins import test_clusterkv as clusterkv_checks
from tests.gpu.plugins import test_ctkvr as ctkvr_checks
from tests.gpu.plugins import test_nested as nested_checks
from tests.gpu.plugins.gpu_context import check_shared_extents
from tests.plugins.index_cases import KV_HEADS, select_rows
from tests.support.emulated_kernels import EmulatedKernels, emulated_kernels
from torch import Tensor

from kvseek.builder.compile.cuda import Specialisation
from kvseek.core.index_context import LayerRows
from kvseek.plugins.clusterkv.config import Config as ClusterConfig
from kvseek.plugins.ctkvr.build import build_lists
from kvseek.plugins.ctkvr.config import Config as CTkvrConfig
from kvseek.plugins.nested.config import Config as NestedConfig
from kvseek.plugins.prkv.config import Config as PRKVConfig
from kvseek.plugins.prkv.static import observation_scores
from kvseek.plugins.prkv.update import PUBLISH_STEPS
from kvseek.plugins.registry import get_method

pytestmark = pytest.mark.slow
HOST = torch.device("cpu")
# dtype, head_dim, group size
SHAPES = [("bfloat16", 128, 4), ("float32", 96, 3), ("float16", 64, 7), ("bfloat16", 256, 16)]


def kernels_of(method: str, config: Any, dtype: str, dim: int, group: int) -> EmulatedKernels:
    macros = get_method(method).traits(config).cuda_macros(dim, group)
    return emulated_kernels(Specialisation(dtype, dim, group, method, tuple(sorted(macros.items()))))


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the checks put on a GPU stays on the CPU."""
    for module, name, value in (
        (gpu_context, "PLACE", HOST),
        (ctkvr_checks, "CUDA", HOST),
        (gpu_context, "method_kernels", kernels_of),
        (ctkvr_checks, "method_kernels", kernels_of),
        (torch.Tensor, "cuda", lambda tensor: tensor),
        (torch.cuda, "synchronize", lambda: None),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize(("dtype", "dim", "group"), SHAPES)
def test_nested(dtype: str, dim: int, group: int) -> None:
    """Rows of two regions, one of which is taken whole; codes that a kernel wrote."""
    torch.manual_seed(dim + group)
    lengths = [2500, 101]
    index = nested_checks.make_index(NestedConfig(), dtype, dim, group, gpu_context.keys_of_slots(lengths, dim, dtype))
    queries = (3 * torch.randn(2, KV_HEADS * group, dim)).to(getattr(torch, dtype))
    rows = select_rows(index, queries, [1, 0]).rows
    for request, slot in enumerate((1, 0)):
        nested_checks.check_request(index, queries, request, slot, rows[request])


def test_more_candidates_than_nested_holds() -> None:
    torch.manual_seed(5)
    keys = gpu_context.keys_of_slots([3000], 64, "bfloat16")
    index = nested_checks.make_index(NestedConfig(top_k=300), "bfloat16", 64, 2, keys)
    queries = torch.randn(1, KV_HEADS * 2, 64, dtype=torch.bfloat16)
    nested_checks.check_request(index, queries, 0, 0, select_rows(index, queries, [0]).rows[0])


def test_a_bad_query_hurts_no_other_request_of_nested() -> None:
    torch.manual_seed(6)
    batch_checks.check_bad_queries(batch_checks.make_index("nested", {}, [1500] * 4))


@pytest.mark.parametrize("shape", [("bfloat16", 128, 4), ("float32", 96, 3)])
def test_slots_of_nested_may_share_extents(shape: tuple[str, int, int]) -> None:
    check_shared_extents("nested", NestedConfig(), shape, nested_checks.CudaIndex)


@pytest.mark.parametrize(
    ("fields", "shape"),
    [({"rerank_bits": 2}, SHAPES[0]), ({"rerank_bits": 2}, SHAPES[1]), ({"rerank_bits": 0}, SHAPES[2])],
)
def test_clusterkv(fields: dict[str, Any], shape: tuple[str, int, int]) -> None:
    """Spread-aware scores; with and without a rerank by codes."""
    dtype, dim, group = shape
    torch.manual_seed(dim)
    lengths = [2100, 40]
    config = ClusterConfig(top_k=60, iterations=2, candidates=4, **fields)
    expected, found = clusterkv_checks.make_pair(config, dtype, dim, group, lengths)
    queries = torch.randn(2, KV_HEADS * group, dim).to(getattr(torch, dtype))
    rows = select_rows(found, queries, [0, 1]).rows
    check = clusterkv_checks.check_reranked if config.rerank_bits else clusterkv_checks.check_request
    for slot in range(2):
        check(expected, found, queries[slot], slot, rows[slot])


def observe(queries: Tensor, keys: Tensor, scaling: float, valid: Tensor | None = None) -> Tensor:
    """PRKV's kernel for it is not emulated."""
    counted = None if valid is None else torch.arange(keys.shape[1]) < valid[:, None]
    return observation_scores(queries, keys, scaling, counted)


@pytest.fixture
def observing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvseek.plugins.prkv.device.observe", lambda kernels, *given: observe(*given))
    monkeypatch.setattr("kvseek.plugins.prkv.device.require_rows", lambda *given: None)  # they are not on a GPU


# Boxes of 16-bit numbers are scored by instructions that are not emulated.
@pytest.mark.parametrize(
    ("page", "page_score", "shape"),
    [(8, "codes", SHAPES[0]), (16, "codes", SHAPES[2]), (128, "codes", SHAPES[3]), (16, "box", SHAPES[1])],
)
@pytest.mark.usefixtures("observing")
def test_prkv(page: int, page_score: str, shape: tuple[str, int, int]) -> None:
    """Prompts of which one is short, an update, and rows that leave the window while it is under way."""
    dtype, dim, group = shape
    torch.manual_seed(dim)
    fields = {"update_queries": 4, "update_interval": 4, "update_pages": 20}
    config = PRKVConfig(top_k=512, page=page, page_score=page_score, **fields)  # type: ignore[arg-type]
    lengths = [2125, 513, 5]
    world = prkv_world.World(config, dtype, dim, group, lengths, on_host=False, room=128)
    for slot, n in enumerate(lengths):
        rows = prkv_world.random_rows(n + 128, dim, world.dtype)
        world.prompt(slot, rows[:, :n], torch.randn(KV_HEADS * group, 100, dim).to(world.dtype))
        world.truth[slot] = rows
    before = [world.static(slot) for slot in range(3)]
    for step in range(4 + PUBLISH_STEPS + 1):
        queries = (2 * torch.randn(3, KV_HEADS * group, dim)).to(world.dtype)
        rows = world.select(queries, [1, 0, 2], step).rows
        for request, slot in enumerate((1, 0, 2)):
            prkv_world.check_request(world, queries[request], slot, rows[request])
        world.index.refresh([0, 1, 2])
        if step == 6:
            for slot, n in enumerate(lengths):
                part = world.truth[slot][:, n : n + 64]
                world.context.extents.write(world.pool, slot, n, part)
                world.index.append(slot, n, part[:, :, 0].contiguous())
                world.context.lengths[slot] += 64
                world.index.publish(slot, n, 64)
    for slot in range(3):
        prkv_world.check_summaries(world, slot, world.context.lengths[slot])
        assert slot == 2 or not torch.equal(world.static(slot), before[slot])


@pytest.mark.parametrize(
    ("execution", "dtype", "dim", "group"), [("cpu", *SHAPES[0]), *(("codes", *shape) for shape in SHAPES[1:])]
)
def test_ctkvr(execution: str, dtype: str, dim: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places recalled and reranked by keys or codes, and the centroids that steps add."""
    torch.manual_seed(dim)
    lengths = [1100, 47]
    cache = ctkvr_checks.make_cache((dtype, dim, group), lengths)
    config = CTkvrConfig(top_k=48, centroids=24, recent=64, execution=execution)
    monkeypatch.setattr(LayerRows, "on_host", False)  # not host cores rank keys, but kernels
    index = ctkvr_checks.make_index((dtype, dim, group), config, cache)

    def build(last: Tensor, keys: Tensor, lists: Tensor) -> None:
        lists[:, : last.shape[1]] = build_lists(last, keys, index.width, index.context.scaling)

    monkeypatch.setattr(index._builder, "build", build)  # its kernels are not emulated
    for slot, length in enumerate(lengths):
        ctkvr_checks.build(index, cache, slot, length)
    twin = ctkvr_checks.Twin(index)
    for _ in range(2):
        twin.step(ctkvr_checks.random_queries(index, 2), [1, 0])


def test_a_request_of_nested_selects_the_same_rows_in_any_batch() -> None:
    """With queries that hardly tell keys apart, so that the last bit of a normaliser would show."""
    torch.manual_seed(3)
    index = batch_checks.make_index("nested", {}, [5000, 700, 2600, 300])
    batch_checks.check_batches(index, 1e-4, (2, 4), 3)


def test_positions_of_a_slot_of_nested_select_what_each_selects_alone() -> None:
    """Slots 3 and 4 attend to everything. Of 16 requests not all have a block of their own."""
    torch.manual_seed(4)
    index = batch_checks.make_index("nested", {}, [5000, 700, 2600, 300, 40, *[0] * 12], shares_extents=True)
    batches = ([0] * 4, [1, 0, 0, 3, 2, 2, 2, 2, 2], [0] * 6 + [4] + [2] * 2, [0, 1] * 3, [0] * 16)
    batch_checks.check_positions(index, batches)


def test_a_block_may_scan_more_keys_of_nested_together_than_a_count_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    nested_checks.test_a_block_may_scan_more_keys_together_than_a_count_holds(monkeypatch)
