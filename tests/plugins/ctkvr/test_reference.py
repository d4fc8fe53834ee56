"""CTkvr's definition: lists, recall and rerank, centroids and their ring, and the fields of its configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plugins.ctkvr.settings import BY_KEYS
from tests.plugins.index_cases import KV_HEADS, extend, make_context, random_keys, random_queries, select_rows
from torch import Tensor

from kvseek.core.errors import KernelError
from kvseek.core.index_context import IndexContext, LayerRows
from kvseek.kernels.reference.codes.key_codes import leading_bits, mean_integers
from kvseek.kernels.reference.codes.rotation import padded_dim, rotate, rotation_signs
from kvseek.plugins.ctkvr.build import build_lists, cosines, largest, make_centroids, prompt_means
from kvseek.plugins.ctkvr.config import Config
from kvseek.plugins.ctkvr.method import create, traits
from kvseek.plugins.ctkvr.reference import ReferenceIndex

DIM, GROUP = 32, 3
SMALL = Config(top_k=20, recent=24, probes=3, **BY_KEYS)  # lists of 50


class Bench:
    """An index whose slots hold given keys, rows in shuffled extents of which no other place is finite."""

    def __init__(self, config: Config, keys: Sequence[Tensor], room: int = 0, group: int = GROUP) -> None:
        lengths = [part.shape[1] for part in keys]
        self.pool = torch.full((16, KV_HEADS, 1024, 2, keys[0].shape[2]), torch.nan)
        rows = LayerRows(self.pool, self.pool.data_ptr(), self.pool.stride(0))
        context = make_context(config, keys[0].shape[2], group, lengths, extents=16)
        books = {"signs": rotation_signs(0, padded_dim(keys[0].shape[2]))}
        self.context: IndexContext = replace(context, rows=rows, codebooks=books)
        for slot in reversed(range(len(keys))):
            self.context.extents.reserve(slot, lengths[slot] + room)
        self.index = ReferenceIndex(self.context)
        self.prompts: dict[int, Tensor] = {}  # queries that a slot was built with
        for slot, part in enumerate(keys):
            self.write(slot, 0, part)

    def write(self, slot: int, start: int, keys: Tensor) -> None:
        self.context.extents.write(self.pool, slot, start, torch.stack((keys, keys), dim=2))

    def keys(self, slot: int) -> Tensor:
        return self.context.extents.read(self.pool, slot, self.context.lengths[slot])[:, :, 0]

    def build(self, slot: int, queries: Tensor) -> None:
        self.prompts[slot] = queries
        self.index.build(slot, self.keys(slot), queries)

    def grow(self, slot: int, keys: Tensor) -> None:
        self.write(slot, self.context.lengths[slot], keys)
        extend(self.index, slot, keys)

    def step(self, query: Tensor, slot: int = 0) -> Tensor:
        rows = select_rows(self.index, query[None], [slot]).rows[0]
        self.index.refresh([slot])
        return rows


def head_queries(count: int, seed: int) -> Tensor:
    """Queries [H, count, D] that have, as real ones do, a large part in common: per head, in some heads larger."""
    heads = KV_HEADS * GROUP
    common = random_queries(heads, 1, DIM, seed=99) * torch.linspace(0.5, 4, heads)[:, None, None]
    return random_queries(heads, count, DIM, seed) + common


def one_query(seed: int) -> Tensor:
    """A query [H, D] of a step."""
    return head_queries(1, seed)[:, 0]


def make(config: Config, lengths: Sequence[int], room: int = 0, queries: int = 300) -> Bench:
    bench = Bench(config, [random_keys(n, DIM, seed=slot) for slot, n in enumerate(lengths)], room)
    for slot in range(len(lengths)):
        bench.build(slot, head_queries(queries, seed=10 + slot))
    return bench


def centroids_of(queries: Tensor, means: Tensor) -> Tensor:
    """Centroids [H, C, D] of queries [H, C, D] whose prompt has the means [H, D], by their definition."""
    return torch.nn.functional.normalize(queries.double() - means[:, None].double(), dim=-1).float()


# Lists.


def test_ties_go_to_the_lowest_place() -> None:
    keys = torch.ones(1, 9, 4)
    keys[0, 6] = 2
    assert build_lists(torch.ones(2, 1, 4), keys, 4, 0.5).tolist() == [[[6, 0, 1, 2]]]
    values = torch.tensor([[-1.0, 3.0, -torch.inf, 3.0, 0.0, -2.0, 3.0]])
    assert largest(values, 2).tolist() == [[1, 3]]
    assert largest(values, 7).tolist() == [[1, 3, 6, 4, 0, 5, 2]]


@pytest.mark.parametrize("tile", [1, 3, 16, 50])
def test_tiles_change_nothing(tile: int) -> None:
    # Small integers: products are exact however a matrix product adds them.
    keys = random_keys(333, 16).round()
    queries = random_queries(KV_HEADS * GROUP, 37, 16).mul(2).round()
    assert torch.equal(build_lists(queries, keys, 40, 0.25, tile), build_lists(queries, keys, 40, 0.25))


def test_no_keys_give_empty_lists() -> None:
    assert build_lists(torch.ones(2, 3, 8), torch.empty(1, 0, 8), 5, 1.0).tolist() == [[[-1] * 5] * 3]


# Selection.


def definition(bench: Bench, query: Tensor, slot: int) -> list[list[int]]:
    """Rows by the words of METHODS.md, in float64 and Python."""
    index, config, n = bench.index, bench.index.config, bench.context.lengths[slot]
    rows = []
    for head in range(KV_HEADS):
        lanes = range(head * GROUP, (head + 1) * GROUP)
        stored = index.centroids[slot, :, : min(index.written[slot], index.ring)].double()
        differences = query.double()
        if config.centred:
            first = min(config.centroids, math.ceil(index.listed[slot] / config.centroid_divisor))
            differences = differences - bench.prompts[slot][:, -first:].double().mean(dim=1)
        by_head = [(stored[h] @ differences[h] / differences[h].norm()).tolist() for h in lanes]
        cosines = [max(values) for values in zip(*by_head, strict=True)]
        order = sorted(range(len(cosines)), key=lambda c: (-cosines[c], c))
        held = range(max(0, index.written[slot] - index.ring), index.prompted[slot])
        nearest = [c for c in order if c in held][: config.probes // 2 if config.keep_prompt else 0]
        nearest += [c for c in order if c not in nearest][: config.probes - len(nearest)]
        recalled = {p for c in nearest for p in index.lists[slot, head, c].tolist() if p >= 0}
        recalled |= {p for p in range(index.listed[slot], n) if p >= n - config.recent}
        places = sorted(recalled)
        keys = bench.keys(slot)[head, places].double()
        weights = torch.stack([(keys @ query[h].double() * DIM**-0.5).softmax(dim=0) for h in lanes]).amax(dim=0)
        best = sorted(range(len(places)), key=lambda i: (-float(weights[i]), places[i]))[: config.top_k]
        rows.append(sorted(places[i] for i in best))
    return rows


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("grown", [0, 7, 100])
def test_selection_follows_the_definition(grown: int, centred: bool) -> None:
    bench = make(replace(SMALL, centred=centred), [777, 1500], room=grown)
    for slot in range(2):
        if grown:
            bench.grow(slot, random_keys(grown, DIM, seed=5))
        for seed in range(4):
            query = one_query(seed)
            expected = definition(bench, query, slot)
            assert bench.step(query, slot).tolist() == expected


def test_codes_rank_what_is_recalled() -> None:
    """The value of a key in plain loops over its codes' channels; keys that the window gave up are encoded too."""
    bench = make(replace(SMALL, execution="codes"), [777, 1500], room=100)
    index, config = bench.index, bench.index.config
    assert index.codes is not None
    assert index.bytes_per_token == KV_HEADS * (DIM / 2 + 2 + (2 * DIM + 4) / 256)
    for slot in range(2):
        bench.grow(slot, random_keys(100, DIM, seed=5))
        n = bench.context.lengths[slot]
        codes, channels = index.codes.read(slot, n), leading_bits(index.codes.read(slot, n), 4)
        query = one_query(slot)
        rotated = rotate(query, index.codes.signs)
        recalled = index.recall(query, slot)
        expected = []
        for head in range(KV_HEADS):
            places = [place for place in recalled[head].tolist() if place >= 0]
            weights = []
            for lane in rotated[head * GROUP : (head + 1) * GROUP]:
                step = float(lane.abs().max()) / 127
                integers = [round(float(x) / step) for x in lane]
                scores = []
                for place in places:
                    parts = zip(channels[head, place].tolist(), integers, strict=True)
                    product = (
                        sum((code - 7.5) * whole for code, whole in parts) * 0.32 * float(codes.scales[head, place])
                    )
                    means = zip(mean_integers(codes.means[head, place]).tolist(), integers, strict=True)
                    product += sum(mean * whole for mean, whole in means) * float(codes.mean_steps[head, place])
                    scores.append(product * step * DIM**-0.5)
                weights.append(torch.tensor(scores, dtype=torch.float64).softmax(dim=0))
            values = torch.stack(weights).amax(dim=0)
            best = sorted(range(len(places)), key=lambda i: (-float(values[i]), places[i]))[: config.top_k]
            expected.append(sorted(places[i] for i in best))
        assert bench.step(query, slot).tolist() == expected
        listed = index.lists[slot, :, (index.written[slot] - 1) % index.ring]
        assert all(set(rows) <= set(listed[head].tolist()) for head, rows in enumerate(expected)), "the update's, too"


