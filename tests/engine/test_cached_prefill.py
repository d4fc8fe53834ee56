"""cache.cached_prefill = "sparse": the rest of a prompt whose beginning is reused is read as decode steps would read it."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.plugins.cases import CASES, SELECTING, method_flags
from tests.support.long_prompts import DOCUMENT, HEADS, SHAPE, Load, ask_logits, load_changed
from tests.support.prefill import run_prefill, run_to_end
from torch import Tensor

from kvseek.core.config import CacheConfig
from kvseek.core.errors import ConfigError
from kvseek.core.request import Request
from kvseek.engine.engine import Engine
from kvseek.engine.loading.supported import check_supported
from kvseek.engine.model.prefill import BLOCK_TOKENS
from kvseek.plugins.registry import get_method

SINK, LOCAL, UPDATE, THRESHOLD = 4, 16, 40, 300
WINDOW = {"sink": SINK, "local": LOCAL, "update": UPDATE, "full_threshold": THRESHOLD}
FLAGS = tuple(word for name, size in WINDOW.items() for word in (f"--cache.{name}", str(size)))
LIMITS = ("--max_batch_size", "4", "--max_seq_len", "3200", "--prefill_chunk_tokens", "512")
SHARING = [method for method in SELECTING if get_method(method).traits().prefix_reuse == "entries"]


@pytest.fixture(scope="module")
def model(random_model: RandomModel) -> Path:
    return random_model("llama", **SHAPE, **HEADS)


@pytest.fixture(scope="module")
def load(model: Path, build_engine: BuildEngine) -> Load:
    """Load an engine whose steps attend to few rows, and whose reused prompts go on sparsely."""

    def make(method: str, *flags: str, **cache: Any) -> Engine:
        directory = build_engine(model, method, *FLAGS, *LIMITS, *method_flags(method, CASES[method].sparse), *flags)
        return load_changed(directory, {"cached_prefill": "sparse", **cache})

    return make


def by_steps(engine: Engine, beginning: tuple[int, ...], rest: tuple[int, ...]) -> Tensor:
    """Logits after a prompt whose beginning is read at once, and the rest in decode steps."""
    run_prefill(engine.decoder, 0, list(beginning), len(rest))
    with torch.inference_mode():
        logits = [engine.decoder.decode([token], [0])[0] for token in rest][-1]
    engine.decoder.cache.close(0)
    return logits[0]


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("method", SHARING)
def test_the_rest_of_a_prompt_is_read_as_by_decode_steps(method: str, kernels: str, load: Load) -> None:
    """Beginnings that end in an extent, at its border and short of one; rests of a token, of a block and of several evictions."""
    engine = load(method, "--kernels", kernels)
    alone = load(method, "--kernels", kernels, reuse=False, cached_prefill="dense")
    cases = ((2300, 1), (1500, 201), (1024 + SINK, 30), (2300, BLOCK_TOKENS), (2048 + SINK + LOCAL, 9), (900, 60))
    for number, (length, more) in enumerate(cases if kernels == "native" else cases[::2]):  # references take long
        beginning = (number + 3, *DOCUMENT[: length - 1])
        rest = tuple(i * 7 % 370 + 5 for i in range(more))
        ask_logits(engine, beginning)
        logits, _, reused = ask_logits(engine, (*beginning, *rest))
        assert reused == length
        assert (logits - by_steps(alone, beginning, rest)).abs().max() < 1e-4


def test_it_differs_from_dense_attention(load: Load) -> None:
    """Otherwise the other tests would not tell the two apart."""
    engine, dense = load("pariskv"), load("pariskv", cached_prefill="dense")
    prompt = DOCUMENT + (9,) * 50
    answers = []
    for one in (engine, dense):
        ask_logits(one, DOCUMENT)
        answers.append(ask_logits(one, prompt)[0])
    assert (answers[0] - answers[1]).abs().max() > 1e-3


def test_beginnings_that_steps_attend_to_wholly_are_continued_densely(load: Load) -> None:
    engine, dense = load("pariskv"), load("pariskv", reuse=False, cached_prefill="dense")
    short = DOCUMENT[: THRESHOLD - 1]
    ask_logits(engine, short)
    prompt = short + (7,) * 60
    logits, _, reused = ask_logits(engine, prompt)
    assert reused == len(short)
    assert (logits - ask_logits(dense, prompt)[0]).abs().max() < 1e-4
    # A method that attends to everything has nothing to select.
    full = load("full")
    ask_logits(full, DOCUMENT)
    logits, _, reused = ask_logits(full, DOCUMENT + (7,) * 60)
    assert reused == len(DOCUMENT)
    assert (logits - ask_logits(dense, DOCUMENT + (7,) * 60)[0]).abs().max() < 1e-4


def test_shared_extents_stay_as_they_are(load: Load) -> None:
    """Conversations that part at several places, at once and with evictions; what they share answers as before."""
    engine, chance = load("nested"), random.Random(3)
    ask_logits(engine, DOCUMENT)
    rests = [tuple(chance.randrange(3, 380) for _ in range(chance.choice((3, 70, 150)))) for _ in range(6)]
    prompts = [
        DOCUMENT[:length] + rest for length, rest in zip((2299, 1700, 2060, 1028, 1300, 2048), rests, strict=True)
    ]
    fresh = {}
    for prompt in prompts:  # each alone, behind nothing but the document
        other = load("nested")
        ask_logits(other, DOCUMENT)
        fresh[prompt] = ask_logits(other, prompt)[1][0]
    ids = {engine.submit(Request(prompt, 1)): prompt for prompt in prompts}
    found = {ids[output.request_id]: output.token_id for output in run_to_end(engine) if output.token_id is not None}
    assert found == fresh
    assert engine._cache.extents.used == 0


def test_a_rest_that_is_being_read_can_be_cancelled_and_waits_for_decode_steps(load: Load) -> None:
    engine = load("pariskv")
    ask_logits(engine, DOCUMENT[:2000])
    running = engine.submit(Request(DOCUMENT[:1200], 200))
    while not any(output.token_id is not None for output in engine.step()):
        pass
    late = engine.submit(Request(DOCUMENT[:2000] + (5,) * 900, 4))
    engine.step()
    progress = [output.prefill_progress for _ in range(3) for output in engine.step() if output.request_id == late]
    assert progress
    assert progress == sorted(progress)
    assert 0 < progress[-1] < 1, "a block at a time, beside decode steps"
    engine.cancel(late)
    engine.cancel(running)
    assert engine._cache.extents.used == 0
    assert ask_logits(engine, DOCUMENT[:2000] + (5,) * 900)[2] == 2000


def test_what_cannot_be_is_refused(load: Load) -> None:
    message = "cache.cached_prefill = 'sparse': must be dense with cache.reuse = False"
    with pytest.raises(ConfigError, match=message):
        CacheConfig(reuse=False, cached_prefill="sparse")
    with pytest.raises(ConfigError, match=r"cache.cached_prefill = 'fast': must be one of \('dense', 'sparse'\)"):
        CacheConfig(cached_prefill="fast")
    config = load("prkv", cached_prefill="dense").config
    config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, cached_prefill="sparse"))
    with pytest.raises(ConfigError, match=r"cache.cached_prefill = 'sparse': must be 'dense' with method = 'prkv'"):
        check_supported(config)
    with pytest.raises(
        ConfigError, match=r"cache.cached_prefill = 'sparse': must be left out with runtime = 'tensorrt'"
    ):
        dataclasses.replace(load("nested").config, device="cuda", kernels="native", runtime="tensorrt")
