"""Speculation changes nothing but time: tokens, log probabilities and logits are those of steps of one token."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from tests.conftest import BuildEngine, RandomModel
from tests.engine.test_preemption import EXTENT_BYTES, LIMITS, REQUESTS, prompt
from tests.plugins.cases import CASES, method_flags
from tests.support.long_prompts import HEADS, SHAPE, WINDOW, load_changed
from tests.support.prefill import run_to_end

from kvseek.bench.speed.drafts import GivenDrafter
from kvseek.core.request import FinishReason, Request, SamplingConfig, StepOutput
from kvseek.engine.engine import Engine
from kvseek.engine.speculation import Speculation
from kvseek.plugins.registry import METHODS, get_method

SPECULATING = [method for method in METHODS if get_method(method).traits().verifies_drafts]
Make = Callable[..., Engine]
Answer = tuple[tuple[int, ...], tuple[object, ...], FinishReason | None]


class AnyDrafter(GivenDrafter):
    """Has any number of tokens drafted, whether they are worth it or not."""

    def __init__(self, answer: Sequence[int], acceptance: float, seed: int) -> None:
        super().__init__(answer, acceptance, seed)
        self._chance = random.Random(seed)

    def chances(self, most: int) -> list[float]:
        return [1e9] * self._chance.randint(0, most)


@pytest.fixture(scope="module")
def make(random_model: RandomModel, build_engine: BuildEngine) -> Make:
    """Make an engine of which few rows are selected."""

    def load(method: str, extents: int = 40, speculation: Speculation | None = None, *flags: str) -> Engine:
        few = method_flags(method, CASES[method].sparse)
        directory = build_engine(random_model("llama", **SHAPE, **HEADS), method, *WINDOW, *LIMITS, *few, *flags)
        plain = load_changed(directory, {"kv_cache_host_memory_bytes": extents * EXTENT_BYTES})
        if speculation is None:
            return plain
        return Engine(plain.config, plain.decoder, plain.tokenizer, speculation=speculation)

    return load


def answers(engine: Engine, requests: Sequence[Request]) -> list[Answer]:
    """Tokens, what came with them, and the reason of the end of each request."""
    ids = [engine.submit(request) for request in requests]
    outputs = run_to_end(engine)
    assert not engine._cache.extents.used
    return [_answer([one for one in outputs if one.request_id == own]) for own in ids]


def _answer(outputs: Sequence[StepOutput]) -> Answer:
    drawn = [one for one in outputs if one.token_id is not None or one.finish_reason]
    assert not any(one.error for one in outputs)
    tokens = tuple(one.token_id if one.token_id is not None else one.end_id or -1 for one in drawn)
    with_each = tuple((one.logprobs, one.generation_logits, one.attended_tokens, one.cached_tokens) for one in drawn)
    return tokens, with_each, drawn[-1].finish_reason


def drafts_of(
    requests: Sequence[Request], expected: Sequence[Answer], acceptance: float
) -> Callable[[Request], AnyDrafter]:
    known = {request.prompt_ids: answer[0] for request, answer in zip(requests, expected, strict=True)}
    return lambda request: AnyDrafter(known[request.prompt_ids], acceptance, len(request.prompt_ids))


STOPPING = replace(REQUESTS[0], prompt_ids=prompt(7), stop_words=((1, 2),), max_tokens=60)


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("method", SPECULATING)
def test_answers_are_those_without_drafts(method: str, kernels: str, make: Make) -> None:
    """Every kind of sampling, with evictions, drafts of every length, and a stop word in the middle of one."""
    plain, flags = make(method, 40, None, "--kernels", kernels), ("--kernels", kernels)
    (whole,) = answers(plain, [STOPPING])
    requests = [*REQUESTS, replace(STOPPING, stop_words=(whole[0][40:43],))]
    expected = answers(plain, requests)
    assert expected[-1][2] is FinishReason.STOP_WORD
    for acceptance in (0.0, 0.7, 1.0) if kernels == "native" else (0.7,):
        engine = make(method, 40, Speculation(), *flags)
        engine.make_drafter = drafts_of(requests, expected, acceptance)
        found = answers(engine, requests)
        if kernels == "native":
            assert found == expected
        else:  # last bits of PyTorch's products depend on the number of rows
            assert [one[0] for one in found] == [one[0] for one in expected]


@pytest.mark.parametrize("method", SPECULATING)
def test_preempted_requests_and_reused_beginnings(method: str, make: Make) -> None:
    """Whoever goes on where he was, and whoever begins with another's rows, finds what tokens that were accepted have left."""
    expected = answers(make(method), REQUESTS)
    engine = make(method, 6, Speculation())
    engine.make_drafter = drafts_of(REQUESTS, expected, 0.8)
    assert answers(engine, REQUESTS) == expected
    assert engine.preemptions
    first = REQUESTS[:3]
    prompts = [(*one.prompt_ids, *answer[0]) for one, answer in zip(first, expected, strict=False)]
    longer = [Request(one, 20, SamplingConfig(logprobs=1)) for one in prompts]
    plain = make(method, 40)
    answers(plain, first)
    after = answers(plain, longer)
    engine = make(method, 40, Speculation())
    engine.make_drafter = drafts_of([*first, *longer], [*expected[:3], *after], 0.8)
    answers(engine, first)
    assert answers(engine, longer) == after
