"""ClusterKV against its definition in plain loops: k-means by cosine, clusters, spreads and codes, growth."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.reference.codes import stores
from tests.plugins.clusterkv.settings import CENTROIDS, OLD_DEFAULTS, PAPER
from tests.plugins.index_cases import (
    KV_HEADS,
    context_of,
    extend,
    make_context,
    random_keys,
    random_queries,
    select,
    select_rows,
)
from torch import Tensor

from kvseek.core.batch import Batch, RequestState
from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.errors import ConfigError, KernelError
from kvseek.core.extents import ExtentTable
from kvseek.core.index_context import IndexContext
from kvseek.core.model_config import ModelConfig
from kvseek.engine.loading.memory import HOPPER, META, MetaBytes, UnloadedKernels
from kvseek.kernels.reference.codes.key_codes import estimate_all, round_lanes
from kvseek.kernels.reference.codes.rotation import rotate
from kvseek.plugins.clusterkv import kmeans
from kvseek.plugins.clusterkv.clustering import cluster_keys, initial_keys
from kvseek.plugins.clusterkv.config import Config
from kvseek.plugins.clusterkv.device import MOST_BLOCKS, CudaIndex, cuda_macros
from kvseek.plugins.clusterkv.kmeans import ClusterArrays, DeviceKMeans, check_keys
from kvseek.plugins.clusterkv.measurements import costs
from kvseek.plugins.clusterkv.method import traits
from kvseek.plugins.clusterkv.reference import ReferenceIndex, expand, rows_taken
from kvseek.plugins.ranking import softmax_mean

DIM, GROUP = 16, 2
NO_QUERIES = torch.empty(0)


def whole(**fields: Any) -> Config:
    """Settings under which clusters rank by their centroids and are taken whole."""
    return Config(**{**OLD_DEFAULTS, **fields})


def built(
    config: Config, *prompts: Tensor, room: int = 0, group: int = GROUP, layer: int | None = None
) -> ReferenceIndex:
    """An index over slots of these keys, each of which has room for so many more, in the first layer that selects."""
    lengths = [keys.shape[1] for keys in prompts]
    context = make_context(config, DIM, group, [length + room for length in lengths])
    context.lengths[:] = lengths
    books, layer = traits(config).codebooks(DIM), config.dense_layers if layer is None else layer
    index = ReferenceIndex(replace(context, layer=layer, codebooks=books))
    for slot, keys in enumerate(prompts):
        index.build(slot, keys, NO_QUERIES)
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


def test_costs_follow_the_region() -> None:
    model = ModelConfig("llama", 128_256, 4096, 14_336, 32, 32, 8, 128, 1e-5, 5e5, 131_072)
    found = costs(whole(), model, 131_072, 2)
    assert (found.rows, found.dense_layers) == (1024, 2)
    assert found.index_bytes == 3276 * (256 + 8)
    assert costs(whole(), model, 100, 2).rows == 100
    assert costs(whole(), model, 0, 2).index_bytes == 0


def members(index: ReferenceIndex, slot: int, head: int) -> list[list[int]]:
    """The places of every cluster, in the order in which they stand in the sorted list."""
    listed = index.context.extents.read(index.places, slot, index.context.lengths[slot])[head].tolist()
    sizes, starts = (index.read_clusters(array, slot)[head].tolist() for array in (index.sizes, index.starts))
    return [listed[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def expected_candidates(index: ReferenceIndex, keys: Tensor, query: Tensor, head: int) -> list[int]:
    """Places of the best clusters of slot 0 for queries [g, D] of a KV head, by the definition of their score."""
    config, clusters = index.config, members(index, 0, head)
    scores = torch.full((len(query), len(clusters)), -math.inf)
    for number, places in enumerate(clusters):
        if not places:
            continue
        own = keys[head, places]
        centroid = own.mean(dim=0)
        sigma = sum(float((key - centroid).square().sum()) for key in own) / len(own)
        for lane, q in enumerate(query):
            bonus = config.spread_weight * float(q.norm()) * math.sqrt(sigma) / math.sqrt(DIM)
            scores[lane, number] = float(q @ centroid) + bonus
    values = softmax_mean(scores[None], index.context.scaling)[0]
    taken: dict[int, list[int]] = {}
    room = config.rows_of_clusters
    for number in values.argsort(descending=True, stable=True).tolist():
        taken[number] = clusters[number][:room]
        room -= len(taken[number])
    return [place for number in sorted(taken) for place in taken[number]]


def expected_rows(index: ReferenceIndex, keys: Tensor, query: Tensor, head: int) -> list[int]:
    """The best of these by their codes' estimates, softmax over them per query head; in the order of the candidates."""
    candidates, config = expected_candidates(index, keys, query, head), index.config
    if index.codes is None:
        return candidates
    codes = index.codes.read(0, keys.shape[1])
    rounded = round_lanes(rotate(query[None].expand(KV_HEADS, -1, -1), index.codes.signs))
    estimates = estimate_all(codes, rounded)[head][:, candidates]
    values = softmax_mean(estimates[None], index.context.scaling)[0].tolist()
    best = sorted(range(len(candidates)), key=lambda i: (-values[i], i))[: config.top_k]
    return [candidates[i] for i in sorted(best)]


