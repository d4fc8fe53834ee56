"""One matrix for all methods: what the contract of plugins/contract.py promises, whatever the method."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.engine.model.test_logits import engine_logits
from tests.plugins.cases import CASES, SELECTING, WITH_PAPER, Settings, method_flags

from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.options import build_options
from kvseek.core.config import EngineConfig, read_config
from kvseek.core.errors import ConfigError
from kvseek.core.request import Request
from kvseek.engine.engine import Engine
from kvseek.plugins.registry import METHODS, get_method

WINDOW = ("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "32")
PROMPT = torch.arange(230).mul(13).remainder(101).tolist()


@pytest.fixture(scope="module")
def model(random_model: RandomModel) -> Path:
    """One architecture: methods see keys and queries, whatever made them."""
    return random_model("qwen3")


@pytest.mark.parametrize(
    ("method", "kernels"),
    [
        (method, name)
        for method in SELECTING
        for name in ("native", "reference")
        if name == "native" or method in METHODS
    ],
)
def test_exact_when_everything_is_kept(model: Path, method: str, kernels: str, build_engine: BuildEngine) -> None:
    forced = torch.arange(40).mul(17).remainder(101).tolist()
    full = engine_logits(Engine.load(build_engine(model, "full", *WINDOW)), PROMPT, forced)
    everything = (*WINDOW, *method_flags(method, CASES[method].everything), "--kernels", kernels)
    found = engine_logits(Engine.load(build_engine(model, method, *everything)), PROMPT, forced)
    assert (found - full).abs().max() <= 1e-4


@pytest.mark.parametrize("method", METHODS)
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


def given_settings(method: str) -> list[Settings]:
    cases = CASES[method]
    return [{}, cases.sparse, cases.index, *cases.options, *cases.on_gpu.values(), *cases.counted]


@pytest.mark.parametrize("method", CASES)
def test_fields_go_through_json(method: str) -> None:
    for fields in given_settings(method):
        config = get_method(method).configure({**fields})
        assert get_method(method).configure(json.loads(json.dumps(dataclasses.asdict(config)))) == config


@pytest.mark.parametrize(
    ("method", "fields", "message"), [(name, *one) for name in CASES for one in CASES[name].refused]
)
def test_bad_fields_are_named(method: str, fields: Settings, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        get_method(method).configure({**fields})


def preset_numbers(config: EngineConfig, method: str) -> dict[str, object]:
    """The fields of an engine that its method's case says of the paper."""
    stored = config.method_config | {f"cache.{name}": value for name, value in vars(config.cache).items()}
    steps = [tuple(step.values()) for step in stored.get("schedule_steps", ())]
    return {name: tuple(steps) if name == "schedule_steps" else stored[name] for name in CASES[method].paper}


@pytest.mark.parametrize("method", WITH_PAPER)
def test_a_papers_settings(model: Path, method: str, build_engine: BuildEngine) -> None:
    options = {"model": model, "method": method, "output_dir": model, "preset": "paper"}
    assert (
        preset_numbers(build_options(options).engine_config(open_checkpoint(model).config), method)
        == CASES[method].paper
    )
    fewer = {"cache.local": 64, "cache.update": 32, "cache.full_threshold": 128, f"{method}.top_k": 64}
    flags = [word for name, value in fewer.items() for word in (f"--{name}", str(value))]
    directory = build_engine(model, method, "--preset", "paper", *flags)
    config = read_config(directory)
    given = {name.removeprefix(f"{method}."): value for name, value in fewer.items()}
    assert preset_numbers(config, method) == {
        name: given.get(name, value) for name, value in CASES[method].paper.items()
    }, "a flag overrides the preset"
    engine = Engine.load(directory)
    engine.submit(Request(tuple(PROMPT * 2), 8))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert sum(output.token_id is not None for output in outputs) == 8
    assert not any(output.error for output in outputs)
    assert outputs[-1].attended_tokens < outputs[-1].cached_tokens


@pytest.mark.parametrize("method", sorted(set(CASES) - set(WITH_PAPER)))
def test_a_method_of_no_paper_has_no_preset(model: Path, method: str) -> None:
    options = build_options({"model": model, "method": method, "output_dir": model, "preset": "paper"})
    with pytest.raises(ConfigError, match=f"preset = 'paper': method {method} has none of that name; leave it out"):
        options.engine_config(open_checkpoint(model).config)
