"""Memory that is planned for Gated DeltaNet layers against what reading prompts allocates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch.profiler import profile

from kvseek.bench.speed.shapes import SHAPES
from kvseek.core.config import EngineConfig
from kvseek.core.model_config import DeltaNetConfig
from kvseek.engine.model.activation_memory import prefill_bytes
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
    held = peak = 0
    for event in measured.profiler.kineto_results.events():
        held += event.nbytes() if event.name() == "[memory]" else 0
        peak = max(peak, held)
    assert 0 < peak < prefill_bytes(config, dtype, tokens) < 4 * peak
