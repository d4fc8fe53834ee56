"""CTkvr's definition: lists, recall and rerank, and the fields of its configuration."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plugins.ctkvr.bench import DIM, GROUP, SMALL, Bench, exact_rows, make, one_query
from tests.plugins.ctkvr.settings import BY_KEYS
from tests.plugins.index_cases import KV_HEADS, make_context, random_keys, random_queries
from torch import Tensor

from kvseek.core.errors import KernelError
from kvseek.kernels.reference.codes.key_codes import leading_bits, mean_integers
from kvseek.kernels.reference.codes.rotation import rotate
from kvseek.plugins.ctkvr.build import build_lists, largest
from kvseek.plugins.ctkvr.config import Config
from kvseek.plugins.ctkvr.method import create, traits
from kvseek.plugins.ctkvr.reference import ReferenceIndex

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


def test_all_rows_whatever_the_lists_hold() -> None:
    bench = make(Config(top_k=500, recent=500, probes=8, **BY_KEYS), [490], room=10)
    bench.index.lists.fill_(-1)
    bench.grow(0, random_keys(10, DIM, seed=3))
    assert bench.step(random_queries(1, KV_HEADS * GROUP, DIM)[0]).tolist() == [list(range(500))] * KV_HEADS


def test_wide_lists_make_the_choice_exact() -> None:
    bench = make(replace(SMALL, recent=20, probes=8, recall_factor=40), [777])
    query = random_queries(1, KV_HEADS * GROUP, DIM)[0]
    assert torch.equal(bench.step(query).long(), exact_rows(query, bench.keys(0), 20))


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
