"""One matrix for all methods: what the contract of plugins/contract.py promises, whatever the method."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.engine.model.test_logits import engine_logits
from tests.plugins.cases import CASES, SELECTING, method_flags

from kvseek.core.request import Request, SamplingParams
from kvseek.engine.engine import Engine

WINDOW = ("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "32")
PROMPT = torch.arange(230).mul(13).remainder(101).tolist()


@pytest.fixture(scope="module")
def model(random_model: RandomModel) -> Path:
    """One architecture: methods see keys and queries, whatever made them."""
    return random_model("qwen3")


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("method", SELECTING)
def test_exact_when_everything_is_kept(model: Path, method: str, kernels: str, build_engine: BuildEngine) -> None:
    forced = torch.arange(40).mul(17).remainder(101).tolist()
    full = engine_logits(Engine.load(build_engine(model, "full", *WINDOW)), PROMPT, forced)
    everything = (*WINDOW, *method_flags(method, CASES[method].everything), "--kernels", kernels)
    found = engine_logits(Engine.load(build_engine(model, method, *everything)), PROMPT, forced)
    assert (found - full).abs().max() <= 1e-4


@pytest.mark.parametrize("method", CASES)
def test_tokens_do_not_depend_on_the_batch(model: Path, method: str, build_engine: BuildEngine) -> None:
    engine = Engine.load(build_engine(model, method, *WINDOW, *method_flags(method, CASES[method].sparse)))
    requests = [
        Request(tuple(PROMPT), 40),
        Request(tuple(PROMPT[:25]), 60),  # dense at first
        Request(tuple(PROMPT[3:]), 30, SamplingParams(temperature=0.8, top_k=20, seed=5)),
        Request(tuple(PROMPT[::-1]), 50),
        Request((7,), 45),
    ]
    alone = [engine.generate([request])[0] for request in requests]
    assert engine.generate(requests) == alone
    assert engine.generate(requests[::-1]) == alone[::-1], "other slots, other order"


@pytest.mark.parametrize("method", CASES)
def test_native_and_reference_agree(model: Path, method: str, build_engine: BuildEngine) -> None:
    forced = torch.arange(40).mul(17).remainder(101).tolist()
    sparse = (*WINDOW, *method_flags(method, CASES[method].sparse))
    native = engine_logits(Engine.load(build_engine(model, method, *sparse)), PROMPT, forced)
    reference = engine_logits(
        Engine.load(build_engine(model, method, *sparse, "--kernels", "reference")), PROMPT, forced
    )
    assert (native - reference).abs().max() <= 1e-4


@pytest.mark.parametrize("method", CASES)
def test_bfloat16_runs_close_to_float32(model: Path, method: str, build_engine: BuildEngine) -> None:
    everything = (*WINDOW, *method_flags(method, CASES[method].everything))
    exact = engine_logits(Engine.load(build_engine(model, method, *everything)), PROMPT, [1, 2, 3])
    narrow = build_engine(model, method, *everything, "--dtype", "bfloat16")
    found = engine_logits(Engine.load(narrow), PROMPT, [1, 2, 3])
    assert (found - exact).norm() <= 0.03 * exact.norm()
