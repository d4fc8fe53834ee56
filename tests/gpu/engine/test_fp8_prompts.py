"""Prompts that attend in FP8: rounding, merging and cuDNN's attention, against PyTorch."""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import pairwise

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.engine.test_equal_bits import LIMITS, SHAPE, WINDOW, ask, check_equal_bits, numbers
from tests.gpu.conftest import MakeKernels
from torch import Tensor

from kvseek.core.config import BlockSparseConfig, CacheConfig, EngineConfig, ModelConfig
from kvseek.engine.engine import Engine
from kvseek.engine.model.block_sparse import (
    BlockSparseAttention,
    RepeatedTokens,
    attend_by_fp8,
    block_mass,
    block_mass_by_attention,
    mass_of,
    sample,
)
from kvseek.engine.model.cuda.attention import PromptAttention
from kvseek.kernels.cuda.attention.fp8_rows import FP8, fp8_rows_reference, round_to_fp8
from kvseek.kernels.cuda.attention.merge_attention import PartialAttention, merge

pytestmark = pytest.mark.gpu

KV_HEADS, MOST = 2, 60_000
SHAPES = pytest.mark.parametrize(("dim", "group"), [(128, 4), (64, 3)])
# Of the norm of what is right. Three bits of fraction: up to 6 % of a number, 2.5 % on average, in each of five roundings.
TOLERANCE = 0.06


def model_of(dim: int, group: int) -> ModelConfig:
    return ModelConfig("llama", 16, 64, 64, 1, KV_HEADS * group, KV_HEADS, dim, 1e-5, 1e4, MOST)


def make(kernels: MakeKernels, dim: int, group: int) -> PromptAttention:
    own = kernels("bfloat16", dim, group)
    return PromptAttention(own, model_of(dim, group), torch.bfloat16, 2048, MOST, fp8=True)


def rows(device: torch.device, n: int, dim: int, scale: float = 1.0, centre: float = 0.0) -> Tensor:
    """Keys or values [G, n, D] that are close to a few directions, as attention needs to be sharp, and share `centre`."""
    directions = torch.randn(KV_HEADS, 50, dim, device=device)
    drawn = directions[:, torch.randint(50, (n,), device=device)] + torch.randn(KV_HEADS, n, dim, device=device) / 2
    return (drawn * scale + centre * torch.randn(KV_HEADS, 1, dim, device=device)).bfloat16()


