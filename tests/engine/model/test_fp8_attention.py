"""Rows of a prompt in FP8: what they lose, and that they do not depend on how it is read. With a GPU: tests/gpu/engine."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.support.device_stand_ins import make_decoder
from tests.support.prefill import run_prefill
from torch import Tensor

from kvseek.core.config import EngineConfig
from kvseek.core.errors import ConfigError
from kvseek.core.model_config import ModelConfig
from kvseek.engine.model import fp8_attention
from kvseek.engine.model.activation_memory import prefill_bytes, waiting_bytes
from kvseek.engine.model.cuda import attention as cuda_attention
from kvseek.engine.model.cuda.attention import PromptAttention
from kvseek.engine.model.fp8_attention import Fp8Attention, Fp8Past
from kvseek.engine.model.prompt_windows import row_tokens
from kvseek.kernels.cuda.attention.fp8_rows import FP8, fp8_rows_reference
from kvseek.kernels.cuda.attention.merge_attention import PartialAttention

KV_HEADS, GROUP, TOKENS, DIM = 2, 3, 5000, 64
MODEL = ModelConfig("llama", 16, 64, 64, 1, KV_HEADS * GROUP, KV_HEADS, DIM, 1e-5, 1e4, 1 << 20)


KERNELS: Any = SimpleNamespace(device=torch.device("cpu"))
MakePast = Callable[[int], Fp8Past]


@pytest.fixture
def make_past(monkeypatch: pytest.MonkeyPatch) -> MakePast:
    """Of so many tokens; rows are rounded by the kernel's reference."""

    def round_rows(_: object, rows: Tensor, into: Tensor, clipped: object, *factors: Tensor | None) -> None:
        into.copy_(fp8_rows_reference(rows, *factors))

    monkeypatch.setattr(fp8_attention, "round_to_fp8", round_rows)
    return lambda tokens: Fp8Past(KERNELS, Fp8ByTorch(), KV_HEADS, GROUP, tokens, DIM)


@pytest.fixture
def past(make_past: MakePast) -> Fp8Past:
    return make_past(TOKENS)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, scaling: float, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """What cuDNN computes, in float32: outputs [B, H, q, D] in the values' dtype and log-sum-exps [B, H, q]."""
    group = queries.shape[1] // keys.shape[1]
    wide_keys, wide_values = (part.float().repeat_interleave(group, dim=1) for part in (keys, values))
    scores = queries.float() @ wide_keys.transpose(2, 3) * scaling
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    return (scores.softmax(dim=3) @ wide_values).to(values.dtype), scores.logsumexp(dim=3)


class Fp8ByTorch(Fp8Attention):
    def __init__(self) -> None:
        self.clipped, self._warned = torch.zeros(1), False

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        return attend(queries, keys, values, scaling)


@pytest.fixture
def attention(make_past: MakePast, monkeypatch: pytest.MonkeyPatch) -> PromptAttention:
    """That of prompts on a GPU, with PyTorch in the place of cuDNN and of the kernels; windows have 2,048 tokens."""

    def merge(_: object, parts: Sequence[PartialAttention], merged: Tensor) -> Tensor:
        tokens = len(merged)
        lse = torch.cat([one.lse[:, :, :tokens] for one in parts])
        widened = [
            one.output[:, :, :tokens].float() * (1 if one.scales is None else one.scales[:, None]) for one in parts
        ]
        return merged.copy_((lse.softmax(dim=0)[..., None] * torch.cat(widened)).sum(dim=0).transpose(0, 1))

    monkeypatch.setattr(cuda_attention, "cudnn_attention", attend)
    monkeypatch.setattr(cuda_attention, "merge", merge)
    found = PromptAttention(KERNELS, MODEL, torch.bfloat16, 3000, 10_000)
    found.fp8 = Fp8ByTorch()
    return found


def rows(scale: float, common: float) -> Tensor:
    """Rows [G, n, D] of a prompt; `common` is how large what all have in common is."""
    generator = torch.Generator().manual_seed(int(common))
    drawn, centre = (torch.randn(KV_HEADS, n, DIM, generator=generator) for n in (TOKENS, 1))
    return (drawn * scale + centre * common).bfloat16()


@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
def test_scores_and_values_lose_a_few_per_cent(past: Fp8Past, scale: float) -> None:
    """Whatever their scale, and a hundred times as large as what tells keys apart what they have in common.

    Some channels of keys are large, and others of queries.
    """
    keys, values = rows(scale, 100 * scale), rows(scale, 0)
    queries = torch.randn(KV_HEADS * GROUP, 10, DIM).bfloat16()
    keys[..., 3:5], queries[..., 7:9] = keys[..., 3:5] * 30, queries[..., 7:9] * 30
    past.extend(keys, values, 4096)
    of_heads = keys[:, :4096].float().repeat_interleave(GROUP, dim=0)
    exact = queries.float() @ (of_heads - of_heads.mean(dim=1, keepdim=True)).transpose(1, 2)
    rounded = past.rounded(queries, 16)
    assert rounded.dtype is FP8
    assert rounded.shape == (KV_HEADS * GROUP, 16, DIM)
    read = past.keys[:, :4096].float().repeat_interleave(GROUP, dim=0).transpose(1, 2)
    found = rounded[:, :10].float() @ read
    centred = found - found.mean(dim=2, keepdim=True)  # a constant of a query changes no softmax
    exact -= exact.mean(dim=2, keepdim=True)
    assert (centred - exact).norm() < 0.06 * exact.norm()
    back = past.values[:, :4096].float() * past.value_scales[::GROUP, None]
    assert (back - values[:, :4096].float()).norm() < 0.04 * values.float().norm()


