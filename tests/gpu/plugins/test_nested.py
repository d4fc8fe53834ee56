"""The CUDA kernels of nested codes against the PyTorch reference: codes, candidates, rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from tests.gpu.plugins import gpu_context
from tests.gpu.plugins.gpu_context import check_shared_extents
from tests.kernels.reference.codes import stores
from tests.plugins.index_cases import KV_HEADS, context_of, select_rows
from torch import Tensor

from kvseek.core.extents import ExtentTable
from kvseek.kernels.reference.codes.key_codes import estimate_at
from kvseek.plugins.nested import device
from kvseek.plugins.nested.config import Config
from kvseek.plugins.nested.device import HELD_CANDIDATES, CudaIndex
from kvseek.plugins.nested.reference import ReferenceIndex
from kvseek.plugins.ranking import softmax_mean
from kvseek.plugins.registry import get_method

pytestmark = pytest.mark.gpu

# A bin holds scores that differ by less than 1 / 64 of them, after rounding to float16.
BIN = 1 / 60
make_context = partial(gpu_context.make_context, "nested")


def make_index(config: Config, dtype: str, dim: int, group: int, keys: Sequence[Tensor], room: int = 0) -> CudaIndex:
    """An index on the GPU of these keys, whose arrays start poisoned."""
    lengths = [part.shape[1] for part in keys]
    index = CudaIndex(make_context(config, dtype, dim, group, lengths, "cuda", room=room))
    index.workspace.scores.fill_(-7)
    stores.poison(index.codes)
    for slot, part in enumerate(keys):
        index.build(slot, part.cuda(), part.cuda())
    return index


def make_reference(config: Config, dtype: str, dim: int, group: int, keys: Sequence[Tensor]) -> ReferenceIndex:
    lengths = [part.shape[1] for part in keys]
    index = ReferenceIndex(make_context(config, dtype, dim, group, lengths, "cpu"))
    for slot, part in enumerate(keys):
        index.build(slot, part, part)
    return index


@pytest.mark.parametrize(("dtype", "dim", "group"), gpu_context.SHAPES)
def test_keys_are_encoded_as_by_the_reference(dtype: str, dim: int, group: int) -> None:
    torch.manual_seed(dim + group)
    config = Config()
    keys = gpu_context.keys_of_slots([6, 1023, 1030, 5000], dim, dtype)
    expected, found = make_reference(config, dtype, dim, group, keys), make_index(config, dtype, dim, group, keys)
    for slot, part in enumerate(keys):
        stores.check_same_codes(found.codes, expected.codes, slot, part.shape[1])
        want, have = expected.codes.read(slot, part.shape[1]), found.codes.read(slot, part.shape[1])
        torch.testing.assert_close(have.scales.cpu(), want.scales, rtol=1e-2, atol=0)


def test_zero_and_huge_keys() -> None:
    config = Config()
    keys = torch.randn(KV_HEADS, 70, 64)
    keys[:, 3] = 0
    keys[0, 4] *= 1e6
    keys[1] = 1.0  # all keys are the mean: only its rounding is left of them
    expected, found = make_reference(config, "float32", 64, 1, [keys]), make_index(config, "float32", 64, 1, [keys])
    want, have = expected.codes.read(0, 70), found.codes.read(0, 70)
    assert torch.isfinite(have.scales).all()
    assert (have.scales[1] < 1e-3).all()
    torch.testing.assert_close(have.scales[0].cpu(), want.scales[0], rtol=1e-2, atol=0)


@pytest.mark.parametrize("lengths", [[101, 1], [5000, 1024, 1025], [70_000, 3]], ids=str)
@pytest.mark.parametrize(("dtype", "dim", "group"), gpu_context.SHAPES)
def test_selection(dtype: str, dim: int, group: int, lengths: list[int]) -> None:
    torch.manual_seed(dim + group + len(lengths))
    index = make_index(Config(), dtype, dim, group, gpu_context.keys_of_slots(lengths, dim, dtype))
    queries = (3 * torch.randn(len(lengths), KV_HEADS * group, dim)).to(getattr(torch, dtype)).cuda()
    slots = list(reversed(range(len(lengths))))
    selection = select_rows(index, queries, slots)
    for request, slot in enumerate(slots):
        check_request(index, queries, request, slot, selection.rows[request])


def test_a_block_may_have_more_groups_of_scores_than_it_tells_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block a task, as in large batches, and a region of 36 groups of 1,024 scores for each of its warps."""
    monkeypatch.setattr(device, "MOST_BLOCKS", 1)
    torch.manual_seed(5)
    length = 36 * 1024 * 16
    index = make_index(Config(), "bfloat16", 64, 2, gpu_context.keys_of_slots([length], 64, "bfloat16"))
    assert index.workspace.grids(1)[1] == 1
    queries = (3 * torch.randn(1, KV_HEADS * 2, 64)).bfloat16().cuda()
    check_request(index, queries, 0, 0, select_rows(index, queries, [0]).rows[0])


