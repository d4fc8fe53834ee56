"""Memory that is planned for Gated DeltaNet layers, and sliding windows in float32, against what reading prompts allocates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile

from kvseek.bench.speed.shapes import SHAPES
from kvseek.core.config import EngineConfig
from kvseek.core.model_config import DeltaNetConfig
from kvseek.engine.model.activation_memory import prefill_bytes
from kvseek.engine.model.reference import windowed_attention
from kvseek.kernels.reference.delta_net import GROUPS, DeltaParameters, DeltaPrompt, read_prompts

STATES = DeltaNetConfig((0,), 4, 8, 128, 128, 4)
MODEL = dataclasses.replace(
    SHAPES["qwen3.5-27b"],
    hidden_size=64,
    intermediate_size=64,
    num_layers=2,
    num_heads=1,
    num_kv_heads=1,
    delta_net=STATES,
)


@pytest.mark.parametrize(("counts", "begun"), [((1,) * 40, 0), ((6,) * 40, 0), ((256,), 37), ((63,), 3), ((1000,), 64)])
@pytest.mark.parametrize("device", GROUPS)
def test_prompts_take_no_more_than_is_planned(
    device: str, counts: Sequence[int], begun: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a pack of prompts of one token, each of which takes a block."""
    monkeypatch.setitem(GROUPS, "cpu", GROUPS[device])
    tokens, heads, dtype = sum(counts), STATES.num_value_heads, torch.bfloat16
    limits = {"max_seq_len": 4096, "max_input_len": 2048, "prefill_chunk_tokens": tokens}
    config = EngineConfig(MODEL, "full", dtype="bfloat16", device=device, max_batch_size=len(counts), **limits)
    conv, a_log, dt = torch.randn(STATES.channels, 4).to(dtype), torch.randn(heads), torch.randn(heads)
    parameters = DeltaParameters(STATES, conv, a_log, dt, torch.ones(STATES.value_head_dim, dtype=dtype), 1e-6)
    first = DeltaPrompt.begin(STATES, dtype, torch.device("cpu"))
    prompts = [dataclasses.replace(first, tokens=begun)] * len(counts)
    with torch.inference_mode(), profile(profile_memory=True) as measured:
        qkvz = torch.zeros(tokens, STATES.channels + STATES.values, dtype=dtype)
        read_prompts(qkvz, torch.zeros(tokens, 2 * heads, dtype=dtype), prompts, counts, parameters)
    assert 0 < allocated(measured) < prefill_bytes(config, dtype, tokens) < 4 * allocated(measured)


def test_windows_in_float32_take_no_more_than_is_planned() -> None:
    """PyTorch's only kernel for a mask, and heads that share keys, on a GPU is the one of plain products."""
    shape = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "sliding_window": 1024, "window_layers": (1,)}
    model = dataclasses.replace(SHAPES["qwen2.5-72b"], **shape)
    limits = {"max_seq_len": 4096, "max_input_len": 2048, "prefill_chunk_tokens": 2048}
    config = EngineConfig(model, "full", dtype="float32", device="cuda", max_batch_size=1, **limits)
    queries, keys = torch.randn(8, 2048, 64), torch.randn(2, 2048, 64)
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH), profile(profile_memory=True) as measured:
        windowed_attention(queries, keys, keys, 0.125, 1024)
    plain = dataclasses.replace(config, model=dataclasses.replace(model, sliding_window=None, window_layers=()))
    scores = (
        allocated(measured) - 2 * queries.nbytes - 2 * 1536 * 8 * 64 * 4
    )  # without outputs, and keys and values of heads
    planned = prefill_bytes(config, torch.float32, 2048) - prefill_bytes(plain, torch.float32, 2048)
    assert 0 < scores <= planned < 2 * scores


def allocated(measured: profile) -> int:
    """The most bytes that were held at a time."""
    held = peak = 0
    for event in measured.profiler.kineto_results.events():
        held += event.nbytes() if event.name() == "[memory]" else 0
        peak = max(peak, held)
    return peak
