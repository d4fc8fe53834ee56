"""CTkvr's centroids: the mean that is subtracted, whose it is, and what it is good for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.plugins.ctkvr.bench import DIM, GROUP, SMALL, Bench, centroids_of, exact_rows, head_queries, make, one_query
from tests.plugins.index_cases import KV_HEADS, random_keys
from torch import Tensor

from kvseek.plugins.ctkvr.centroids import cosines, make_centroids, prompt_means
from kvseek.plugins.ctkvr.reference import ReferenceIndex

HEADS = KV_HEADS * GROUP


def check_prompt(index: ReferenceIndex, slot: int, queries: Tensor, count: int) -> None:
    """A slot's first centroids are the last `count` of queries [H, w, D], oldest first, less their mean."""
    last = queries[:, queries.shape[1] - count :]
    means = last.double().mean(dim=1).float()
    expected = centroids_of(last, means)
    assert index.written[slot] == count
    torch.testing.assert_close(index.means[slot], means)
    torch.testing.assert_close(index.centroids[slot, :, :count], expected)
    offsets = (expected.double() * means[:, None].double()).sum(dim=-1).float()
    torch.testing.assert_close(index.offsets[slot, :, :count], offsets)


def test_centroids_are_the_last_queries_less_their_mean() -> None:
    bench = make(SMALL, [777, 1500])
    for slot, count in ((0, 49), (1, 94)):
        check_prompt(bench.index, slot, bench.prompts[slot], count)
    assert (bench.index.means[0] - bench.index.means[1]).abs().max() > 0.1, "each prompt has its own"


def test_without_centring_they_are_the_papers() -> None:
    bench = make(replace(SMALL, centred=False), [777])
    last = bench.prompts[0][:, -49:]
    assert torch.equal(bench.index.centroids[0, :, :49], last / last.norm(dim=-1, keepdim=True))
    bench.step(one_query(3))
    assert torch.equal(bench.index.centroids[0, :, 49], one_query(3) / one_query(3).norm(dim=-1, keepdim=True))
    assert (bench.index.offsets[0, :, :50] == 0).all()
    assert (bench.index.means == 0).all()


def test_a_new_centroid_is_less_the_mean_of_its_prompt() -> None:
    bench = make(SMALL, [777, 900])
    index, query = bench.index, one_query(3)
    means = index.means.clone()
    bench.step(query, 1)
    expected = centroids_of(query[:, None], means[1])
    torch.testing.assert_close(index.centroids[1, :, 57:58], expected)
    torch.testing.assert_close(index.offsets[1, :, 57:58], (expected * means[1][:, None]).sum(dim=-1))
    assert torch.equal(index.means, means)


def test_a_region_that_grew_from_nothing_has_no_mean() -> None:
    bench = make(SMALL, [300], room=100)
    bench.context.lengths[0] = 0  # another request without retrieval tokens takes the slot
    bench.build(0, head_queries(5, seed=3))
    assert (bench.index.means[0] == 0).all()
    bench.grow(0, random_keys(60, DIM, seed=4))
    query = one_query(3)
    bench.step(query)
    assert torch.equal(bench.index.centroids[0, :, 0], query / query.norm(dim=-1, keepdim=True))
    assert (bench.index.offsets[0, :, 0] == 0).all()
    assert (bench.step(one_query(4)) >= 0).all()


def test_a_query_that_is_the_mean_has_cosine_zero() -> None:
    bench = make(SMALL, [30], queries=1)  # one centroid, so that it is its mean
    index, query = bench.index, bench.prompts[0][:, 0]
    assert (index.centroids[0, :, 0] == 0).all()
    assert (index.offsets[0, :, 0] == 0).all()
    assert (cosines(query, index.centroids[0, :, :1], index.means[0], index.offsets[0, :, :1]) == 0).all()
    assert (bench.step(query) >= 0).all()
    assert (bench.step(one_query(3)) >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_offsets_belong_to_the_centroids_as_stored(dtype: torch.dtype) -> None:
    """However the centroids are rounded, cosines are those of the difference with the stored centroid."""
    queries, query = head_queries(200, seed=1).to(dtype), one_query(2).to(dtype)
    means = prompt_means(queries, centred=True)
    centroids, offsets = make_centroids(queries, means, dtype)
    assert (centroids.dtype, means.dtype, offsets.dtype) == (dtype, torch.float32, torch.float32)
    difference = query.double() - means.double()
    products = (centroids.double() @ difference[..., None])[..., 0]
    expected = (products / difference.norm(dim=-1, keepdim=True)).float()
    found = cosines(query, centroids, means, offsets)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert found.abs().max() < 0.9, "cosines of the queries themselves are near 1 in some heads"


@pytest.mark.parametrize("centred", [True, False])
def test_a_part_that_all_queries_share_does_not_matter(centred: bool) -> None:
    """With the mean subtracted the same centroids are probed, whatever is added to all queries of a head."""
    common = 3 * head_queries(1, seed=8)
    probed = []
    for shift in (0, common):
        bench = Bench(replace(SMALL, centred=centred), [random_keys(777, DIM)])
        bench.build(0, head_queries(300, seed=1) + shift)
        bench.index.refresh([0])
        probed.append([bench.index.probe((head_queries(1, seed) + shift)[:, 0], 0).tolist() for seed in range(8)])
    assert (probed[0] == probed[1]) == centred


def shared_part_recall(centred: bool, shared: float) -> float:
    """Share of the true best rows selected where queries are a shared part, which no key answers, and a topic."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def across(vectors: Tensor) -> Tensor:
        return vectors - (vectors * common).sum(dim=-1, keepdim=True) * common

    common = torch.nn.functional.normalize(normal(KV_HEADS, 1, DIM), dim=-1)
    topics = torch.nn.functional.normalize(across(normal(KV_HEADS, 32, DIM)), dim=-1)
    own = torch.randint(0, 32, (4000,), generator=generator)
    keys = across(3 * topics[:, own] + 0.7 * normal(KV_HEADS, 4000, DIM))

    def queries(count: int) -> Tensor:
        asked = torch.randint(0, 32, (count,), generator=generator)
        strength = 0.5 + 2.5 * torch.rand(count, 1, generator=generator)
        topical = (strength * topics[:, asked]).repeat_interleave(2, dim=0) + 0.3 * normal(2 * KV_HEADS, count, DIM)
        return topical + shared * (1 + 0.1 * normal(2 * KV_HEADS, count, 1)) * common.repeat_interleave(2, dim=0)

    bench = Bench(
        replace(SMALL, top_k=64, recent=64, probes=2, recall_factor=1.25, update=False, centred=centred),
        [keys],
        group=2,
    )
    bench.build(0, queries(250))
    found = 0
    for query in queries(64).unbind(dim=1):
        rows, best = bench.step(query).tolist(), exact_rows(query, keys, 64).tolist()
        found += sum(len({*one} & {*other}) for one, other in zip(rows, best, strict=True))
    return found / (64 * 64 * KV_HEADS)


def test_centring_finds_better_centroids_where_queries_share_a_part() -> None:
    centred, plain = (shared_part_recall(centred, 5.6) for centred in (True, False))
    assert centred > plain + 0.03, (centred, plain)
    centred, plain = (shared_part_recall(centred, 0.0) for centred in (True, False))
    assert abs(centred - plain) < 0.015, "where they share none, it makes no difference"