def test_a_row_is_rounded_alike_however_the_prompt_is_read(past: Fp8Past, make_past: MakePast) -> None:
    keys, values = rows(1.0, 10.0), rows(1.0, 0)
    past.extend(keys, values, 4992)
    parts = make_past(TOKENS)
    for seen, stop in ((2100, 2048), (2200, 2112), (2200, 2048), (4100, 4096), (TOKENS, 4992)):
        parts.extend(keys[:, :seen], values[:, :seen], stop)
    assert torch.equal(parts.keys[:, :4992].float(), past.keys[:, :4992].float())
    assert torch.equal(parts.values[:, :4992].float(), past.values[:, :4992].float())


def test_larger_rows_than_the_first_stay_finite(past: Fp8Past) -> None:
    keys = rows(1.0, 0)
    keys[:, 3000] *= 1000
    past.extend(keys, keys, 4096)
    assert torch.isfinite(past.keys[:, :4096].float()).all()
    assert past.keys[:, 3000].float().abs().max() == torch.finfo(FP8).max


def test_zeros_are_rounded_to_zeros(past: Fp8Past) -> None:
    zeros = torch.zeros(KV_HEADS, TOKENS, DIM).bfloat16()
    past.extend(zeros, zeros, 4096)
    assert not past.keys[:, :4096].float().any()
    assert torch.isfinite(past.query_scales).all()


def test_without_the_frontend_of_cudnn_fp8_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(ConfigError, match=r"prefill_precision = 'fp8': needs the package nvidia-cudnn-frontend"):
        Fp8Attention(torch.device("cpu"))


def test_a_prompt_in_fp8_needs_a_byte_more_for_each_number_of_a_layers_rows() -> None:
    wide = EngineConfig(MODEL, "full", {}, dtype="bfloat16", device="cuda", max_seq_len=100_000, max_input_len=100_000)
    narrow = dataclasses.replace(wide, prefill_precision="fp8")
    for count in (prefill_bytes, waiting_bytes):
        more = count(narrow, torch.bfloat16, TOKENS) - count(wide, torch.bfloat16, TOKENS)
        assert more == 2 * KV_HEADS * row_tokens(narrow, TOKENS) * DIM


def test_a_prompt_of_a_pack_or_in_chunks_is_read_as_alone(attention: PromptAttention) -> None:
    """Also one that is longer than a window: its first window is read in FP8 by the second."""
    borders = (0, 300, 2800, 2900)
    keys, values = (part[:, : borders[-1]] for part in (rows(1.0, 10.0), rows(1.0, 0)))
    queries = torch.randn(borders[-1], KV_HEADS * GROUP, DIM).bfloat16().transpose(0, 1)
    packed = attention.attend_pack(queries, keys, values, borders, DIM**-0.5)
    own = [[part[:, first:stop] for part in (queries, keys, values)] for first, stop in pairwise(borders)]
    alone = [attention(*one, DIM**-0.5, past=attention.fp8_past(3000)) for one in own]
    assert torch.equal(packed, torch.cat(alone))
    (long, long_keys, long_values), past = own[1], attention.fp8_past(3000)
    chunks = [
        attention(long[:, first:stop], long_keys[:, :stop], long_values[:, :stop], DIM**-0.5, past=past)
        for first, stop in pairwise((0, 700, 2100, 2500))
    ]
    torch.testing.assert_close(torch.cat(chunks), alone[1], rtol=0.02, atol=0.02)
    exact = attend(*(one[None] for one in own[1]), DIM**-0.5, causal=True)[0][0].transpose(0, 1).float()
    wide, exact, narrow = (part[2048:] for part in (attention(*own[1], DIM**-0.5), exact, alone[1]))
    assert (wide - exact).norm() < 0.01 * exact.norm() < (narrow - exact).norm() < 0.06 * exact.norm()


def test_layers_rows_are_freed_and_prompts_of_all_lengths_spaced_alike(
    attention: PromptAttention, random_model: RandomModel, build_engine: BuildEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """cuDNN compiles a graph for each spacing of a prompt's KV heads. Of numbers that were clipped the log warns once."""
    limits = ("--max_seq_len", "600", "--max_input_len", "500", "--prefill_chunk_tokens", "64", "--max_batch_size", "3")
    decoder = make_decoder(build_engine(random_model("llama"), "full", *limits))
    alive, spacings = weakref.WeakSet[Fp8Past](), []
    make = attention.fp8_past

    class Recorded(PromptAttention):
        def fp8_past(self, spacing: int) -> Fp8Past | None:
            assert not alive, "that of the layer before has been freed"
            past = make(spacing)
            assert past is not None
            alive.add(past)
            spacings.append(spacing)
            return past

    attention.__class__ = Recorded
    model: Any = decoder.model
    model.attention, model.config = attention, dataclasses.replace(decoder.config, device="cuda")
    assert attention.fp8 is not None
    for slot, tokens in enumerate((200, 300, 450)):
        run_prefill(decoder, slot, [7] * tokens, 1)
        assert not alive
        assert caplog.text.count("has clipped queries, keys or values") == min(slot, 1)
        attention.fp8.clipped.fill_(1)
    assert len(spacings) == 3 * decoder.config.model.num_layers
    assert len(set(spacings)) == 1, spacings
