"""What tests/engine/test_rounded_rows.py asks of engines on the CPU, with rows in host memory and on the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.engine.test_preemption import ask
from tests.engine.test_rounded_rows import FORCED, LIMITS, ROUNDED, logits_of, near
from tests.gpu.engine.test_preemption import pool
from tests.gpu.engine.test_prefix_reuse import WINDOW
from tests.plugins.cases import CASES, method_flags
from tests.support.long_prompts import DOCUMENT, HEADS, SHAPE, ask_logits, load_changed

from kvseek.core.request import Request, SamplingConfig

pytestmark = pytest.mark.gpu

SAMPLING = SamplingConfig(forced_tokens=FORCED + FORCED, return_generation_logits=True)


@pytest.fixture(params=ROUNDED)
def engines(request: pytest.FixtureRequest, random_model: RandomModel, on_gpu: BuildEngine) -> tuple[Path, Path]:
    """Engines with rows in 16 bits and in 8, whose method attends to everything."""
    method, model = request.param, random_model("llama", **SHAPE, **HEADS, head_dim=64)
    flags = (*WINDOW, *LIMITS, *method_flags(method, CASES[method].everything), "--dtype", "bfloat16")
    if method == "clusterkv":
        flags += ("--clusterkv.dense_layers", "0")  # which have rows on the device, whatever cache.offload says
    exact, rounded = (on_gpu(model, method, *flags, "--cache.row_dtype", one) for one in ("auto", "int8"))
    return exact, rounded


@pytest.mark.parametrize("offload", ["always", "never"])
def test_logits_are_near_those_of_rows_that_are_not_rounded(offload: str, engines: tuple[Path, Path]) -> None:
    logits = []
    for directory in engines:
        (told,), _ = ask(load_changed(directory, {"offload": offload}), [Request(DOCUMENT, len(FORCED) * 2, SAMPLING)])
        logits.append(logits_of(told))
    exact, rounded = logits
    assert torch.equal(exact[0], rounded[0]), "a prompt's own tokens are not rounded for it"
    assert not torch.equal(exact, rounded)
    assert near(rounded, exact, 0.03)


@pytest.mark.parametrize("offload", ["always", "never"])
def test_a_reused_beginning_has_the_rows_that_were_written(offload: str, engines: tuple[Path, Path]) -> None:
    fresh, engine = (
        load_changed(directory, {"offload": offload, "reuse": reuse})
        for directory, reuse in zip(engines, (False, True), strict=True)
    )
    for prompt, reused in ((DOCUMENT, 0), (DOCUMENT + (5,) * 40, len(DOCUMENT)), (DOCUMENT[:1500] + (7,) * 40, 1500)):
        logits, _, found = ask_logits(engine, prompt)
        assert found == reused
        assert near(logits, ask_logits(fresh, prompt)[0], 0.03)


@pytest.mark.parametrize("offload", ["always", "never"])
def test_a_preempted_request_goes_on(offload: str, engines: tuple[Path, Path]) -> None:
    directory = engines[1]
    requests = [Request((number, *DOCUMENT[number : number + 1041]), 80, SAMPLING) for number in range(4, 8)]
    many, few = (load_changed(directory, pool(directory, offload, count)) for count in (30, 5))
    assert few._cache.extents.capacity == 5
    (expected, none), (found, counts) = ask(many, requests), ask(few, requests)
    assert (sum(none), sum(counts) > 0) == (0, True)
    for one, other in zip(expected, found, strict=True):
        assert near(logits_of(other), logits_of(one), 0.03)
