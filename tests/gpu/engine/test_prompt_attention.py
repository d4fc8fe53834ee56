"""Attention of prompts by cuDNN and flash attention, and the kernel that merges them, against PyTorch in float64.

In float32 a log-sum-exp of 300 is known to 3e-5 only, so the reference of a merge would be less exact than the kernel.
"""

from __future__ import annotations

from functools import reduce
from itertools import accumulate, pairwise

import pytest
import torch
from tests.gpu.conftest import MakeKernels
from torch import Tensor

from kvseek.core.model_config import ModelConfig
from kvseek.engine.model.cuda.attention import PromptAttention
from kvseek.engine.model.library_attention import causal_attention_device
from kvseek.engine.model.reference import windowed_attention
from kvseek.kernels.cuda.attention.merge_attention import PartialAttention
from kvseek.kernels.cuda.attention.merge_attention import merge as merge_parts
from kvseek.kernels.reference.attention.attend import merge

pytestmark = pytest.mark.gpu

# Relative to the largest number: roundings of parts, and in float32 of sums over thousands of keys (PyTorch's kernel).
MERGED = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}
ATTENDED = {**MERGED, "float32": 1e-5}
KV_HEADS, MOST = 2, 60_000


def make(kernels: MakeKernels, dtype: str, dim: int, group: int) -> PromptAttention:
    model = ModelConfig("llama", 16, 64, 64, 1, KV_HEADS * group, KV_HEADS, dim, 1e-5, 1e4, MOST)
    return PromptAttention(kernels(dtype, dim, group), model, getattr(torch, dtype), 2048, MOST)


