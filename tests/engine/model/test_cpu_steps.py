"""Decode steps on the CPU: batches in which some attend to everything and others retrieve."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.support.prefill import run_prefill

from kvseek.core.request import Request, SamplingConfig
from kvseek.engine.draws.sampling import NO_TOKEN, Drawn, Sampler
from kvseek.engine.engine import Engine
from kvseek.engine.model.decoder import Decoder

FLAGS = (
    *("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "40"),
    *("--max_batch_size", "4", "--max_seq_len", "400", "--flat.top_k", "16"),
)
NUMBERS = torch.arange(180).mul(7).remainder(100).tolist()
PROMPTS = {0: NUMBERS[:25], 3: NUMBERS, 1: NUMBERS[3:10], 2: NUMBERS[30:130]}  # 0 and 1 are dense at first
STEPS = 24  # slot 0 begins to retrieve on the way
MAX_DIFFERENCE = 1e-5


@pytest.fixture(params=["native", "reference"])
def directory(request: pytest.FixtureRequest, random_model: RandomModel, build_engine: BuildEngine) -> Path:
    return build_engine(random_model("qwen3"), "flat", *FLAGS, "--kernels", request.param)


def start(directory: Path) -> Decoder:
    decoder = Engine.load(directory).decoder
    for slot, prompt in PROMPTS.items():
        run_prefill(decoder, slot, prompt, STEPS)
    return decoder


def test_requests_of_a_mixed_batch_are_computed_as_if_alone(directory: Path) -> None:
    together, alone = start(directory), start(directory)
    for step in range(STEPS):
        slots = [3, 0, 2, 1] if step % 2 else [0, 1, 2, 3]
        tokens = [(step * 31 + slot * 17) % 100 for slot in slots]
        logits, attended = together.decode(tokens, slots)
        for row, share, token, slot in zip(logits, attended, tokens, slots, strict=True):
            expected, (expected_share,) = alone.decode([token], [slot])
            assert (row - expected[0]).abs().max() <= MAX_DIFFERENCE
            assert share == expected_share
    assert attended[slots.index(0)] < together.cache.tokens[0], "it retrieves by now"
    assert attended[slots.index(1)] == together.cache.tokens[1], "it is dense to the end"


def test_requests_get_tokens(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, other = start(directory), start(directory)
    sampler = Sampler(Request((1,), 5, SamplingConfig(return_generation_logits=True)), decoder.config.model.vocab_size)
    launched = decoder.launch([5, 6, 7], [0, 3, 2], [None, sampler, None])
    (drawn,) = launched.collect()
    logits, expected = other.decode([5, 6, 7], [0, 3, 2])
    assert (drawn[0], drawn[2], launched.attended) == (int(logits[0].argmax()), int(logits[2].argmax()), expected)
    assert drawn[1] == Drawn(int(logits[1].argmax()), logits=logits[1].numpy().tobytes())
    spoiled = logits.index_fill(0, torch.tensor([1]), torch.nan)
    monkeypatch.setattr(decoder.model, "run_layers", lambda batch, attend: spoiled)
    assert decoder.launch([5, 6, 7], [0, 3, 2], [None] * 3).collect()[0][1] == NO_TOKEN