@pytest.mark.parametrize("bits", [0, 2])
def test_rows_follow_the_definition(bits: int) -> None:
    config = Config(top_k=30, tokens_per_cluster=12, spread_weight=1.5, rerank_bits=bits, candidates=4)
    keys, query = random_keys(500, DIM, bits), random_queries(1, GROUP * KV_HEADS, DIM, 7) / 4
    index = built(config, keys)
    rows = select_rows(index, query, [0]).rows[0]
    for head, own in enumerate(query[0].view(KV_HEADS, GROUP, DIM)):
        assert rows[head].tolist() == expected_rows(index, keys, own, head)


@pytest.mark.parametrize(("settings", "clusters"), [(OLD_DEFAULTS, 75), (PAPER, 37)], ids=["0.2.0", "paper"])
def test_centroids_alone_take_whole_clusters(settings: dict[str, Any], clusters: int) -> None:
    """The defaults of 0.2.0 and the paper's: no spread, no code, and 1,024 rows of the clusters of the best centroids."""
    config, keys = Config(**settings), random_keys(3000, DIM)
    index = built(config, keys)
    assert (index.spreads.numel(), index.codes, traits(config).codebooks(DIM)) == (0, None, {})
    assert index.counts == [clusters]
    query = random_queries(1, GROUP * KV_HEADS, DIM)
    rows = select_rows(index, query, [0]).rows[0]
    assert rows.shape[1] == replace(config, candidates=7).rows_of_clusters == 1024
    for head, own in enumerate(query[0].view(KV_HEADS, GROUP, DIM)):
        assert rows[head].tolist() == expected_candidates(index, keys, own, head)


def test_an_engine_from_before_codes_is_refused() -> None:
    """Its configuration has no rerank_bits, and no codebook lies beside it."""
    context = make_context(Config(), DIM, GROUP, [100])
    with pytest.raises(
        ConfigError, match=r"rerank_bits = 2: must be 0 without the codebook 'signs', .*; build the engine"
    ):
        ReferenceIndex(replace(context, layer=2))


def test_a_wide_cluster_with_one_good_key_is_found_by_its_spread() -> None:
    """Both centroids score alike, but for a little in favour of the narrow cluster; the best key lies in the wide one."""
    axes = torch.eye(DIM)
    narrow = axes[0] * 10 + torch.zeros(20, DIM)
    narrow[:, 2] = 0.5
    wide = axes[1] * 10 + torch.zeros(20, DIM)
    wide[:10, 2], wide[10:, 2] = 4.0, -4.0
    keys = torch.cat((narrow, wide)).expand(KV_HEADS, -1, -1).contiguous()
    query = axes[2].expand(1, GROUP * KV_HEADS, -1).contiguous()
    for weight, first in ((0.0, 0), (3.0, 20)):
        config = Config(top_k=20, tokens_per_cluster=20, spread_weight=weight, rerank_bits=0, seed=3)
        index = built(config, keys)
        assert sorted(map(len, members(index, 0, 0))) == [20, 20], "the seed starts a cluster in each bundle"
        assert select_rows(index, query, [0]).rows[0, 0].sort().values.tolist() == list(range(first, first + 20))