def definition(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention in float32 and the plainest form: [q, H, D]."""
    (heads, q, dim), n = queries.shape, keys.shape[1]
    keys, values = (part.float().repeat_interleave(heads // KV_HEADS, dim=0) for part in (keys, values))
    position = torch.arange(n, device=queries.device)
    scores = queries.float() @ keys.transpose(1, 2) * dim**-0.5
    scores = scores.masked_fill(position > position[n - q :, None], -torch.inf)
    return (scores.softmax(dim=-1) @ values).transpose(0, 1)


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return ((found.float() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dim", [128, 64])
def test_rows_are_rounded_as_by_the_reference(dim: int, kernels: MakeKernels, device: torch.device) -> None:
    """Strided rows of either order; large ones stay finite, and what is no number stays that."""
    own, heads, tokens = kernels("bfloat16", dim, 4), 5, 301
    drawn = (torch.randn(tokens, heads, dim, device=device) * 200).bfloat16().transpose(0, 1)
    drawn[0, 0, :3] = torch.tensor([1e30, -1e30, torch.nan])
    centres, scales = torch.randn(heads, dim, device=device).bfloat16(), torch.rand(heads, dim, device=device)
    for given in ((None, None), (centres, None), (None, scales), (centres, scales)):
        into, clipped = (
            torch.zeros(heads, 512, dim, dtype=FP8, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )
        round_to_fp8(
            own,
            drawn[1:].clamp(-400, 400),
            into[1:, :tokens],
            clipped,
            *(None if one is None else one[1:] for one in given),
        )
        assert not clipped.item()
        round_to_fp8(own, drawn, into[:, :tokens], clipped, *given)
        assert clipped.item()
        expected = fp8_rows_reference(drawn, *given)
        assert torch.allclose(into[:, :tokens].float(), expected.float(), rtol=0, atol=0, equal_nan=True)
        assert not into[:, tokens:].float().any()


@SHAPES
def test_parts_of_fp8_are_merged(dim: int, group: int, kernels: MakeKernels, device: torch.device) -> None:
    heads, tokens = KV_HEADS * group, 301
    outputs = torch.randn(3, tokens, heads, dim, device=device).to(FP8).transpose(1, 2)
    lse, scales = torch.randn(3, heads, tokens, device=device) * 3, torch.rand(heads, dim, device=device)
    plain = torch.randn(1, heads, tokens, dim, device=device).bfloat16()
    plain_lse = torch.randn(1, heads, tokens, device=device)
    parts = [PartialAttention(outputs, lse, scales), PartialAttention(plain, plain_lse)]
    found = merge(kernels("bfloat16", dim, group), parts, plain.new_empty(tokens, heads, dim))
    weights = torch.cat((lse, plain_lse)).softmax(dim=0)[..., None]
    expected = (weights * torch.cat((outputs.float() * scales[:, None], plain.float()))).sum(dim=0)
    assert error(found, expected.transpose(0, 1)) < 0.005


@SHAPES
@pytest.mark.parametrize(("q", "past"), [(2048, 2048), (2048, 30_720), (700, 7001), (1, 5000), (2048, 0)])
@pytest.mark.parametrize("centre", [0.0, 40.0])
def test_it_is_causal_attention(
    q: int, past: int, centre: float, dim: int, group: int, kernels: MakeKernels, device: torch.device
) -> None:
    """Also with keys that have much in common."""
    torch.manual_seed(q + past)
    attention = make(kernels, dim, group)
    queries = torch.randn(q, KV_HEADS * group, dim, device=device).bfloat16().transpose(0, 1)
    keys, values = rows(device, past + q, dim, 2.0, centre), rows(device, past + q, dim, 0.01)
    found = attention(queries, keys, values, dim**-0.5, past=attention.fp8_past(past + q))
    assert error(found, definition(queries, keys, values)) < TOLERANCE


@SHAPES
def test_a_query_gives_the_same_bits_whatever_the_chunks(
    dim: int, group: int, kernels: MakeKernels, device: torch.device
) -> None:
    torch.manual_seed(0)
    attention, n = make(kernels, dim, group), 20_000
    queries = torch.randn(n, KV_HEADS * group, dim, device=device).bfloat16().transpose(0, 1)
    keys, values = rows(device, n, dim, 2.0, 10.0), rows(device, n, dim)

    def read(borders: tuple[int, ...]) -> Tensor:
        past = attention.fp8_past(n)
        chunks = [(queries[:, a:b], keys[:, :b], values[:, :b]) for a, b in pairwise(borders)]
        return torch.cat([attention(*chunk, dim**-0.5, past=past) for chunk in chunks])

    whole = read((*range(0, n, 2048), n))
    for borders in ((0, n), (0, 1, 700, 2049, 5000, 8191, 8192, n - 30, n), (0, 8448, n - 1, n)):
        assert torch.equal(read(borders), whole), borders
    assert not torch.equal(attention(queries, keys, values, dim**-0.5), whole), "16 bits"


def test_prompts_of_other_lengths_and_long_ones_of_packs(kernels: MakeKernels, device: torch.device) -> None:
    """A shorter prompt finds the graphs that a longer one has had compiled, and one of a pack is read as alone."""
    attention, counts = (
        PromptAttention(kernels("bfloat16", 64, 3), model_of(64, 3), torch.bfloat16, 3000, MOST, fp8=True),
        [],
    )
    queries = torch.randn(12_288, KV_HEADS * 3, 64, device=device).bfloat16().transpose(0, 1)
    keys, values = rows(device, 12_288, 64), rows(device, 12_288, 64)
    assert attention.fp8 is not None
    for n in (12_288, 10_240):
        attention(queries[:, :n], keys[:, :n], values[:, :n], 0.125, past=attention.fp8_past(MOST))
        counts.append(len(attention.fp8._graphs))
    assert counts[0] == counts[1] > 1
    packed = attention.attend_pack(queries[:, :2900], keys[:, :2900], values[:, :2900], (0, 400, 2900), 0.125)
    alone = (part[:, 400:2900] for part in (queries, keys, values))
    assert torch.equal(packed[400:], attention(*alone, scaling=0.125, past=attention.fp8_past(MOST)))


@SHAPES
@pytest.mark.parametrize("past", [16_384, 70 * 64 + 8192])
def test_sparse_prompts_choose_and_attend_in_fp8(
    past: int, dim: int, group: int, kernels: MakeKernels, device: torch.device
) -> None:
    """The masses of blocks are those of 16 bits but for roundings, and with all blocks chosen it is causal attention."""
    torch.manual_seed(past)
    attention, q = make(kernels, dim, group), 2048
    queries = torch.randn(q, KV_HEADS * group, dim, device=device).bfloat16().transpose(0, 1)
    keys, values = rows(device, past + q, dim, 2.0, 20.0), rows(device, past + q, dim)
    repeated = RepeatedTokens(torch.randint(1000, (past + q,)).tolist(), device)
    config = EngineConfig(
        model_of(dim, group), "full", {}, CacheConfig(), dtype="bfloat16", device="cuda", prefill_attention="block_sparse",
        prefill_precision="fp8", max_seq_len=MOST, max_input_len=MOST,
    )  # fmt: skip
    rounded = attention.fp8_past(past + q)
    assert rounded is not None
    assert attention.fp8 is not None
    rounded.extend(keys, values, past)
    samples = sample(queries, KV_HEADS, 512, 32)
    attend = partial(attend_by_fp8, rounded)
    mass = block_mass_by_attention(samples, keys[:, :past], dim**-0.5, attend)
    assert error(mass, block_mass(samples, keys[:, :past], dim**-0.5)) < TOLERANCE
    one = dataclasses.replace(config, block_sparse=BlockSparseConfig(budget=past - 64, dense_tail=100))
    sparse = BlockSparseAttention(one, attention, mass_of(one, attention))
    found = sparse(queries, keys, values, dim**-0.5, 0, repeated, attention.fp8_past(past + q))
    assert error(found, definition(queries, keys, values)) < TOLERANCE


@pytest.mark.parametrize("attention", ["dense", "block_sparse"])
def test_engines_read_prompts_in_fp8(attention: str, random_model: RandomModel, on_gpu: BuildEngine) -> None:
    """Their logits are near to those of 16 bits, and the same however a dense prompt is read."""
    model = random_model("llama", num_attention_heads=4, num_key_value_heads=2, head_dim=64, **SHAPE)
    sparse = (
        "--prefill_attention",
        "block_sparse",
        "--block_sparse.budget",
        "1024",
        "--block_sparse.dense_layers",
        "0",
    )
    flags = (*WINDOW, *LIMITS, "--dtype", "bfloat16", *(sparse if attention == "block_sparse" else ()))
    rounded, wide = (on_gpu(model, "full", *flags, *more) for more in (("--prefill_precision", "fp8"), ()))
    answers = (ask(Engine.load(one), numbers(3000, 3000), steps=1) for one in (rounded, wide))
    logits = [torch.frombuffer(bytearray(first), dtype=torch.float32) for ((first,),) in answers]
    assert 1e-4 < (logits[0] - logits[1]).norm() / logits[1].norm() < 0.1
    if attention == "dense":
        check_equal_bits(rounded)