@pytest.mark.parametrize("keep_prompt", [True, False])
def test_half_of_the_probes_are_of_the_prompt_until_none_is_left(keep_prompt: bool) -> None:
    bench = make(replace(SMALL, probes=5, centroids=12, keep_prompt=keep_prompt), [777])
    index, query = bench.index, one_query(0)
    for step in range(16):
        query = query + 0.1 * one_query(step)  # the newest centroids are the nearest
        held = [c for c in range(12) if max(0, index.written[0] - 12) <= c < index.prompted[0]]
        assert len(held) == max(0, 12 - step)
        probed = index.probe(query, 0)
        for head in range(KV_HEADS):
            assert probed[head].unique().shape == (5,)
            of_prompt = sum(c in held for c in probed[head].tolist())
            assert of_prompt >= min(2, len(held)) or not keep_prompt
            if 5 <= step <= 9:
                assert of_prompt == (2 if keep_prompt else 0), "the others are nearer"
        expected = definition(bench, query, 0)
        assert bench.step(query).tolist() == expected
    assert index.prompted == [12]


def test_lists_are_of_the_last_queries_oldest_first() -> None:
    bench = make(SMALL, [777], queries=300)
    assert bench.index.written == [49], "ceil(777 / 16)"
    lists = build_lists(bench.prompts[0][:, -49:], bench.keys(0), 50, DIM**-0.5)
    assert torch.equal(bench.index.lists[0, :, :49], lists)