@pytest.mark.parametrize("update", [1, 16, 320])
def test_spreads_and_codes_grow_with_evictions(update: int) -> None:
    """Keys that join the last cluster move its spread to that of all of its keys; others get clusters of their own."""
    config = Config(top_k=40, candidates=4)
    prompt, evictions = 300, min(60, max(3, 320 // update))
    keys = random_keys(prompt + evictions * update, DIM, seed=update)
    index = built(config, keys[:, :prompt], room=evictions * update)
    for start in range(prompt, keys.shape[1], update):
        extend(index, 0, keys[:, start : start + update])
    spreads = index.read_clusters(index.spreads, 0)
    for head in range(KV_HEADS):
        for number, places in enumerate(members(index, 0, head)):
            own = keys[head, places]
            exact = (own - own.mean(dim=0)).square().mean().sqrt() if places else torch.tensor(0.0)
            torch.testing.assert_close(spreads[head, number], exact, rtol=1e-3, atol=1e-5)
    assert index.codes is not None
    query = random_queries(1, GROUP * KV_HEADS, DIM, 3)
    rows = select_rows(index, query, [0]).rows[0]
    for head, own in enumerate(query[0].view(KV_HEADS, GROUP, DIM)):
        assert rows[head].tolist() == expected_rows(index, keys, own, head)


@pytest.mark.parametrize("config", [Config(), Config(**OLD_DEFAULTS)], ids=["codes", "centroids alone"])
def test_bytes_per_token_are_those_of_the_arrays(config: Config) -> None:
    index = built(config, random_keys(10, DIM))
    arrays = (index.centroids, index.sizes, index.starts, index.places, index.spreads)
    arrays += tuple(getattr(index.codes, name) for name in stores.ARRAYS if config.rerank_bits)
    held = sum(array.nbytes for array in arrays) / (index.context.extents.capacity * EXTENT_TOKENS)
    assert index.bytes_per_token == held


def test_costs_of_codes() -> None:
    model = ModelConfig("llama", 128_256, 4096, 14_336, 32, 32, 8, 128, 1e-5, 5e5, 131_072)
    plain, found = (costs(Config(**fields), model, 131_072, 2) for fields in (OLD_DEFAULTS, {}))
    assert (plain.rows, found.rows) == (1024, 512)
    assert found.index_bytes - plain.index_bytes == 3276 * 4
    assert found.rerank_bytes - plain.rerank_bytes >= 4096 * 34
    short = costs(Config(), model, 100, 2)
    assert (short.rows, short.rerank_bytes) <= (100, 100 * 200)


def device_index(config: Config, slots: int, extents: int, dim: int = 128) -> CudaIndex:
    """An index for the GPU that holds no numbers."""
    table = ExtentTable(slots, extents, extents, META)
    books = {name: book.to(META) for name, book in traits(config).codebooks(dim).items()}
    kernels = UnloadedKernels(HOPPER)
    context = context_of(config, dim, 4, table, [0] * slots, layer=2, codebooks=books, device=META, cuda=kernels)
    return CudaIndex(context)


@pytest.mark.parametrize("slots", [1, 3, 65])
def test_the_rerank_has_room_for_every_batch_that_loading_has_counted(slots: int) -> None:
    config = Config()
    with MetaBytes() as count:
        index = device_index(config, slots, 4)
        assert index.reranker is not None
        before = count.used
        for size in range(1, index.reranker.most + 1):
            tasks, blocks = size * KV_HEADS, index.reranker.blocks(size, MOST_BLOCKS)
            assert size <= blocks <= min(16 * size, index.reranker.normalisers.shape[1])
            assert tasks <= index.reranker.candidates.shape[0] == len(index.reranker.finished)
            state = RequestState(slot=slots - 1, length=0, dense=True)
            batch = Batch.of([state] * size, index.context.extents.device_table)
            index.select(torch.zeros(size, KV_HEADS * 4, 128, device=META), batch)
        del batch
        assert count.used == before
    with pytest.raises(KernelError, match=rf"batch = {size + 1}: must be at most {size}, the requests that the slots"):
        index.reranker.require(size + 1)


def test_candidates_are_no_more_than_the_longest_region_and_shared_memory() -> None:
    """A region of two extents has 2,048 rows; so many fit the block that lists clusters, and 32,768 do not."""
    index = device_index(Config(top_k=4096), 1, 2)
    assert index.reranker.listed == 2 * EXTENT_TOKENS
    message = r"32768 rows of them \(candidates x top_k\) need \d+ bytes.*lower candidates x top_k or max_seq_len"
    with pytest.raises(KernelError, match=message):
        device_index(Config(top_k=4096), 1, 64)


def test_heads_that_codes_do_not_support_are_refused_on_the_gpu() -> None:
    assert cuda_macros(Config(**CENTROIDS), 32, 2)["CLUSTERKV_RERANK_BITS"] == 0
    with pytest.raises(ConfigError, match="head_dim = 32: must be at least 64 for rerank_bits = 2 on the GPU"):
        cuda_macros(Config(), 32, 2)


class Kernels:
    """Of a GPU; nothing may be launched."""

    shared_memory_per_block = 227 << 10


def make(config: Config, head_dim: int, tokens: int) -> tuple[DeviceKMeans, ClusterArrays]:
    """A DeviceKMeans whose slot 1 has room for `tokens` tokens, and where it would write."""
    table = ExtentTable(2, 40, 40)
    table.reserve(1, tokens)
    device = torch.device("cpu")
    context = IndexContext(
        5, 2 * KV_HEADS, KV_HEADS, head_dim, 1.0, config, {}, table, [0, tokens], torch.bfloat16, device, None
    )
    kernels: Any = Kernels()
    shape = (40, KV_HEADS, config.clusters_per_extent)
    sizes = torch.zeros(shape, dtype=torch.int32)
    arrays = ClusterArrays(
        torch.zeros(*shape, head_dim), sizes, sizes.clone(), torch.zeros(40, KV_HEADS, 1024), torch.zeros(0)
    )
    return DeviceKMeans(context, config, kernels), arrays


@pytest.fixture
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys on the CPU pass as keys on the GPU."""
    monkeypatch.setattr(kmeans, "check_keys", lambda *arguments: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


@pytest.mark.parametrize(("tokens", "clusters"), [(1, 1), (7, 7), (320, 4), (5000, 62)])
def test_first_centroids_are_different_keys(tokens: int, clusters: int) -> None:
    chosen = initial_keys(0, 3, tokens, clusters)
    assert chosen.shape == (clusters,)
    assert (chosen.diff() > 0).all(), "no key twice"
    assert 0 <= chosen[0] <= chosen[-1] < tokens


def test_first_centroids_depend_on_seed_layer_and_length_alone() -> None:
    first = initial_keys(1, 2, 5000, 60)
    torch.manual_seed(99)
    assert torch.equal(first, initial_keys(1, 2, 5000, 60)), "not on the global generator"
    for other in ((2, 2, 5000), (1, 3, 5000), (1, 2, 5001), (2**63 - 1, 2, 5000)):
        assert not torch.equal(first, initial_keys(*other, 60))


@pytest.mark.parametrize("clusters", [0, 8])
def test_more_clusters_than_keys_are_refused(clusters: int) -> None:
    with pytest.raises(ConfigError, match=rf"clusters = {clusters}: must be between 1 and 7, the number of keys"):
        initial_keys(0, 0, 7, clusters)


@pytest.mark.usefixtures("_without_gpu")
@pytest.mark.parametrize(
    ("tokens", "first_place", "first_cluster", "clusters", "message"),
    [
        (1000, 1049, 0, 12, "slot 1 has room for 2048 places and 64 clusters: too few for 1000 keys from place 1049"),
        (1000, 0, 53, 12, "in 12 clusters from 53 on; reserve extents first"),
        (80_000, 0, 0, 70_000, "clusters = 70000: must be at most 65520"),
    ],
)
def test_what_has_no_room(tokens: int, first_place: int, first_cluster: int, clusters: int, message: str) -> None:
    means, arrays = make(Config(), 64, 2048)
    keys = torch.zeros(KV_HEADS, 1, 64, dtype=torch.bfloat16).expand(-1, tokens, -1)
    with pytest.raises(KernelError, match=message):
        means.cluster(1, keys, first_place, first_cluster, clusters, arrays)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((3, 10, 64), torch.bfloat16, r"keys: shape \(3, 10, 64\): must be \[2, n, 64\]"),
        ((2, 10, 32), torch.bfloat16, r"must be \[2, n, 64\]"),
        ((2, 0, 64), torch.bfloat16, "keys: 0 per head: must be between 1 and"),
        ((2, 10, 64), torch.float32, "keys: torch.float32 on cpu.*must be torch.bfloat16 on the GPU"),
    ],
)
def test_keys_that_kernels_cannot_read(shape: tuple[int, ...], dtype: torch.dtype, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        check_keys(torch.zeros(shape, dtype=dtype), KV_HEADS, 64, torch.bfloat16)
