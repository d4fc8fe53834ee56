"""ClusterKV's selection on the GPU against the reference with the same clusters: scores, rows, evictions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from tests.gpu.plugins import gpu_context
from tests.kernels.reference.codes import stores
from tests.plugins.clusterkv.settings import CENTROIDS
from tests.plugins.index_cases import KV_HEADS, extend, select, select_rows
from torch import Tensor

from kvseek.core.batch import Batch, RequestState
from kvseek.core.errors import KernelError
from kvseek.kernels.reference.codes.key_codes import estimate_at, round_lanes
from kvseek.kernels.reference.codes.rotation import rotate
from kvseek.plugins.clusterkv.config import Config
from kvseek.plugins.clusterkv.device import CudaIndex
from kvseek.plugins.clusterkv.reference import ReferenceIndex, expand, rows_taken
from kvseek.plugins.ranking import softmax_mean

LAYER = 4


make_context = partial(gpu_context.make_context, "clusterkv", layer=LAYER)


def random_keys(n: int, dim: int, dtype: str) -> Tensor:
    """Keys of unequal norms around a common direction, as keys after RoPE are; on the CPU."""
    return gpu_context.keys_of_slots([n], dim, dtype)[0]


def copy_clusters(found: CudaIndex, expected: ReferenceIndex) -> None:
    """Give the index on the GPU the reference's clusters; both have the same extents."""
    for name in ("centroids", "sizes", "starts", "places", "clusters", "spreads"):
        getattr(found, name).copy_(getattr(expected, name))
    if expected.codes is not None and found.codes is not None:
        stores.copy(expected.codes, found.codes)
    found.counts[:] = expected.counts
    found.prompt_tokens[:] = expected.prompt_tokens


def poison(index: ReferenceIndex) -> None:
    index.centroids.fill_(float("nan"))
    index.spreads.fill_(float("nan"))
    if index.codes is not None:
        stores.poison(index.codes)
    for array in (index.sizes, index.starts, index.places):
        array.fill_(-7)
    if isinstance(index, CudaIndex):
        index.workspace.scores.fill_(float("nan"))
        index.workspace.statistics.fill_(float("nan"))
        if index.reranker is not None:
            index.reranker.candidates.fill_(-7)
            index.reranker.estimates.fill_(float("nan"))
            index.reranker.normalisers.fill_(0x77)


def build(index: CudaIndex, slot: int, keys: Tensor) -> None:
    """Give a slot its prompt's keys, on the GPU, and wait for its clusters."""
    work = index.build(slot, keys, keys)
    if work is not None:
        work.wait()


def make_pair(
    config: Config, dtype: str, dim: int, group: int, lengths: Sequence[int]
) -> tuple[ReferenceIndex, CudaIndex]:
    """The same clusters, found by the reference, in it on the CPU and in the index on the GPU; all else is poisoned."""
    expected = ReferenceIndex(make_context(config, dtype, dim, group, lengths, "cpu"))
    found = CudaIndex(make_context(config, dtype, dim, group, lengths, "cuda"))
    poison(expected)
    poison(found)
    for slot, length in enumerate(lengths):
        keys = random_keys(length, dim, dtype)
        expected.build(slot, keys, keys)
    copy_clusters(found, expected)
    return expected, found


def batch_of(index: CudaIndex, positions: Sequence[int], slots: Sequence[int], dense: Sequence[int] = ()) -> Batch:
    lengths = index.context.lengths
    states = [
        RequestState(slot=slot, position=position, length=lengths[slot], dense=slot in dense)
        for slot, position in zip(slots, positions, strict=True)
    ]
    return Batch.of(states, index.context.extents.device_table)


pytestmark = pytest.mark.gpu

SHAPES = [*gpu_context.SHAPES, ("float16", 32, 16)]


