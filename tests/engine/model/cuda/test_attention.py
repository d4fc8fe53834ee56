"""How attention of prompts on a GPU is cut into parts, and what is left to flash attention. With a GPU: tests/gpu/engine."""

from __future__ import annotations

import dataclasses
import logging
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvseek.core.config import EngineConfig, TensorRtConfig
from kvseek.core.errors import ConfigError, KernelError
from kvseek.core.model_config import ModelConfig
from kvseek.engine.model.cuda.attention import (
    CUDNN_AND_FLASH,
    FLASH,
    MEMORY_EFFICIENT,
    PromptAttention,
    expected_attention,
    in_blocks,
    packed_prompts,
)
from kvseek.engine.model.library_attention import causal_attention_device
from kvseek.engine.model.prompt_windows import (
    SHORTEST_BLOCK,
    Blocks,
    block_tokens,
    filled_up,
    most_blocks,
    past_blocks,
    row_tokens,
    window_tokens,
    windows,
)
from kvseek.kernels.cuda.attention.merge_attention import MERGED_PARTS
from kvseek.kernels.cuda.layer.layer import LayerKernels

MODEL = ModelConfig("llama", 16, 64, 64, 1, 4, 2, 32, 1e-5, 1e4, 1 << 20)
CONFIG = EngineConfig(MODEL, "full", {}, dtype="bfloat16", device="cuda", max_seq_len=1 << 20, max_input_len=100_000)
LENGTHS = st.integers(0, 1 << 21)


@given(st.integers(0, 1 << 11), st.integers(1, 1 << 22), st.integers(1, 4096))
def test_blocks_are_the_past(blocks: int, longest: int, queries: int) -> None:
    past, stop, equal = blocks * SHORTEST_BLOCK, 0, block_tokens(longest)
    found = past_blocks(past, equal, queries)
    for start, number, size in found:
        assert start == stop
        assert size == equal or (number == 1 and SHORTEST_BLOCK <= size < equal), "the rest is cut in halves"
        stop += number * size
    assert stop == past

    def borders(calls: list[Blocks]) -> list[int]:
        return [start + i * size for start, number, size in calls for i in range(number)]

    assert borders(found) == borders(past_blocks(past, equal, 1)), "whatever the queries"


@given(LENGTHS, st.integers(1, 1 << 14))
def test_no_chunk_has_more_parts_than_the_work_space_counts(past: int, queries: int) -> None:
    size, longest = window_tokens(queries), past + queries
    for base, start, stop in windows(past, longest, size):
        parts = past_blocks(base, block_tokens(longest), filled_up(stop - start))
        assert len(parts) + 1 <= MERGED_PARTS
        assert sum(number for _, number, _ in parts) + 1 <= most_blocks(stop, longest) <= most_blocks(longest, longest)


