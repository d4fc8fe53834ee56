"""Sparse attention of prompts and repeated tokens against their definitions. With a GPU: tests/gpu/engine."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.cpu.attention.test_causal_attention import make
from torch import Tensor

from kvseek.core.config import KEY_BLOCK, BlockSparseConfig, EngineConfig, TensorRtConfig
from kvseek.core.errors import ConfigError
from kvseek.core.model_config import ModelConfig
from kvseek.engine.model.block_sparse import (
    LATEST,
    MOST_PLACES,
    BlockSparseAttention,
    RepeatedTokens,
    attended_pairs,
    block_mass,
    block_mass_by_attention,
    choose,
    gather,
    repeated_blocks,
    sample,
)
from kvseek.engine.model.prompt_windows import Blocks, cut_blocks
from kvseek.engine.model.reference import causal_attention

HEADS, KV_HEADS, DIM, SAMPLES = 6, 2, 32, 16
MODEL = ModelConfig("llama", 16, 64, 64, 1, HEADS, KV_HEADS, DIM, 1e-5, 1e4, 1 << 20)
DENSE = EngineConfig(MODEL, "full", {}, max_seq_len=1 << 20, max_input_len=1 << 20)


def sparse_config(budget: int, dense_tail: int = 0, query_block: int = 512, **changes: Any) -> EngineConfig:
    settings = BlockSparseConfig(budget, query_block, SAMPLES, dense_tail, 0)
    return dataclasses.replace(DENSE, prefill_attention="block_sparse", block_sparse=settings, **changes)


def text(tokens: int, vocabulary: int) -> RepeatedTokens:
    """A prompt of random tokens, the last ones of which stood there before if the vocabulary is small."""
    return RepeatedTokens(torch.randint(vocabulary, (tokens,)).tolist(), torch.device("cpu"))


def visible(
    queries: Tensor, keys: Tensor, scaling: float, config: EngineConfig, following: int, repeated: RepeatedTokens
) -> Tensor:
    """Which keys each query and KV head may attend to, bool [G, q, n], one query block after the other in float64."""
    q, (kv_heads, n, _) = queries.shape[1], keys.shape
    past = (n - q) // KEY_BLOCK * KEY_BLOCK
    position, count = torch.arange(n), config.block_sparse.budget // KEY_BLOCK
    seen = (position <= position[n - q :, None]).expand(kv_heads, q, n).clone()
    sparse = q - max(0, config.block_sparse.dense_tail - following)
    if past // KEY_BLOCK <= count:
        return seen
    size = config.block_sparse.query_block
    again = (
        repeated.blocks(n - q, n - q + sparse, size, past // KEY_BLOCK, repeated_blocks(count)) if sparse > 0 else []
    )
    for start in range(0, sparse, size):
        stop = min(start + size, sparse)
        places = [start + int((i + 0.5) * (stop - start) / SAMPLES) for i in range(SAMPLES)]
        for head in range(kv_heads):
            mass = torch.zeros(past // KEY_BLOCK, dtype=torch.float64)
            for query in queries.unflatten(0, (kv_heads, -1))[head][:, places].reshape(-1, queries.shape[2]):
                weights = (keys[head, :past].double() @ query.double() * scaling).softmax(dim=0)
                mass += weights.view(-1, KEY_BLOCK).sum(dim=1)
            mass[again[start // size]] = torch.inf
            best = sorted(range(1, len(mass) - LATEST), key=lambda block: -float(mass[block]))
            for block in best[count - LATEST - 1 :]:
                seen[head, start:stop, block * KEY_BLOCK : (block + 1) * KEY_BLOCK] = False
    return seen


def definition(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, seen: Tensor) -> Tensor:
    """Attention to the keys that are seen, [q, H, D] in float64."""
    group = queries.shape[0] // keys.shape[0]
    keys, values, seen = (part.repeat_interleave(group, dim=0) for part in (keys.double(), values.double(), seen))
    scores = (queries.double() @ keys.mT * scaling).masked_fill(~seen, -torch.inf)
    return (scores.softmax(dim=-1) @ values).transpose(0, 1)


@pytest.mark.parametrize(("q", "past"), [(700, 2000), (512, 1024), (1100, 1087), (5, 3000), (513, 4096), (64, 575)])
@pytest.mark.parametrize(
    ("dense_tail", "following", "query_block", "vocabulary"),
    [(0, 0, 512, 1 << 20), (300, 0, 512, 40), (300, 170, 512, 300), (9, 0, 100, 20)],
)
def test_it_is_attention_to_the_blocks_of_most_mass_and_to_repeated_text(
    q: int, past: int, dense_tail: int, following: int, query_block: int, vocabulary: int
) -> None:
    torch.manual_seed(q + past)
    config, (queries, keys, values) = (
        sparse_config(576, dense_tail, query_block),
        make(q, past + q, HEADS, KV_HEADS, DIM, torch.float32),
    )
    attention, repeated = BlockSparseAttention(config, causal_attention, block_mass), text(past + q, vocabulary)
    found = attention(3 * queries, keys, values, 0.2, following, repeated)
    seen = visible(3 * queries, keys, 0.2, config, following, repeated)
    expected = definition(3 * queries, keys, values, 0.2, seen)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    sparse = q > max(0, dense_tail - following) and past // KEY_BLOCK * KEY_BLOCK > 576
    assert seen.tril(past).sum() < definition_pairs(q, past) if sparse else seen.sum() == definition_pairs(q, past)


def definition_pairs(q: int, past: int) -> int:
    """Pairs of a query and a key in all KV heads with dense attention."""
    return KV_HEADS * (q * past + q * (q + 1) // 2)


@pytest.mark.parametrize("past", [0, 1, 1000, 1024, 1087])
def test_a_budget_that_covers_the_past_is_dense_attention(past: int) -> None:
    attention = BlockSparseAttention(sparse_config(1024), causal_attention, block_mass)
    queries, keys, values = make(700, past + 700, HEADS, KV_HEADS, DIM, torch.float32)
    found = attention(queries, keys, values, 0.2, 0, text(past + 700, 50))
    assert torch.equal(found, causal_attention(queries, keys, values, 0.2))


def test_sharp_attention_finds_its_block() -> None:
    """One key that all queries look for, in each block in turn: attention to a budget is attention to everything."""
    torch.manual_seed(0)
    attention = BlockSparseAttention(sparse_config(512), causal_attention, block_mass)
    for place in range(30, 2048, 300):
        queries, keys, values = make(64, 2112, HEADS, KV_HEADS, DIM, torch.float32)
        sought = torch.randn(DIM)
        queries, keys = queries * 0.1 + sought, keys * 0.1
        keys[:, place] = sought
        found, expected = (
            one(queries, keys, values, 1.0, *more)
            for one, more in ((attention, (0, text(2112, 1 << 20))), (causal_attention, ()))
        )
        assert (found - expected).abs().max() < 1e-3


@pytest.mark.parametrize(
    "past", [64, 128, DIM * KEY_BLOCK, DIM * KEY_BLOCK + 64, 3 * DIM * KEY_BLOCK, 5 * DIM * KEY_BLOCK - 64]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_to_one_hot_values_is_the_mass_of_blocks(past: int, dtype: torch.dtype) -> None:
    torch.manual_seed(past)
    queries, keys, _ = make(1030, past + 1030, HEADS, KV_HEADS, DIM, dtype)
    samples, keys = sample(2 * queries, KV_HEADS, 512, SAMPLES), keys[:, :past]
    assert samples.shape == (KV_HEADS, 3, HEADS // KV_HEADS * SAMPLES, DIM)

    def attend(queries: Tensor, keys: Tensor, blocks: Blocks, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        operator: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        pieces = cut_blocks(keys, blocks)
        shape = (*pieces.shape[:2], -1, -1)
        found: tuple[Tensor, Tensor] = operator(
            queries.expand(shape), pieces, values.expand(shape), 0.0, False, scale=scaling
        )
        return found

    found, expected = block_mass_by_attention(samples, keys, 0.2, attend), block_mass(samples, keys, 0.2)
    assert found.shape == expected.shape == (KV_HEADS, 3, past // KEY_BLOCK)
    assert (expected.sum(dim=2) - samples.shape[2]).abs().max() < 1e-3, "the samples' whole attention"
    torch.testing.assert_close(found, expected, **({} if dtype is torch.float32 else {"rtol": 0.02, "atol": 0.02}))


def test_samples_are_spread_over_their_block() -> None:
    queries = torch.arange(1200.0).expand(HEADS, DIM, 1200).transpose(1, 2)
    found = sample(queries, KV_HEADS, 512, SAMPLES)[0, :, :SAMPLES, 0].long()
    assert found[0].tolist() == list(range(16, 512, 32))
    assert found[1].tolist() == list(range(512 + 16, 1024, 32))
    assert found[2].tolist() == [1024 + (2 * i + 1) * 176 // 32 for i in range(16)]
    assert sample(queries[:, :1], KV_HEADS, 512, SAMPLES).eq(0).all(), "a lone query is all of the samples"


def test_the_first_and_the_latest_blocks_are_always_chosen() -> None:
    mass = torch.rand(3, 2, 40)
    mass[..., 0] = mass[..., 36:] = 0
    best = mass.topk(7).indices.sort().values
    chosen = choose(mass.clone(), 12, torch.zeros(2, 3, dtype=torch.int64))
    assert chosen[..., 0].eq(0).all()
    assert chosen[..., -4:].eq(torch.arange(36, 40)).all()
    assert torch.equal(chosen[..., 1:-4], best)
    least = mass[..., 1:36].argmin(dim=2) + 1
    for block in least.flatten().tolist():
        again = torch.tensor([[0, 0], [0, block]])
        assert (choose(mass.clone(), 12, again)[:, 1] == block).any(dim=1).all()


def test_what_must_be_chosen_fits_into_the_smallest_budget() -> None:
    for blocks in range(8, 200):
        assert 1 <= repeated_blocks(blocks) <= blocks - 1 - LATEST


@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float32, 2), (torch.bfloat16, 6), (torch.bfloat16, 64), (torch.float16, 80)]
)
def test_blocks_are_gathered_to_the_bit(dtype: torch.dtype, dim: int) -> None:
    _, keys, _ = make(1, 641, 4, 2, dim, dtype)
    chosen = torch.tensor([[[0, 3, 9], [1, 2, 8]], [[0, 1, 2], [7, 8, 9]]])
    out = torch.full((2, 2, 300, dim), 7.0, dtype=dtype)
    gather(keys[:, :640], chosen, out[:, :, :192])
    for part, by_head in zip(out, chosen.tolist(), strict=True):
        for head, blocks in enumerate(by_head):
            rows = torch.cat([keys[head, block * 64 : block * 64 + 64] for block in blocks])
            assert torch.equal(part[head, :192], rows)
    assert out[:, :, 192:].eq(7).all()


@given(st.integers(1, 5000), st.sampled_from([512, 1024]), st.sampled_from([0, 512, 900]), st.sampled_from([300, 2048]))
def test_pairs_are_counted(tokens: int, budget: int, dense_tail: int, chunk: int) -> None:
    """By an attention that counts what it is asked to read."""
    read = 0

    def count(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        nonlocal read
        q, n = queries.shape[1], keys.shape[1]
        read += q * (n - q) + q * (q + 1) // 2
        return queries.transpose(0, 1)

    config = sparse_config(budget, dense_tail, prefill_chunk_tokens=chunk)
    attention = BlockSparseAttention(
        config, count, lambda queries, keys, _: torch.rand(1, queries.shape[1], keys.shape[1] // 64)
    )
    repeated = text(tokens, 100)
    for start in range(0, tokens, chunk):
        stop = min(start + chunk, tokens)
        rows = torch.zeros(2, 1, stop, 2)
        out = attention(torch.zeros(1, stop - start, 2), *rows, 1.0, tokens - stop, repeated)
        assert out.shape == (stop - start, 1, 2)
    assert read == attended_pairs(config, tokens)
    settings = dataclasses.replace(config.block_sparse, dense_layers=2)
    three = dataclasses.replace(config, model=dataclasses.replace(MODEL, num_layers=3), block_sparse=settings)
    assert attended_pairs(three, tokens) == read + tokens * (tokens + 1)
    assert attended_pairs(DENSE, tokens) == tokens * (tokens + 1) // 2


def test_fields_out_of_range_are_refused() -> None:
    for budget in (0, 448, 1000):
        with pytest.raises(
            ConfigError, match=f"block_sparse.budget = {budget}: must be a multiple of 64, >= 512; 8192 is"
        ):
            BlockSparseConfig(budget=budget)
    with pytest.raises(ConfigError, match=r"block_sparse.query_block = 0: must be >= 1; 512 is the default"):
        BlockSparseConfig(query_block=0)
    with pytest.raises(ConfigError, match=r"block_sparse.samples = 32: must be <= block_sparse.query_block = 16; more"):
        BlockSparseConfig(query_block=16)
    with pytest.raises(ConfigError, match=r"block_sparse.dense_tail = -1: must be >= 0"):
        BlockSparseConfig(dense_tail=-1)
    with pytest.raises(ConfigError, match=r"prefill_attention = 'sparse': must be one of \('dense', 'block_sparse'\)"):
        dataclasses.replace(DENSE, prefill_attention="sparse")
    with pytest.raises(ConfigError, match=r"block_sparse = .*: must be left out with prefill_attention = 'dense'"):
        dataclasses.replace(DENSE, block_sparse=BlockSparseConfig(1024))
    plan = {"runtime": "tensorrt", "device": "cuda"}
    with pytest.raises(
        ConfigError, match=r"prefill_attention = 'block_sparse': must be 'dense' with runtime = 'tensorrt' and"
    ):
        sparse_config(1024, **plan)
    assert sparse_config(1024, **plan, tensorrt=TensorRtConfig(form="segments")).prefill_attention == "block_sparse"


CPU = torch.device("cpu")


def worth_of_blocks(ids: list[int], start: int, stop: int, past: int) -> list[float]:
    """What each of the first `past` blocks is worth for the tokens start .. stop - 1."""
    places, worth, alone = defaultdict[tuple[int, int], list[int]](list), [0.0] * past, Counter(ids)
    for place in range(stop):
        before = ids[place - 1] if place else -1
        earlier = places[before, ids[place]]
        if place >= start and 0 < len(earlier) <= MOST_PLACES:
            by_chance = alone[before] * alone[ids[place]] / len(ids)
            surprise = max(0.0, math.log((len(earlier) + 1) / by_chance))
            for one in earlier:
                for block in (one // KEY_BLOCK, (one + 1) // KEY_BLOCK):
                    if block < past:
                        worth[block] += surprise / len(earlier)
        earlier.append(place)
    return worth


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 60), st.integers(0, 2**32), st.integers(65, 1500), st.integers(1, 12))
def test_the_blocks_that_are_worth_most(vocabulary: int, seed: int, tokens: int, count: int) -> None:
    torch.manual_seed(seed)
    ids = torch.randint(vocabulary, (tokens,)).tolist()
    start = 64 + seed % (tokens - 64)
    past = start // KEY_BLOCK
    found = RepeatedTokens(ids, CPU).blocks(start, tokens, 200, past, count)
    assert found.shape == (-(-(tokens - start) // 200), min(count, past))
    for number, chosen in enumerate(found.tolist()):
        first = start + 200 * number
        worth = worth_of_blocks(ids, first, min(first + 200, tokens), past)
        best = sorted(worth, reverse=True)[: len(chosen)]
        # The first pair of a prompt has no token before it, and none like it.
        assert sum(worth[block] for block in set(chosen)) >= sum(best) - 1e-4 - (worth[0] if 0 in chosen else 0)
        named = [block for block in chosen if block]
        assert len(set(named)) == len(named)
        assert all(worth[block] > 0 for block in named)


def test_a_rare_pair_is_found_and_frequent_ones_are_not() -> None:
    ids = [1, 2] * 3000
    ids[700:702] = [7, 8]
    ids[5500:5502] = [7, 8]
    (found,) = RepeatedTokens(ids, CPU).blocks(5300, 5812, 512, 80, 20).tolist()
    assert set(found) == {0, 700 // KEY_BLOCK}


def test_a_pair_of_rare_tokens_goes_before_pairs_of_frequent_ones() -> None:
    torch.manual_seed(0)
    ids = torch.randint(100, (20_000,)).tolist()  # any pair stands there twice, by chance
    for place in (3210, 7410, 12_800, 19_500):
        ids[place : place + 2] = [200, 201]
    (found,) = RepeatedTokens(ids, CPU).blocks(19_456, 19_968, 512, 19_456 // KEY_BLOCK, 3).tolist()
    assert set(found) == {place // KEY_BLOCK for place in (3210, 7410, 12_800)}


@pytest.mark.parametrize("ids", [list(range(400)), [5] * 400])
def test_text_that_repeats_nothing_or_only_itself_chooses_nothing(ids: list[int]) -> None:
    assert RepeatedTokens(ids, CPU).blocks(300, 400, 50, 4, 3).eq(0).all()


def test_chunks_that_begin_together_may_end_apart() -> None:
    ids = [*range(200), *range(400)]
    repeated = RepeatedTokens(ids, CPU)
    short, long = (repeated.blocks(400, stop, 50, 6, 3) for stop in (450, 600))
    assert (len(short), len(long)) == (1, 4)
    assert torch.equal(long[:1], short)