def device_values(expected: ReferenceIndex, found: CudaIndex, slot: int) -> tuple[Tensor, Tensor]:
    """Scores that the first kernel left, float32 [G, lanes, C], and the values of the clusters that they give, [G, C]."""
    count = expected.counts[slot]
    scores = found.workspace.scores[slot].flatten(1, 2)[:, :count].transpose(1, 2).cpu()
    weights = (scores.double() * torch.log(torch.tensor(2.0, dtype=torch.float64))).softmax(dim=-1)
    return scores, weights.mean(dim=1)


def check_request(expected: ReferenceIndex, found: CudaIndex, queries: Tensor, slot: int, rows: Tensor) -> None:
    """Scores agree with the reference; given the scores, clusters are taken whole by value, and the last is cut.

    Rows [G, entries] are those of the selection, or with codes the candidates that it chose from.
    """
    config, n, wanted = expected.config, expected.context.lengths[slot], rows.shape[1]
    lanes = queries.view(KV_HEADS, -1, queries.shape[-1]).float()
    sizes, starts = (expected.read_clusters(array, slot) for array in (expected.sizes, expected.starts))
    exact = lanes @ expected.read_clusters(expected.centroids, slot).float().transpose(1, 2)
    if weight := config.spread_weight:
        spreads = expected.read_clusters(expected.spreads, slot)
        exact = exact + weight * lanes.norm(dim=-1, keepdim=True) * spreads[:, None]
    scale = expected.context.scaling * 1.4426950408889634
    scores, values = device_values(expected, found, slot)
    held = (sizes > 0)[:, None].expand_as(exact)
    torch.testing.assert_close(scores[held], (exact * scale)[held], rtol=1e-4, atol=1e-4)
    assert (scores[~held] == -torch.inf).all()
    kept = min(n, wanted)
    assert (rows[:, kept:] == -1).all()
    listed = expected.context.extents.read(expected.places, slot, n)
    for head in range(KV_HEADS):
        own = rows[head, :kept].long()
        assert len(set(own.tolist())) == kept, "no row twice"
        # Rows by cluster, from where they stand in the sorted list.
        place_of = torch.empty(n, dtype=torch.long)
        place_of[listed[head].long()] = torch.arange(n)
        cluster = torch.searchsorted((starts + sizes)[head].long().contiguous(), place_of[own], right=True)
        taken = torch.zeros(len(sizes[head]), dtype=torch.long).index_add_(0, cluster, torch.ones_like(cluster))
        assert (taken <= sizes[head]).all()
        cut = ((taken > 0) & (taken < sizes[head])).nonzero()[:, 0]
        assert len(cut) <= 1, "only the last cluster is cut"
        again = expand(starts[head, None], taken[None], wanted)[0, :kept]
        assert torch.equal(listed[head, again], rows[head, :kept]), "clusters ascend, and begin with their first rows"
        last = values[head][taken > 0].min()
        left = values[head][(taken == 0) & (sizes[head] > 0)]
        assert len(left) == 0 or left.max() <= last + 1e-4 * last.abs() + 1e-30, "no better cluster was left"
        if len(cut):
            assert values[head][cut[0]] <= last + 1e-4 * last.abs(), "the cut one is the last"