@given(LENGTHS, st.integers(1, 1 << 14), st.integers(1, 1 << 14))
def test_a_querys_window_does_not_depend_on_the_chunk(past: int, queries: int, chunk: int) -> None:
    size, stop = window_tokens(chunk), past
    for base, start, end in windows(past, past + queries, size):
        assert (start, base) == (stop, start // size * size)
        assert start < end <= base + size
        assert base % SHORTEST_BLOCK == 0
        stop = end
    assert stop == past + queries


def test_plans_are_few() -> None:
    """Whatever the prompts: sizes and numbers of blocks, times sizes of queries; and the windows of these sizes."""
    pasts, queries = range(0, 1 << 18, SHORTEST_BLOCK), {filled_up(queries) for queries in range(1, 2049)}
    equal = block_tokens(1 << 18)
    plans = {(blocks[1:], one) for past in pasts for one in queries for blocks in past_blocks(past, equal, one)}
    assert len(queries) == 9
    assert len(plans) == 3 * (16 + 2) + 6 * (5 + 2)


@pytest.mark.parametrize(
    ("queries", "size", "number", "width"),
    [
        (2048, 512, 4, 512),
        (1000, 512, 2, 512),
        (300, 512, 1, 512),
        (100, 512, 1, 128),
        (1536, 768, 2, 1024),
        (9, 3, 3, 4),
    ],
)
def test_queries_are_cut_into_blocks_that_are_filled_up(queries: int, size: int, number: int, width: int) -> None:
    cut = torch.randn(queries, 4, 32).transpose(0, 1)
    blocks = in_blocks(cut, size)
    assert blocks.shape == (number, 4, width, 32)
    assert blocks.transpose(1, 2).is_contiguous(), "as chunks are"
    for block, expected in zip(blocks, cut.split(size, dim=1), strict=True):
        assert torch.equal(block[:, : expected.shape[1]], expected)
        assert not block[:, expected.shape[1] :].any()
    assert (blocks.data_ptr() == cut.data_ptr()) == (queries == number * width), "full blocks are not copied"


def test_without_cudnn_flash_attention_reads_prompts_by_name(caplog: pytest.LogCaptureFixture) -> None:
    kernels: Any = SimpleNamespace(device=torch.device("cpu"))
    with caplog.at_level(logging.WARNING):
        attention = PromptAttention(kernels, MODEL, torch.bfloat16, 2048, 4096)
    assert attention.name == FLASH
    assert "prompts are read by flash attention: cuDNN's attention refuses them: Could not run" in caplog.text
    queries, keys = torch.randn(4, 600, 32).bfloat16(), torch.randn(2, 3000, 32).bfloat16()
    expected = causal_attention_device(queries, keys, keys, 0.2)
    assert torch.equal(attention(queries, keys, keys, 0.2), expected)
    assert PromptAttention(kernels, MODEL, torch.float32, 2048, 4096).name == MEMORY_EFFICIENT
    with pytest.raises(ConfigError, match="prefill_precision = 'fp8': must be 'none' where cuDNN refuses 16 bits"):
        PromptAttention(kernels, MODEL, torch.bfloat16, 2048, 4096, fp8=True)


def test_prompts_of_a_pack_are_few_calls() -> None:
    """Prompts that are filled up alike are read together: 300 and 400 tokens, 20 and 100, as many as the rows of a window."""
    borders = tuple(accumulate((300, 20, 400, 512, 100, 300, 300, 1), initial=0))
    calls = packed_prompts(borders, 2048, torch.device("cpu"))
    assert [(one.number, one.size) for one in calls] == [(4, 512), (1, 512), (4, 128)]
    assert sorted(torch.cat([one.own for one in calls]).tolist()) == list(range(borders[-1]))
    for one in calls:
        assert torch.equal(one.rows[one.places], one.own)
        assert one.rows.shape == (one.number * one.size,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_prompt_of_a_pack_attends_to_itself(dtype: torch.dtype) -> None:
    """What is no number in one of them stays there."""
    kernels: Any = SimpleNamespace(device=torch.device("cpu"))
    attention, borders = PromptAttention(kernels, MODEL, dtype, 2048, 4096), (0, 300, 320, 720, 721, 2821)
    queries, keys = (torch.randn(heads, 2821, 32).to(dtype) for heads in (4, 2))
    values = keys + 1
    values[:, 310] = torch.nan
    found = attention.attend_pack(queries, keys, values, borders, 0.2)
    for number, (first, stop) in enumerate(pairwise(borders)):
        own = (part[:, first:stop] for part in (queries, keys, values))
        expected = attention(*own, 0.2)
        assert torch.isfinite(expected).all() == (number != 1)
        assert torch.allclose(found[first:stop], expected, atol=2e-2, rtol=0, equal_nan=True)


def test_what_an_engine_directory_says() -> None:
    assert expected_attention(CONFIG).startswith(f"{CUDNN_AND_FLASH}, or {FLASH} alone if cuDNN refuses")
    assert expected_attention(dataclasses.replace(CONFIG, dtype="float32")) == MEMORY_EFFICIENT
    assert expected_attention(dataclasses.replace(CONFIG, device="cpu")) == "kvseek's kernel"
    assert "in FP8 but" in expected_attention(dataclasses.replace(CONFIG, prefill_precision="fp8"))
    whole = dataclasses.replace(CONFIG, runtime="tensorrt", tensorrt=TensorRtConfig("tensorrt", "engine"))
    assert expected_attention(whole) == FLASH


def test_heads_of_long_prompts_are_equally_far_apart() -> None:
    assert {row_tokens(CONFIG, tokens) for tokens in (8193, 50_000, 100_000)} == {100_000}
    assert {row_tokens(CONFIG, tokens) for tokens in (2049, 5000, 8192)} == {8192}, "of those that longer ones let pass"
    assert [row_tokens(CONFIG, tokens) for tokens in (1, 2048)] == [1, 2048], "a chunk alone has no past"
    assert row_tokens(dataclasses.replace(CONFIG, device="cpu"), 50_000) == 50_000


def test_keys_and_values_that_lie_differently_are_refused() -> None:
    ops = LayerKernels(None, MODEL, torch.float32, torch.device("cpu"), 4)  # type: ignore[arg-type]
    qkv, rotation = torch.zeros(3, 8 * 32), (torch.zeros(3, 16), torch.zeros(3, 16))
    keys, values = torch.zeros(2, 9, 32), torch.zeros(2, 10, 32)[:, :9]
    with pytest.raises(
        KernelError, match=r"strides of keys, values = \(288, 32, 1\), \(320, 32, 1\): must be the same"
    ):
        ops.rope_prompt(qkv, rotation, keys, values, 0, None, None)
