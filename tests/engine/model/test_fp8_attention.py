"""Rows of a prompt in FP8: what they lose, and that they do not depend on how it is read. With a GPU: tests/gpu/engine."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvseek.core.config import EngineConfig
from kvseek.core.errors import ConfigError
from kvseek.core.model_config import ModelConfig
from kvseek.engine.model import fp8_attention
from kvseek.engine.model.activation_memory import prefill_bytes, waiting_bytes
from kvseek.engine.model.fp8_attention import Fp8Attention, Fp8Past
from kvseek.kernels.cuda.attention.fp8_rows import FP8, fp8_rows_reference

KV_HEADS, GROUP, TOKENS, DIM = 2, 3, 5000, 64
MODEL = ModelConfig("llama", 16, 64, 64, 1, KV_HEADS * GROUP, KV_HEADS, DIM, 1e-5, 1e4, 1 << 20)


@pytest.fixture
def past(monkeypatch: pytest.MonkeyPatch) -> Fp8Past:
    """One that rounds by the kernel's reference."""

    def round_rows(_: object, rows: Tensor, into: Tensor, cut: object, *factors: Tensor | None) -> None:
        into.copy_(fp8_rows_reference(rows, *factors))

    monkeypatch.setattr(fp8_attention, "round_to_fp8", round_rows)
    kernels: Any = SimpleNamespace(device=torch.device("cpu"))
    return Fp8Past(kernels, torch.zeros(1), KV_HEADS, GROUP, TOKENS, DIM)


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


def test_a_row_is_rounded_alike_however_the_prompt_is_read(past: Fp8Past) -> None:
    keys, values = rows(1.0, 10.0), rows(1.0, 0)
    past.extend(keys, values, 4992)
    parts = Fp8Past(past._kernels, torch.zeros(1), KV_HEADS, GROUP, TOKENS, DIM)
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
        assert more == 2 * KV_HEADS * TOKENS * DIM