def check_reranked(expected: ReferenceIndex, found: CudaIndex, queries: Tensor, slot: int, rows: Tensor) -> None:
    """Of the candidates, rows are the best by their estimates up to rounding, in the candidates' order.

    `slot` is the number of the request as well; the last selection was the one that gave `rows` [G, top_k].
    """
    config, n = expected.config, expected.context.lengths[slot]
    assert found.reranker is not None
    assert expected.codes is not None
    tasks = slice(slot * KV_HEADS, (slot + 1) * KV_HEADS)
    candidates = found.reranker.candidates[tasks].cpu()
    check_request(expected, found, queries, slot, candidates)
    assert not found.reranker.finished.any(), "zeros between selections"
    count, kept = min(n, candidates.shape[1]), min(n, config.top_k)
    listed = candidates[:, :count].long()
    lanes = queries.view(KV_HEADS, -1, queries.shape[-1]).float()
    rounded = round_lanes(rotate(lanes, expected.codes.signs))
    estimates = estimate_at(expected.codes.read(slot, n), listed, rounded)
    left = found.reranker.estimates[tasks, :count].cpu().transpose(1, 2)
    torch.testing.assert_close(left, estimates, rtol=1e-4, atol=1e-4 * float(estimates.abs().max()))
    values = softmax_mean(estimates, expected.context.scaling)
    assert (rows[:, kept:] == -1).all()
    for head in range(KV_HEADS):
        entry_of = torch.full((n,), -1, dtype=torch.long)
        entry_of[listed[head]] = torch.arange(count)
        entries = entry_of[rows[head, :kept].long()]
        assert (entries >= 0).all(), "rows are candidates"
        assert (entries.diff() > 0).all(), "in their order, none twice"
        chosen = torch.zeros(count, dtype=torch.bool).index_fill_(0, entries, True)
        if count > kept:
            slack = 1e-4 * values[head].abs().max()
            assert values[head][~chosen].max() <= values[head][chosen].min() + slack, "no better one was left"


WAYS: dict[str, dict[str, Any]] = {
    "centroids": {"tokens_per_cluster": 40, **CENTROIDS},
    "spreads": {"spread_weight": 3.0, "rerank_bits": 0},
    "codes": {"candidates": 4},
}


@pytest.mark.parametrize("lengths", [[101, 1], [5000, 1024, 1025], [33_000, 3]], ids=str)
@pytest.mark.parametrize(
    ("way", "shape"), [(way, shape) for way in WAYS for shape in SHAPES if way != "codes" or shape[1] >= 64]
)
def test_selection(way: str, shape: tuple[str, int, int], lengths: list[int]) -> None:
    dtype, dim, group = shape
    torch.manual_seed(dim + group + len(lengths))
    config = Config(top_k=300, iterations=3, **WAYS[way])
    expected, found = make_pair(config, dtype, dim, group, lengths)
    queries = torch.randn(len(lengths), KV_HEADS * group, dim).to(getattr(torch, dtype))
    slots = list(range(len(lengths)))[:: 1 if way == "codes" else -1]  # with codes a request's number is its slot's
    rows = select_rows(found, queries.cuda(), slots).rows.cpu()
    assert [found.budget(lengths[slot]).rows for slot in slots] == [min(300, lengths[slot]) for slot in slots]
    for request, slot in enumerate(slots):
        check = check_reranked if way == "codes" else check_request
        check(expected, found, queries[request], slot, rows[request])


def test_more_candidates_than_shared_memory_holds() -> None:
    torch.manual_seed(5)
    config = Config(top_k=1500, iterations=1, candidates=4)
    assert config.rows_of_clusters > 4096
    expected, found = make_pair(config, "bfloat16", 128, 4, [33_000])
    queries = torch.randn(1, KV_HEADS * 4, 128).bfloat16()
    rows = select_rows(found, queries.cuda(), [0]).rows.cpu()
    check_reranked(expected, found, queries[0], 0, rows[0])


def test_equal_keys_are_taken_in_order() -> None:
    """Every score and every estimate is the same: the first candidates, which are the first places of the first clusters."""
    config = Config(top_k=100, tokens_per_cluster=8, iterations=1, candidates=4, spread_weight=0.0)
    _, found = make_pair(config, "bfloat16", 64, 2, [9000])
    found.centroids.fill_(0.5)
    codes = found.codes
    assert codes is not None
    codes.high.fill_(0x1B)
    codes.scales.fill_(1.0)
    codes.means.fill_(1)
    codes.mean_steps.fill_(1.0)
    queries = torch.randn(1, KV_HEADS * 2, 64, device="cuda").bfloat16()
    rows = select_rows(found, queries, [0]).rows[0]
    assert found.reranker is not None
    assert torch.equal(rows, found.reranker.candidates[:KV_HEADS, :100])


