"""How attention of prompts on a GPU is cut into parts, and what is left to flash attention. With a GPU: tests/gpu/engine."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvseek.core.config import EngineConfig, ModelConfig, TensorRtConfig
from kvseek.core.errors import KernelError
from kvseek.engine.cache.activation_memory import row_tokens
from kvseek.engine.model.attention import causal_attention_device
from kvseek.engine.model.layer_kernels import LayerKernels
from kvseek.engine.model.prompt_attention import (
    CUDNN_AND_FLASH,
    FLASH,
    MEMORY_EFFICIENT,
    MERGED_PARTS,
    SHORTEST_BLOCK,
    PromptAttention,
    expected_attention,
    fill_up,
    filled_up,
    in_blocks,
    most_parts,
    past_blocks,
    window_tokens,
    windows,
)

MODEL = ModelConfig("llama", 16, 64, 64, 1, 4, 2, 32, 1e-5, 1e4, 1 << 20)
CONFIG = EngineConfig(MODEL, "full", {}, dtype="bfloat16", device="cuda", max_seq_len=1 << 20, max_input_len=100_000)
LENGTHS = st.integers(0, 1 << 21)


@given(LENGTHS)
def test_blocks_are_the_past_but_for_its_end(past: int) -> None:
    blocks, stop = past_blocks(past), 0
    for start, end in blocks:
        assert start == stop
        assert (end - start) % SHORTEST_BLOCK == 0
        assert ((end - start) // SHORTEST_BLOCK).bit_count() == 1
        stop = end
    assert 0 <= past - stop < SHORTEST_BLOCK


@given(LENGTHS, st.integers(1, 1 << 14))
def test_no_chunk_has_more_parts_than_the_work_space_counts(past: int, queries: int) -> None:
    size = window_tokens(queries)
    for base, _, stop in windows(past, past + queries, size):
        assert len(past_blocks(base)) + 1 <= most_parts(stop) <= most_parts(past + queries) <= MERGED_PARTS


@given(LENGTHS, st.integers(1, 1 << 14), st.integers(1, 1 << 14))
def test_a_querys_window_does_not_depend_on_the_chunk(past: int, queries: int, chunk: int) -> None:
    size, stop = window_tokens(chunk), past
    for base, start, end in windows(past, past + queries, size):
        assert (start, base) == (stop, start // size * size)
        assert start < end <= base + size
        assert sum(b - a for a, b in past_blocks(base)) == base, "the past is blocks to its end"
        stop = end
    assert stop == past + queries


def test_plans_are_few() -> None:
    """Whatever the prompts: sizes of blocks, and the chunk itself, times sizes of chunks."""
    blocks = {stop - start for past in range(1 << 17) for start, stop in past_blocks(past)}
    chunks = {filled_up(queries) for queries in range(1, 2049)}
    assert (len(blocks) + 1) * len(chunks) == 7 * 3


@pytest.mark.parametrize("first", [0, 50])
def test_a_chunk_is_filled_up_around_its_queries(first: int) -> None:
    queries = torch.randn(700, 4, 32).transpose(0, 1)
    filled, stop = fill_up(queries, first), first + 700
    assert filled.shape == (4, 1024, 32)
    assert torch.equal(filled[:, first:stop], queries)
    assert not filled[:, :first].any()
    assert not filled[:, stop:].any()
    assert filled.transpose(0, 1).is_contiguous(), "as whole chunks are"
    assert fill_up(filled) is filled


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
        attention = PromptAttention(kernels, MODEL, torch.bfloat16, 2048)
    assert attention.name == FLASH
    assert "prompts are read by flash attention: cuDNN's attention refuses them: Could not run" in caplog.text
    queries, keys = torch.randn(4, 600, 32).bfloat16(), torch.randn(2, 3000, 32).bfloat16()
    expected = causal_attention_device(queries, keys, keys, 0.2)
    assert torch.equal(attention(queries, keys, keys, 0.2), expected)
    assert PromptAttention(kernels, MODEL, torch.float32, 2048).name == MEMORY_EFFICIENT


def test_what_an_engine_directory_says() -> None:
    assert expected_attention(CONFIG).startswith(f"{CUDNN_AND_FLASH}, or {FLASH} alone if cuDNN refuses")
    assert expected_attention(dataclasses.replace(CONFIG, dtype="float32")) == MEMORY_EFFICIENT
    assert expected_attention(dataclasses.replace(CONFIG, device="cpu")) == "kvseek's kernel"
    whole = dataclasses.replace(CONFIG, runtime="tensorrt", tensorrt=TensorRtConfig("tensorrt", "engine"))
    assert expected_attention(whole) == FLASH


def test_heads_of_long_prompts_are_equally_far_apart() -> None:
    assert {row_tokens(CONFIG, tokens) for tokens in (2049, 50_000, 100_000)} == {100_000}
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