def check(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def rows(dtype: str, device: torch.device, n: int, dim: int, scale: float = 1.0) -> Tensor:
    """Keys or values [G, n, D] of a prompt, further apart than their number; what lies behind them is poison."""
    memory = torch.full((KV_HEADS, MOST, dim), torch.nan, dtype=getattr(torch, dtype), device=device)
    memory[:, :n] = torch.randn(KV_HEADS, n, dim) * scale
    return memory[:, :n]


def definition(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention in the plainest form: [q, H, D]."""
    (heads, q, dim), n = queries.shape, keys.shape[1]
    keys, values = (part.repeat_interleave(heads // KV_HEADS, dim=0) for part in (keys, values))
    position = torch.arange(n, device=queries.device)
    scores = (queries @ keys.transpose(1, 2) * dim**-0.5).masked_fill(position > position[n - q :, None], -torch.inf)
    return (scores.softmax(dim=-1) @ values).transpose(0, 1)


@pytest.mark.parametrize("parts", [1, 2, 7, 16])
@pytest.mark.parametrize(("dtype", "dim", "group"), [("float32", 64, 3), ("bfloat16", 128, 4), ("float16", 96, 1)])
def test_parts_are_merged(
    dtype: str, dim: int, group: int, parts: int, kernels: MakeKernels, device: torch.device
) -> None:
    torch.manual_seed(parts)
    attention, heads, tokens = make(kernels, dtype, dim, group), KV_HEADS * group, 301
    made = list[PartialAttention]()
    for number in range(parts):
        # In either order of heads and tokens, and with poison behind the tokens.
        shape = (heads, 512, dim) if number % 2 else (512, heads, dim)
        output = torch.randn(shape, device=device).to(attention.dtype)
        output = output if number % 2 else output.transpose(0, 1)
        lse = torch.randn(heads, 512, device=device) * 4 + 300
        output[:, tokens:], lse[:, tokens:] = torch.nan, torch.nan
        made.append(PartialAttention(output[None], lse[None]))
    made += [PartialAttention(torch.cat([part.output for part in made]), torch.cat([part.lse for part in made]))] * (
        parts < 16
    )
    out = torch.empty(tokens, heads, dim, dtype=attention.dtype, device=device)
    found = merge_parts(attention._kernels, made, out)
    blocks = [block for part in made for block in zip(part.output, part.lse, strict=True)]
    whole = [(output[:, :tokens].double(), lse[:, :tokens].double()) for output, lse in blocks]
    expected, _ = reduce(lambda a, b: merge(*a, *b), whole)
    check(found, expected.transpose(0, 1), MERGED[dtype])


@pytest.mark.parametrize(
    ("q", "past"),
    [(2048, 2048), (2048, 6144), (1024, 7001), (1000, 4096), (513, 7001), (512, 2048), (511, 5000), (2048, 2047)],
)
@pytest.mark.parametrize(
    ("dtype", "dim", "group"), [("bfloat16", 128, 4), ("bfloat16", 64, 3), ("float16", 128, 1), ("float32", 64, 3)]
)
def test_it_is_causal_attention(
    dtype: str, dim: int, group: int, q: int, past: int, kernels: MakeKernels, device: torch.device
) -> None:
    torch.manual_seed(q + past)
    attention = make(kernels, dtype, dim, group)
    queries = torch.randn(q, KV_HEADS * group, dim, device=device).to(attention.dtype).transpose(0, 1)
    keys, values = rows(dtype, device, past + q, dim, scale=2.0), rows(dtype, device, past + q, dim)
    found = attention(queries, keys, values, dim**-0.5)
    check(found, definition(queries.double(), keys.double(), values.double()), ATTENDED[dtype])


@pytest.mark.parametrize(
    ("dtype", "dim", "group"), [("bfloat16", 128, 4), ("bfloat16", 64, 3), ("float16", 128, 1), ("bfloat16", 96, 2)]
)
def test_a_query_gives_the_same_bits_whatever_the_chunks(
    dtype: str, dim: int, group: int, kernels: MakeKernels, device: torch.device
) -> None:
    torch.manual_seed(0)
    attention, n = make(kernels, dtype, dim, group), 59_000
    queries = torch.randn(n, KV_HEADS * group, dim, device=device).to(attention.dtype).transpose(0, 1)
    keys, values = rows(dtype, device, n, dim, scale=2.0), rows(dtype, device, n, dim)

    def read(borders: tuple[int, ...]) -> Tensor:
        chunks = [(queries[:, a:b], keys[:, :b], values[:, :b]) for a, b in pairwise(borders)]
        return torch.cat([attention(*chunk, dim**-0.5) for chunk in chunks])

    whole = read((*range(0, n, 2048), n))
    for borders in ((0, n), (0, 1, 700, 2049, 2112, 5000, 8191, 8192, 40_000, n - 30, n), (0, 8448, n - 1, n)):
        assert torch.equal(read(borders), whole), borders


@pytest.mark.parametrize("window", [1, 128, 1000, 4096])
@pytest.mark.parametrize(("dtype", "dim", "group"), [("bfloat16", 128, 4), ("float16", 96, 1), ("bfloat16", 256, 2)])
def test_a_window_gives_the_same_bits_whatever_the_chunks_and_in_a_pack(
    dtype: str, dim: int, group: int, window: int, kernels: MakeKernels, device: torch.device
) -> None:
    torch.manual_seed(window)
    attention, n = make(kernels, dtype, dim, group), 9000
    queries = torch.randn(n, KV_HEADS * group, dim, device=device).to(attention.dtype).transpose(0, 1)
    keys, values = rows(dtype, device, n, dim, scale=2.0), rows(dtype, device, n, dim)
    whole = attention(queries, keys, values, dim**-0.5, window)
    check(whole, windowed_attention(queries.float(), keys.float(), values.float(), dim**-0.5, window), ATTENDED[dtype])
    for borders in ((0, 2048, 4096, 6144, 8192, n), (0, 1, 700, 2049, 5000, n - 30, n)):
        chunks = [(queries[:, a:b], keys[:, :b], values[:, :b]) for a, b in pairwise(borders)]
        assert torch.equal(torch.cat([attention(*one, dim**-0.5, window) for one in chunks]), whole), borders
    borders = (0, 1, 300, 2048, n)
    found = attention.attend_pack(queries, keys, values, borders, dim**-0.5, window)
    for first, stop in pairwise(borders):
        own = (part[:, first:stop] for part in (queries, keys, values))
        assert torch.equal(found[first:stop], attention(*own, dim**-0.5, window)), (first, stop)


@pytest.mark.parametrize(("dtype", "dim", "group"), [("bfloat16", 128, 3), ("bfloat16", 64, 7), ("float16", 96, 1)])
def test_a_prompt_gives_the_same_bits_in_a_pack(
    dtype: str, dim: int, group: int, kernels: MakeKernels, device: torch.device
) -> None:
    """Other prompts, which may fill up to the same number of tokens, and what is no number in them change nothing."""
    torch.manual_seed(0)
    attention = make(kernels, dtype, dim, group)
    borders = tuple(accumulate((300, 20, 400, 512, 100, 300, 1, 9), initial=0))
    queries = torch.randn(borders[-1], KV_HEADS * group, dim, device=device).to(attention.dtype).transpose(0, 1)
    keys, values = rows(dtype, device, borders[-1], dim, scale=2.0), rows(dtype, device, borders[-1], dim)
    values[:, 310] = torch.nan
    found = attention.attend_pack(queries, keys, values, borders, dim**-0.5)
    for first, stop in pairwise(borders):
        own = (part[:, first:stop] for part in (queries, keys, values))
        alone = attention(*own, dim**-0.5)
        assert torch.equal(found[first:stop].nan_to_num(9.0), alone.nan_to_num(9.0)), (first, stop)


def test_float32_is_left_to_pytorch_by_name(kernels: MakeKernels, device: torch.device) -> None:
    attention = make(kernels, "float32", 64, 3)
    assert attention.refusal == "it does not take float32"
    queries, keys = torch.randn(6, 600, 64, device=device), torch.randn(2, 3000, 64, device=device)
    found = attention(queries, keys, keys, 0.1)
    assert torch.equal(found, causal_attention_device(queries, keys, keys, 0.1))


@pytest.mark.parametrize(("dtype", "dim", "group"), [("bfloat16", 128, 4), ("bfloat16", 64, 7)])
def test_cudnn_takes_shapes_of_models(dtype: str, dim: int, group: int, kernels: MakeKernels) -> None:
    assert make(kernels, dtype, dim, group).refusal is None
