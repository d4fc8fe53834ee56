"""Admission without the worst case, in engines: requests make room for others and go on, and no answer tells of it."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.conftest import BuildEngine, RandomModel
from tests.plugins.cases import CASES, method_flags
from tests.plugins.ctkvr.settings import BY_KEYS
from tests.support.long_prompts import DOCUMENT, HEADS, SHAPE, WINDOW, load_changed
from tests.support.prefill import run_to_end

from kvseek.core.errors import QueueFullError
from kvseek.core.guide import Guide, GuideType
from kvseek.core.request import FinishReason, Request, SamplingParams, StepOutput
from kvseek.core.session import EndedSession, Session
from kvseek.engine.engine import Engine
from kvseek.engine.schedule.scheduler import MOST_PREEMPTIONS
from kvseek.engine.schedule.sequence import RequestSequence
from kvseek.engine.service import EngineService
from kvseek.plugins.registry import METHODS, method_traits

EXTENT_BYTES = 2 * 1024 * 2 * 32 * 4  # of two layers and one KV head of 32 channels, in float32
LIMITS = ("--max_batch_size", "8", "--max_seq_len", "3200", "--prefill_chunk_tokens", "512")
NAMES = {**{name: (name, ()) for name in METHODS}, "ctkvr-rows": ("ctkvr", method_flags("ctkvr", BY_KEYS))}
Told = list[tuple[object, ...]]
Make = Callable[..., Engine]
SAMPLED = SamplingParams(
    temperature=0.9,
    top_p=0.95,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    logprobs=2,
    seed=11,
)
GUIDED = SamplingParams(temperature=0.8, seed=5, guide=Guide(GuideType.REGEX, "[a-z ]{30,200}"))


def prompt(number: int, tokens: int = 1010) -> tuple[int, ...]:
    return (number + 3, *DOCUMENT[number : number + tokens - 1])


# All but the last have one extent at first, and two when they end.
REQUESTS = [
    Request(prompt(0), 90),
    Request(prompt(1), 70, SAMPLED),
    Request(prompt(2), 80, GUIDED, end_ids=(1,)),
    Request(prompt(3), 60, SamplingParams(temperature=1.2, top_k=50, seed=3, return_generation_logits=True)),
    Request(prompt(4), 75, SamplingParams(logprobs=0, bad_words=((7, 8),), min_tokens=70), end_ids=(9, 10, 11)),
    Request(prompt(5, 300), 40, SamplingParams(prompt_logprobs=1, temperature=0.5, seed=9)),
]


@pytest.fixture(scope="module")
def make(random_model: RandomModel, build_engine: BuildEngine) -> Make:
    """Make an engine whose method selects few rows, with so many extents; `fields` are those of the cache's configuration."""

    def load(name: str = "full", extents: int = 6, **fields: object) -> Engine:
        method, own = NAMES[name]
        few = method_flags(method, CASES[method].sparse)
        directory = build_engine(random_model("llama", **SHAPE, **HEADS), method, *WINDOW, *LIMITS, *few, *own)
        return load_changed(directory, {"kv_cache_host_memory_bytes": extents * EXTENT_BYTES, **fields})

    return load


def ask(engine: Engine, requests: Sequence[Request], share: float = 0.0) -> tuple[list[Told], list[int]]:
    """All that clients get of requests that are submitted together, and how often each has been preempted.

    `share` of the steps is followed by a preemption without need, of anybody.
    """
    ids, outputs, chance = [engine.submit(request) for request in requests], list[StepOutput](), random.Random(3)
    while engine.has_work:
        outputs += engine.step()
        able = [one for one in engine._scheduler.running if one.statistics.num_preemptions < MOST_PREEMPTIONS]
        if able and chance.random() < share:
            engine._scheduler.preempt(chance.choice(able))
    assert not any(output.error for output in outputs)
    assert engine._cache.extents.used == 0
    assert sorted(engine._scheduler._free_slots) == list(range(engine.config.max_batch_size))
    own = [[output for output in outputs if output.request_id == one] for one in ids]
    for one in own:
        progress = [output.prefill_progress for output in one]
        assert progress == sorted(progress), "nobody is told that reading begins anew"
    counts = [one[-1].statistics.num_preemptions for one in own if one[-1].statistics is not None]
    assert len(counts) == len(ids)
    assert sum(counts) == engine.preemptions
    assert max(counts) <= MOST_PREEMPTIONS
    return [[told(output) for output in one if output.prefill_progress == 1] for one in own], counts


def told(output: StepOutput) -> tuple[object, ...]:
    scores = output.logprobs, output.prompt_logprobs, output.generation_logits
    return output.token_id, output.finish_reason, output.cached_tokens, output.attended_tokens, *scores


@pytest.mark.parametrize("name", NAMES)
def test_answers_do_not_tell_of_preemptions(name: str, make: Make) -> None:
    expected, none = ask(make(name, 30, reuse=False), REQUESTS)
    assert sum(none) == 0
    for reuse in (True, False):
        for extents, share in ((6, 0.0), (9, 0.1)):
            engine, resumed = make(name, extents, reuse=reuse), list[int]()
            engine.decoder.retrieval.resume, resume = resumed.append, engine.decoder.retrieval.resume  # type: ignore[method-assign]
            engine.decoder.retrieval.resume = lambda slot, go_on=resume, all_=resumed: (all_.append(slot), go_on(slot))  # type: ignore[method-assign, misc, assignment]
            found, counts = ask(engine, REQUESTS, share)
            assert sum(counts) > 0
            assert found == expected
            if share and reuse and method_traits(engine.config).prefix_reuse == "entries":
                assert resumed, "nothing is computed again where all rows are kept"