def test_prompts_are_encoded_beside_their_clustering() -> None:
    """Codes, spreads and clusters that the kernels made select as the reference does with the same arrays."""
    torch.manual_seed(8)
    config = Config(top_k=200, iterations=2)
    old, new = 3000, 40
    keys = random_keys(old + new, 128, "bfloat16")
    context = make_context(config, "bfloat16", 128, 4, [old], "cuda", room=new)
    index = CudaIndex(context)
    poison(index)
    build(index, 0, keys[:, :old].cuda())
    extend(index, 0, keys[:, old:].cuda())  # fewer than make a cluster: they join the last one
    expected = ReferenceIndex(make_context(config, "bfloat16", 128, 4, [old], "cpu", room=new))
    assert expected.codes is not None
    assert index.codes is not None
    expected.codes.append(0, 0, keys[:, :old])
    expected.context.lengths[0] = old + new
    expected.codes.append(0, old, keys[:, old:])
    stores.check_same_codes(index.codes, expected.codes, 0, old + new)
    for name in ("centroids", "sizes", "starts", "places", "clusters", "spreads"):
        getattr(expected, name).copy_(getattr(index, name))
    stores.copy(index.codes, expected.codes)
    expected.counts[:] = index.counts
    queries = torch.randn(1, KV_HEADS * 4, 128).bfloat16()
    check_reranked(expected, index, queries[0], 0, select_rows(index, queries.cuda(), [0]).rows[0].cpu())


@pytest.mark.parametrize("per_cluster", [1, 3])
@pytest.mark.parametrize("top_k", [1, 700, 5000])
def test_tiny_clusters_take_as_many_as_the_budget_needs(per_cluster: int, top_k: int) -> None:
    """Up to 5,000 clusters are taken, in several rounds of the block; clusters without keys are passed over."""
    torch.manual_seed(top_k)
    config = Config(tokens_per_cluster=per_cluster, top_k=top_k, iterations=2, **CENTROIDS)
    expected, found = make_pair(config, "bfloat16", 64, 2, [6000, 2000])
    queries = torch.randn(2, KV_HEADS * 2, 64).bfloat16()
    rows = select_rows(found, queries.cuda(), [0, 1]).rows.cpu()
    for slot in range(2):
        check_request(expected, found, queries[slot], slot, rows[slot])


def test_equal_scores_are_cut_by_number() -> None:
    """All centroids are the same, more than one block compares at once: the digits of their numbers decide."""
    config = Config(tokens_per_cluster=8, top_k=777, **CENTROIDS)
    expected, found = make_pair(config, "bfloat16", 64, 2, [16_000])
    expected.centroids.fill_(0.5)
    copy_clusters(found, expected)
    queries = torch.randn(1, KV_HEADS * 2, 64).bfloat16()
    sizes, starts = (expected.read_clusters(array, 0) for array in (expected.sizes, expected.starts))
    entries = expand(starts, rows_taken(torch.zeros(sizes.shape), sizes, 777), 777)
    listed = expected.context.extents.read(expected.places, 0, 16_000)
    assert torch.equal(select_rows(found, queries.cuda(), [0]).rows[0].cpu(), listed.gather(1, entries))


@pytest.mark.parametrize("tokens_per_cluster", [80, 500])
def test_one_cluster_larger_than_the_budget(tokens_per_cluster: int) -> None:
    torch.manual_seed(4)
    config = Config(tokens_per_cluster=tokens_per_cluster, top_k=60, iterations=2, **CENTROIDS)
    expected, found = make_pair(config, "bfloat16", 128, 4, [70_000 if tokens_per_cluster == 500 else 79])
    queries = torch.randn(1, KV_HEADS * 4, 128).bfloat16()
    check_request(expected, found, queries[0], 0, select_rows(found, queries.cuda(), [0]).rows[0].cpu())


