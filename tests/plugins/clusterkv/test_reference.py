"""ClusterKV without spreads and codes: k-means by cosine, whole clusters until the budget is filled, growth, slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plugins.clusterkv.settings import OLD_DEFAULTS, PAPER
from tests.plugins.index_cases import KV_HEADS, extend, make_context, random_keys, random_queries, select, select_rows
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS, ModelConfig
from kvseek.plugins.clusterkv.clustering import cluster_keys
from kvseek.plugins.clusterkv.config import Config
from kvseek.plugins.clusterkv.measurements import costs
from kvseek.plugins.clusterkv.method import traits
from kvseek.plugins.clusterkv.reference import ReferenceIndex, expand, rows_taken

DIM = 16
NO_QUERIES = torch.empty(0)


def whole(**fields: Any) -> Config:
    """Settings under which clusters rank by their centroids and are taken whole."""
    return Config(**{**OLD_DEFAULTS, **fields})


def make_index(config: Config, lengths: list[int], group: int = 2, layer: int = 5, extents: int = 8) -> ReferenceIndex:
    return ReferenceIndex(replace(make_context(config, DIM, group, lengths, extents), layer=layer))


def built(config: Config, keys: Tensor, group: int = 2, layer: int = 5) -> ReferenceIndex:
    index = make_index(config, [keys.shape[1]], group, layer)
    index.build(0, keys, NO_QUERIES)
    return index


def grow(index: ReferenceIndex, slot: int, keys: Tensor) -> None:
    index.context.extents.reserve(slot, index.context.lengths[slot] + keys.shape[1])
    extend(index, slot, keys)


def places(index: ReferenceIndex, slot: int) -> Tensor:
    return index.context.extents.read(index.places, slot, index.context.lengths[slot])


def check_invariants(index: ReferenceIndex, slot: int, keys: Tensor) -> None:
    """The sorted list is a permutation, cut without gaps into clusters; centroids are the means of their keys."""
    n, listed = keys.shape[1], places(index, slot)
    sizes, starts = index.read_clusters(index.sizes, slot), index.read_clusters(index.starts, slot)
    assert int(index.clusters[slot]) == index.counts[slot] == sizes.shape[1] <= index.config.most_clusters(n)
    assert torch.equal(listed.sort(dim=1).values, torch.arange(n, dtype=torch.int32).expand(KV_HEADS, -1))
    assert torch.equal(starts, (sizes.cumsum(dim=1) - sizes).int())
    assert (sizes.sum(dim=1) == n).all()
    centroids = index.read_clusters(index.centroids, slot)
    for head in range(KV_HEADS):
        for cluster in range(sizes.shape[1]):
            start, size = int(starts[head, cluster]), int(sizes[head, cluster])
            own = listed[head, start : start + size].long()
            assert (own.diff() > 0).all(), "places ascend inside a cluster"
            mean = keys[head, own].mean(dim=0) if size else torch.zeros(keys.shape[2])
            torch.testing.assert_close(centroids[head, cluster], mean, rtol=1e-4, atol=1e-4)


def test_three_bundles_of_keys_are_three_clusters() -> None:
    axes = torch.eye(3, DIM)
    lengths = torch.tensor([1.0, 7.0, 0.5, 2.0, 3.0, 4.0, 1.0])
    label = torch.tensor([0, 1, 0, 2, 1, 0, 2])
    keys = (axes[label] * lengths[:, None]).expand(KV_HEADS, -1, -1)
    found = cluster_keys(keys, torch.tensor([0, 1, 3]), 20)
    assert found.sizes.tolist() == [[3, 2, 2]] * KV_HEADS
    assert found.starts.tolist() == [[0, 3, 5]] * KV_HEADS
    assert found.order.tolist() == [[0, 2, 5, 1, 4, 3, 6]] * KV_HEADS
    means = torch.tensor([(1 + 0.5 + 4) / 3, (7 + 3) / 2, (2 + 1) / 2])
    torch.testing.assert_close(found.centroids, (axes * means[:, None]).expand(KV_HEADS, -1, -1))


def test_directions_ignore_lengths_and_centroids_do_not() -> None:
    """A long key counts no more than a short one for where its cluster points; the mean is that of the keys as they are."""
    degrees, lengths = torch.tensor([0.0, 50, 60, 110, 110, 110]), torch.tensor([100.0, 1, 1, 1, 1, 1])
    keys = (torch.stack((degrees.deg2rad().cos(), degrees.deg2rad().sin()), dim=1) * lengths[:, None])[None]
    found = cluster_keys(keys, torch.tensor([0, 3]), 20)
    # The key at 60 joins those at 110 at first, then finds the first cluster at 25 nearer; by the mean it points to 0.
    assert found.sizes.tolist() == [[3, 3]]
    torch.testing.assert_close(found.centroids[0, 0], keys[0, :3].mean(dim=0))


def test_a_cluster_may_lose_all_its_keys() -> None:
    keys = torch.ones(KV_HEADS, 6, DIM)
    found = cluster_keys(keys, torch.tensor([0, 2, 4]), 20)
    assert found.sizes.tolist() == [[6, 0, 0]] * KV_HEADS, "equal keys go to the first of equal directions"
    assert (found.centroids[:, 1:] == 0).all()
    index = built(whole(tokens_per_cluster=2, top_k=4), keys)
    rows = select_rows(index, torch.ones(1, 4, DIM), [0]).rows
    assert rows.tolist() == [[[0, 1, 2, 3]] * KV_HEADS]


def test_zero_keys_do_not_spoil_the_others() -> None:
    keys = random_keys(50, DIM)
    keys[:, ::7] = 0
    found = cluster_keys(keys, torch.arange(5), 20)
    assert torch.isfinite(found.centroids).all()
    assert (found.sizes.sum(dim=1) == 50).all()


def test_k_means_stops_after_its_rounds_and_where_it_has_settled() -> None:
    keys, chosen = random_keys(600, DIM), torch.arange(0, 600, 75)
    units = torch.nn.functional.normalize(keys, dim=-1)

    def cosine(iterations: int) -> float:
        found = cluster_keys(keys, chosen, iterations)
        sums = [
            units[head, found.order[head, s : s + n].long()].sum(dim=0).norm()
            for head in range(KV_HEADS)
            for s, n in zip(found.starts[head].tolist(), found.sizes[head].tolist(), strict=True)
        ]
        return float(torch.stack(sums).sum()) / units[..., 0].numel()

    quality = [cosine(rounds) for rounds in (1, 2, 4, 100, 200)]
    assert quality == sorted(quality)
    assert quality[0] < quality[3] == quality[4]


@pytest.mark.parametrize(
    ("values", "sizes", "top_k", "taken"),
    [
        ([3.0, 1.0, 2.0], [2, 4, 3], 4, [2, 0, 2]),
        ([3.0, 1.0, 2.0], [2, 4, 3], 5, [2, 0, 3]),
        ([1.0, 1.0, 1.0], [2, 4, 3], 5, [2, 3, 0]),
        ([3.0, 1.0, 2.0], [2, 4, 3], 100, [2, 4, 3]),
        ([3.0, 1.0, 2.0], [9, 4, 3], 1, [1, 0, 0]),
        ([3.0, 1.0, 2.0], [0, 4, 3], 4, [0, 1, 3]),
    ],
)
def test_clusters_are_taken_until_the_budget_is_filled(
    values: list[float], sizes: list[int], top_k: int, taken: list[int]
) -> None:
    found = rows_taken(torch.tensor([values]), torch.tensor([sizes]), top_k)
    assert found.tolist() == [taken]
    starts = torch.tensor([sizes]).cumsum(dim=1) - torch.tensor([sizes])
    listed = [int(starts[0, c]) + i for c, rows in enumerate(taken) for i in range(rows)]
    assert expand(starts, found, top_k).tolist() == [listed + [-1] * (top_k - len(listed))]


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 400), top_k=st.integers(1, 450), seed=st.integers(0, 99))
def test_any_region(n: int, top_k: int, seed: int) -> None:
    keys = random_keys(n, DIM, seed)
    index = built(whole(top_k=top_k, tokens_per_cluster=11), keys)
    check_invariants(index, 0, keys)
    selection = select_rows(index, random_queries(1, 2 * KV_HEADS, DIM, seed), [0])
    kept = min(n, top_k)
    assert index.budget(n).rows == kept
    assert (selection.rows[..., kept:] == -1).all()
    for rows in selection.rows[0, :, :kept].tolist():
        assert len(set(rows)) == kept
        assert all(0 <= row < n for row in rows)


def test_the_seed_and_the_layer_choose_the_first_centroids() -> None:
    keys = random_keys(400, DIM)

    def sizes(seed: int, layer: int) -> list[list[int]]:
        index = built(whole(tokens_per_cluster=20, seed=seed), keys, layer=layer)
        found: list[list[int]] = index.read_clusters(index.sizes, 0).tolist()
        return found

    assert sizes(0, 5) == sizes(0, 5)
    assert sizes(0, 5) != sizes(1, 5)
    assert sizes(0, 5) != sizes(0, 6)


def test_first_layers_are_dense() -> None:
    index = built(whole(top_k=4), random_keys(200, DIM), layer=1)
    assert select(index, random_queries(1, 2 * KV_HEADS, DIM), [0]) is None
    assert index.budget(200).rows == 200
    grow(index, 0, random_keys(20, DIM))
    assert index.centroids.numel() == index.places.numel() == 0
    assert index.bytes_per_token == 0


@pytest.mark.parametrize("update", [1, 8, 60, 256, 320, 1000])
def test_growth_keeps_the_pace_and_the_list(update: int) -> None:
    """320 generated tokens are clustered alone into 4; smaller evictions join the last cluster until one is due."""
    prompt, evictions = 333, max(2, 700 // update)
    keys = random_keys(prompt + evictions * update, DIM, seed=update)
    index = built(whole(top_k=50, tokens_per_cluster=80), keys[:, :prompt])
    assert index.counts[0] == 333 // 80
    before = index.read_clusters(index.centroids, 0).clone()
    for number in range(evictions):
        start = prompt + number * update
        grow(index, 0, keys[:, start : start + update])
        assert index.counts[0] == 4 + max(1, int((number + 1) * update / 80 + 0.5))
    check_invariants(index, 0, keys)
    assert torch.equal(index.read_clusters(index.centroids, 0)[:, :4], before), "the prompt's clusters stay as they are"


def test_a_region_that_starts_empty() -> None:
    keys = random_keys(40, DIM)
    index = built(whole(top_k=10), keys[:, :0])
    assert index.counts == [0]
    for start in range(0, 40, 8):
        grow(index, 0, keys[:, start : start + 8])
    check_invariants(index, 0, keys)
    assert index.counts == [1]


@settings(max_examples=200, deadline=None)
@given(
    per_cluster=st.integers(1, 1024),
    per_update=st.integers(1, 320),
    prompt=st.integers(0, 5000),
    generated=st.integers(0, 5000),
)
def test_clusters_fit_the_extents(per_cluster: int, per_update: int, prompt: int, generated: int) -> None:
    config = whole(tokens_per_cluster=per_cluster, clusters_per_update=per_update)
    clusters = config.prompt_clusters(prompt) + config.generated_clusters(generated)
    tokens = prompt + generated
    assert clusters <= config.most_clusters(tokens)
    assert clusters <= -(-tokens // EXTENT_TOKENS) * config.clusters_per_extent
    assert config.prompt_clusters(prompt) <= prompt
    added = config.generated_clusters(generated + 7) - config.generated_clusters(generated)
    assert 0 <= added <= 7


def test_default_sizes() -> None:
    config, paper = Config(), Config(**PAPER)
    assert (config.clusters_per_extent, config.prompt_clusters(32_768), config.generated_clusters(320)) == (32, 819, 4)
    assert (paper.clusters_per_extent, paper.prompt_clusters(32_768)) == (16, 409)
    assert traits(config).cache_defaults == {"update": 320, "sink": 16}
    assert traits(whole(dense_layers=5)).device_layers == 5


def test_costs_follow_the_region() -> None:
    model = ModelConfig("llama", 128_256, 4096, 14_336, 32, 32, 8, 128, 1e-5, 5e5, 131_072)
    found = costs(whole(), model, 131_072, 2)
    assert (found.rows, found.dense_layers) == (1024, 2)
    assert found.index_bytes == 3276 * (256 + 8)
    assert costs(whole(), model, 100, 2).rows == 100
    assert costs(whole(), model, 0, 2).index_bytes == 0