def test_a_block_may_scan_more_keys_together_than_a_count_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block for each of two positions of a slot whose extents are two, again and again; nearly all keys have one score."""
    monkeypatch.setattr(device, "MOST_BLOCKS_OF_SCAN", 1)
    torch.manual_seed(6)
    keys, lengths = torch.ones(KV_HEADS, 2048, 64), [2048, 160 * 1024]
    keys[:, :5] = torch.randn(KV_HEADS, 5, 64)
    table = ExtentTable(3, 160, 4, gpu_context.PLACE)
    cuda = gpu_context.method_kernels("nested", Config(), "bfloat16", 64, 2)
    fields = {"dtype": torch.bfloat16, "device": gpu_context.PLACE, "cuda": cuda, "shares_extents": True}
    fields["codebooks"] = get_method("nested").traits(Config()).codebooks(64)
    index = CudaIndex(context_of(Config(), 64, 2, table, [*lengths, 0], **fields))
    table.reserve(0, lengths[0])
    table.reserve(1, lengths[1], 80 * table.of_slot(0))
    index.build(0, keys.bfloat16().cuda(), keys.bfloat16().cuda())
    work, launch = index.workspace, index.workspace.launch
    monkeypatch.setattr(
        work, "launch", lambda name, *given, **more: launch(name, *given, **more) if name == "nested_scan" else None
    )

    def counts(queries: Tensor, slots: list[int]) -> Tensor:
        work.totals.zero_()
        select_rows(index, queries, slots)
        return work.totals[: len(slots) * KV_HEADS].clone()

    queries = torch.randn(2, KV_HEADS * 2, 64).bfloat16().cuda()
    together = counts(queries, [1, 1])
    assert (together.amax(dim=1) > work.grids(2)[0] * 0xFFFF).all()
    assert torch.equal(together, torch.cat([counts(queries[[number]], [1]) for number in range(2)]))


def check_request(index: CudaIndex, queries: Tensor, request: int, slot: int, rows: Tensor) -> None:
    """Candidates are the keys of the best scores, and rows the best of the candidates, both up to rounding."""
    config, n = index.config, index.context.lengths[slot]
    codes = index.codes.read(slot, n)
    lanes = index.lanes(queries[request].view(KV_HEADS, -1, queries.shape[-1]))
    scores = index.scores(lanes, slot, n)
    (wanted,) = index.budget(n).method_fields
    kept = min(n, config.top_k)
    assert (rows[:, kept:] == -1).all()
    assert (rows[:, :kept].diff(dim=-1) > 0).all(), "rows ascend"
    for head, listed in enumerate(candidates(index, queries[[request]], slot, rows)):
        assert (listed.diff() > 0).all(), "candidates ascend"
        assert min(n, wanted) <= len(listed) <= index.workspace.capacity
        is_listed = torch.zeros(n, dtype=torch.bool, device=rows.device).index_fill_(0, listed, True)
        worst, best_left = scores[head][is_listed].min(), scores[head][~is_listed].amax() if len(listed) < n else None
        assert best_left is None or best_left <= worst + BIN * worst.abs() + 1e-6
        estimates = estimate_at(codes, listed.expand(KV_HEADS, -1), lanes)[head : head + 1]
        values = softmax_mean(estimates, index.context.scaling)[0]
        own = rows[head, :kept].long()
        entries = torch.searchsorted(listed, own)
        assert torch.equal(listed[entries], own), "rows are candidates"
        chosen = torch.zeros(len(listed), dtype=torch.bool, device=rows.device).index_fill_(0, entries, True)
        if len(listed) > kept:
            assert values[~chosen].max() <= values[chosen].min() + 1e-5 * values.abs().max()


def candidates(index: CudaIndex, queries: Tensor, slot: int, rows: Tensor) -> list[Tensor]:
    """The candidates of each KV head of a request, as its selection alone lists them; it gives the same rows."""
    assert torch.equal(select_rows(index, queries, [slot]).rows[0], rows)
    _, blocks = index.workspace.grids(1)
    counts = index.workspace.counts.flatten().tolist()
    places = index.workspace.places.flatten(0, 1).long()
    return [
        torch.cat([places[block, : counts[block]] for block in range(head * blocks, (head + 1) * blocks)])
        for head in range(KV_HEADS)
    ]


def test_evicted_keys_become_visible_when_they_are_published() -> None:
    config = Config()
    old, new = 1000, 256
    keys = gpu_context.keys_of_slots([old + new], 128, "bfloat16")[0]
    index = make_index(config, "bfloat16", 128, 4, [keys[:, :old]], room=new)
    queries = torch.randn(1, KV_HEADS * 4, 128, dtype=torch.bfloat16, device="cuda")
    before = select_rows(index, queries, [0]).rows
    index.append(0, old, keys[:, old:].cuda())
    assert torch.equal(select_rows(index, queries, [0]).rows, before)
    index.publish(0, old, new)
    index.context.lengths[0] = old + new
    check_request(index, queries, 0, 0, select_rows(index, queries, [0]).rows[0])


def test_more_candidates_than_shared_memory_holds() -> None:
    torch.manual_seed(5)
    config = Config(top_k=300)
    assert config.top_k * config.candidates > HELD_CANDIDATES
    index = make_index(config, "bfloat16", 128, 4, gpu_context.keys_of_slots([100_000], 128, "bfloat16"))
    queries = torch.randn(1, KV_HEADS * 4, 128, dtype=torch.bfloat16, device="cuda")
    check_request(index, queries, 0, 0, select_rows(index, queries, [0]).rows[0])


@pytest.mark.parametrize("top_k", [100, 1500])
def test_equal_keys_are_taken_in_order(top_k: int) -> None:
    """Every score and every estimate is the same: the first candidates, and of those the first rows."""
    n = 30_000
    keys = torch.randn(KV_HEADS, 1, 128, dtype=torch.bfloat16).expand(-1, n, -1).contiguous()
    index = make_index(Config(top_k=top_k), "bfloat16", 128, 4, [keys])
    queries = torch.randn(1, KV_HEADS * 4, 128, dtype=torch.bfloat16, device="cuda")
    rows = select_rows(index, queries, [0]).rows[0].cpu()
    assert torch.equal(rows, torch.arange(top_k, dtype=torch.int32).expand(KV_HEADS, -1))


@pytest.mark.parametrize("shape", [("bfloat16", 128, 4), ("float32", 64, 2)])
def test_slots_may_share_extents(shape: tuple[str, int, int]) -> None:
    check_shared_extents("nested", Config(), shape, CudaIndex)