def test_evicted_keys_become_visible_when_they_are_committed() -> None:
    """Growth by evictions on the GPU: clusters of their own, and some that join the last cluster."""
    torch.manual_seed(5)
    old, update, times = 1500, 40, 6
    keys = random_keys(old + update * times, 64, "bfloat16")
    config = Config(top_k=100, tokens_per_cluster=80, **CENTROIDS)
    context = make_context(config, "bfloat16", 64, 2, [old], "cuda", room=update * times)
    index = CudaIndex(context)
    poison(index)
    build(index, 0, keys[:, :old].cuda())
    expected = ReferenceIndex(make_context(config, "bfloat16", 64, 2, [old], "cpu", room=update * times))
    queries = torch.randn(1, KV_HEADS * 2, 64).bfloat16()
    for number in range(times):
        start = old + number * update
        before = select_rows(index, queries.cuda(), [0]).rows
        index.append(0, start, keys[:, start : start + update].cuda())
        assert torch.equal(select_rows(index, queries.cuda(), [0]).rows, before)
        context.lengths[0] = expected.context.lengths[0] = start + update
        index.publish(0, start, update)
        for name in ("centroids", "sizes", "starts", "places", "clusters"):
            getattr(expected, name).copy_(getattr(index, name))
        expected.counts[:] = index.counts
        check_request(expected, index, queries[0], 0, select_rows(index, queries.cuda(), [0]).rows[0].cpu())
        sizes = expected.read_clusters(expected.sizes, 0)
        assert (sizes.sum(dim=1) == start + update).all()
    assert expected.counts == [1500 // config.tokens_per_cluster + 3]
    listed = expected.context.extents.read(expected.places, 0, old + update * times)
    assert torch.equal(listed.sort(dim=1).values, torch.arange(old + update * times).int().expand(KV_HEADS, -1))
    last, places = expected.read_clusters(expected.centroids, 0)[:, -1], listed[:, -2 * update :].long()
    means = torch.stack([keys[head, places[head]].float().mean(dim=0) for head in range(KV_HEADS)])
    assert int(expected.read_clusters(expected.sizes, 0)[0, -1]) == 2 * update
    torch.testing.assert_close(last.float(), means, rtol=0.02, atol=0.02)


def test_a_slot_may_be_closed_while_its_prompt_is_clustered() -> None:
    """What is still running writes to the extents that the slot had, and nowhere else."""
    torch.manual_seed(7)
    n = 5000
    index = CudaIndex(make_context(Config(), "bfloat16", 64, 2, [n], "cuda"))
    poison(index)
    keys, extents = random_keys(n, 64, "bfloat16").cuda(), index.context.extents
    owned = extents.table[0].tolist()
    work = index.build(0, keys, keys)
    extents.release(0)
    assert work is not None
    work.wait()
    places = index.places.cpu()
    listed = places[owned].transpose(0, 1).flatten(1)[:, :n]
    assert torch.equal(listed.sort(dim=1).values, torch.arange(n, dtype=torch.int32).expand(KV_HEADS, -1))
    assert (places[[extent for extent in range(extents.capacity) if extent not in owned]] == -7).all()


def test_dense_layers_select_nothing() -> None:
    index = CudaIndex(make_context(Config(), "bfloat16", 64, 2, [2000], "cuda", room=320, layer=1))
    keys = random_keys(2320, 64, "bfloat16").cuda()
    build(index, 0, keys[:, :2000])
    extend(index, 0, keys[:, 2000:])
    queries = torch.randn(1, KV_HEADS * 2, 64, device="cuda").bfloat16()
    assert select(index, queries, [0]) is None
    assert index.budget(2320).rows == 2320


def test_queries_of_another_dtype_are_refused() -> None:
    _, index = make_pair(Config(iterations=1), "bfloat16", 64, 2, [300])
    with pytest.raises(KernelError, match=r"queries: torch\.float32 on cuda:0: must be torch\.bfloat16 on cuda"):
        select(index, torch.randn(1, KV_HEADS * 2, 64, device="cuda"), [0])