@pytest.mark.parametrize(("tokens", "queries", "expected"), [(1, 5, 1), (777, 10, 10), (6, 500, 1), (0, 500, 0)])
def test_few_tokens_or_queries_give_few_centroids(tokens: int, queries: int, expected: int) -> None:
    bench = make(SMALL, [tokens], queries=queries)
    assert bench.index.written == [expected]


def test_a_region_without_queries_is_refused() -> None:
    bench = Bench(SMALL, [random_keys(30, DIM)])
    with pytest.raises(KernelError, match="queries: 0 for 30 retrieval keys: must be at least 1"):
        bench.build(0, torch.empty(KV_HEADS * GROUP, 0, DIM))


def test_a_zero_query_has_a_selection() -> None:
    bench = make(replace(SMALL, centred=False), [777])
    query = torch.zeros(KV_HEADS * GROUP, DIM)
    assert bench.index.probe(query, 0).tolist() == [[0, 1, 2]] * KV_HEADS
    rows = bench.step(query)
    assert (rows >= 0).all()
    assert (rows.diff(dim=1) > 0).all()
    assert torch.equal(bench.index.centroids[0, :, 49], query)


# Fields.


def test_rho_is_rounded_up_in_decimals() -> None:
    assert Config().rho == 1280
    assert Config(top_k=1024).rho == 5120
    assert Config(top_k=1024, **BY_KEYS).rho == 2560
    assert Config(top_k=10, recall_factor=1.1).rho == 11
    assert Config(top_k=3, recall_factor=2.5).rho == 8


def test_recent_follows_top_k() -> None:
    assert Config().recent == 8192
    assert Config(top_k=10_000).recent == 10_000
    assert Config(top_k=20, recent=24).recent == 24


def test_sizes_of_a_slot() -> None:
    config = Config()
    assert (config.list_width(1 << 17), config.recall_capacity(1 << 17)) == (1280, 16 * 1280 + 8192)
    assert (config.list_width(600), config.recall_capacity(600)) == (600, 600)
    assert config.prompt_centroids(131_072, 2048) == 2048
    assert config.prompt_centroids(1601, 2048) == 101


