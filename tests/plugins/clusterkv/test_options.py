"""ClusterKV's spreads and codes against their definitions in plain loops, with and without them; growth of both."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kernels.reference.codes import stores
from tests.plugins.clusterkv.settings import CENTROIDS, OLD_DEFAULTS, PAPER
from tests.plugins.index_cases import (
    KV_HEADS,
    context_of,
    extend,
    make_context,
    random_keys,
    random_queries,
    select_rows,
)
from torch import Tensor

from kvseek.core.batch import Batch, RequestState
from kvseek.core.config import EXTENT_TOKENS, ModelConfig
from kvseek.core.errors import ConfigError, KernelError
from kvseek.core.extents import ExtentTable
from kvseek.engine.loading.memory import HOPPER, META, MetaBytes, UnloadedKernels
from kvseek.kernels.reference.codes.key_codes import estimate_all, round_lanes
from kvseek.kernels.reference.codes.rotation import rotate
from kvseek.plugins.clusterkv.config import Config
from kvseek.plugins.clusterkv.device import MOST_BLOCKS, CudaIndex, cuda_macros
from kvseek.plugins.clusterkv.measurements import costs
from kvseek.plugins.clusterkv.method import traits
from kvseek.plugins.clusterkv.reference import ReferenceIndex
from kvseek.plugins.ranking import softmax_mean

DIM, GROUP = 16, 2
NO_QUERIES = torch.empty(0)


def built(config: Config, *prompts: Tensor, room: int = 0) -> ReferenceIndex:
    lengths = [keys.shape[1] for keys in prompts]
    context = make_context(config, DIM, GROUP, [length + room for length in lengths])
    context.lengths[:] = lengths
    books = traits(config).codebooks(DIM)
    index = ReferenceIndex(replace(context, layer=config.dense_layers, codebooks=books))
    for slot, keys in enumerate(prompts):
        index.build(slot, keys, NO_QUERIES)
    return index


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


def test_defaults() -> None:
    """The best 512 of the 4,096 rows of the clusters that may hold the best keys."""
    config = Config()
    assert (config.top_k, config.rows_of_clusters, config.spread_weight, config.rerank_bits) == (512, 4096, 3.0, 2)


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