def test_the_method_without_compiled_kernels() -> None:
    assert isinstance(create(make_context(SMALL, DIM, GROUP, [10])), ReferenceIndex)
    for execution in ("cpu", "codes"):
        assert traits(Config(execution=execution)).cpu_library_on_gpu == (execution == "cpu")
    assert traits(Config(**BY_KEYS)).codebooks(96) == {}
    assert traits(Config()).codebooks(96)["signs"].shape == (128,)


def largest_of_all(values: Tensor, count: int) -> Tensor:
    """The definition: one integer of each value's bits and its complemented index, and the largest of them."""
    bits = values.contiguous().view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    index = torch.arange(values.shape[-1])
    return ((ordered << 32) | (0xFFFFFFFF - index)).topk(count, dim=-1).indices


FEW = st.sampled_from((-torch.inf, -1.5, -0.0, 0.0, 1e-40, 2.0, torch.inf))
ANY = st.floats(width=32, allow_nan=False)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from((FEW, ANY)), st.integers(1, 12), st.integers(1, 4))
def test_the_largest_are_those_of_the_definition(data: st.DataObject, kind: Any, n: int, rows: int) -> None:
    listed = data.draw(st.lists(st.lists(kind, min_size=n, max_size=n), min_size=rows, max_size=rows))
    values = torch.tensor(listed, dtype=torch.float32)
    count = data.draw(st.integers(0, n))
    assert torch.equal(largest(values, count), largest_of_all(values, count))
    assert torch.equal(largest(values[0], count), largest_of_all(values[0], count))


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


# The ring.


def test_queries_enter_the_ring_after_the_step_and_replace_the_oldest() -> None:
    config = Config(top_k=8, recent=8, centroids=6, probes=2, **BY_KEYS)
    bench = make(config, [400])
    index = bench.index
    assert (index.ring, index.written[0]) == (6, 6)
    lists, centroids, means = (array[0].clone() for array in (index.lists, index.centroids, index.means))
    for step in range(8):
        query = one_query(step)
        recalled = index.recall(query, 0)
        _, best = index.rerank(query, 0, recalled)
        select_rows(index, query[None], [0])
        assert torch.equal(index.lists[0], lists), "not before refresh"
        index.refresh([0])
        lists[:, step % 6] = best
        centroids[:, step % 6] = centroids_of(query[:, None], index.means[0])[:, 0]
        assert torch.equal(index.lists[0], lists)
        torch.testing.assert_close(index.centroids[0], centroids)
        torch.testing.assert_close(index.offsets[0], (centroids * index.means[0, :, None]).sum(dim=-1))
        assert torch.equal(index.means[0], means), "the prompt's"
        assert index.written[0] == 7 + step
    index.refresh([0])
    assert index.written[0] == 14, "a query enters once"


def test_a_ring_with_room_keeps_the_prompts_centroids() -> None:
    bench = make(SMALL, [100])
    assert (bench.index.ring, bench.index.written[0]) == (2048, 7), "a centroid for 16 tokens"
    first = bench.index.lists[0, :, :7].clone()
    for step in range(5):
        bench.step(random_queries(1, KV_HEADS * GROUP, DIM, seed=step)[0])
    assert bench.index.written[0] == 12
    assert torch.equal(bench.index.lists[0, :, :7], first)


def test_the_last_selection_before_refresh_counts() -> None:
    bench = make(SMALL, [777, 900])
    queries = random_queries(2, KV_HEADS * GROUP, DIM)
    select_rows(bench.index, queries, [0, 1])
    select_rows(bench.index, queries[1:], [0])
    bench.index.refresh([0])
    assert bench.index.written == [50, 57]
    expected = centroids_of(queries[1][:, None], bench.index.means[0])
    torch.testing.assert_close(bench.index.centroids[0, :, 49:50], expected)
    bench.index.refresh([0, 1])
    assert bench.index.written == [50, 58]


def test_another_prompt_drops_what_is_pending() -> None:
    bench = make(SMALL, [777])
    select_rows(bench.index, random_queries(1, KV_HEADS * GROUP, DIM), [0])
    bench.build(0, random_queries(KV_HEADS * GROUP, 300, DIM))
    bench.index.refresh([0])
    assert bench.index.written == [49]


def test_without_update_nothing_changes() -> None:
    bench = make(replace(SMALL, update=False), [777])
    lists = bench.index.lists[0, :, :49].clone()
    for step in range(3):
        bench.step(random_queries(1, KV_HEADS * GROUP, DIM, seed=step)[0])
    assert bench.index.written == [49]
    assert torch.equal(bench.index.lists[0, :, :49], lists)


# Tokens that the prompt's lists do not hold.
