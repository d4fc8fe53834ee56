"""Admission without the worst case, in engines: requests make room for others and go on, and no answer tells of it."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Callable, Sequence

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.engine.cache.test_isolation import POISONS, arrays_of, poison
from tests.plugins.cases import CASES, method_flags
from tests.plugins.ctkvr.settings import BY_KEYS
from tests.support.long_prompts import DOCUMENT, HEADS, SHAPE, WINDOW, load_changed
from tests.support.prefill import run_to_end
from tests.support.steps_ahead import run_ahead

from kvseek.core.errors import QueueFullError
from kvseek.core.guide import Guide, GuideType
from kvseek.core.request import EndedSession, FinishReason, Request, SamplingConfig, Session, StepOutput
from kvseek.engine import engine as engine_module
from kvseek.engine.engine import Engine
from kvseek.engine.schedule.scheduler import MOST_PREEMPTIONS
from kvseek.engine.schedule.sequence import RequestSequence
from kvseek.engine.service import EngineService
from kvseek.plugins.registry import METHODS, method_traits

EXTENT_BYTES = 2 * 1024 * 2 * 32 * 4  # of two layers and one KV head of 32 channels, in float32
LIMITS = ("--max_batch_size", "8", "--max_seq_len", "3200", "--prefill_chunk_tokens", "512")
EXPERTS = "nested with experts"
HYBRID = "nested with states"
NAMES = {
    **{name: (name, ()) for name in METHODS},
    EXPERTS: ("nested", ()),
    HYBRID: ("nested", ()),
    "ctkvr-rows": ("ctkvr", method_flags("ctkvr", BY_KEYS)),
}
READ_AGAIN = ("full", "nested", "prkv", HYBRID)  # without reuse: no state, an index, a state of steps, of layers
Told = list[tuple[object, ...]]
Make = Callable[..., Engine]
SAMPLED = SamplingConfig(
    temperature=0.9,
    top_p=0.95,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    logprobs=2,
    seed=11,
)
GUIDED = SamplingConfig(temperature=0.8, seed=5, guide=Guide(GuideType.REGEX, "[a-z ]{60,200}"))


def prompt(number: int, tokens: int = 1010) -> tuple[int, ...]:
    return (number + 3, *DOCUMENT[number : number + tokens - 1])


# All but the last have one extent at first, and two when they end.
REQUESTS = [
    Request(prompt(0), 64),
    Request(prompt(1), 56, SAMPLED),
    Request(prompt(2), 60, GUIDED, end_ids=(1,)),
    Request(prompt(3), 52, SamplingConfig(temperature=1.2, top_k=50, seed=3, return_generation_logits=True)),
    Request(prompt(4), 58, SamplingConfig(logprobs=0, bad_words=((7, 8),), min_tokens=50), end_ids=(9, 10, 11)),
    Request(prompt(6), 54, SamplingConfig(temperature=1.0, seed=2, forced_tokens=prompt(9, 45), logprobs=1)),
    Request(prompt(5, 300), 24, SamplingConfig(prompt_logprobs=1, temperature=0.5, seed=9)),
]


@pytest.fixture(scope="module")
def make(random_model: RandomModel, build_engine: BuildEngine) -> Make:
    """Make an engine whose method selects few rows, with so many extents; `fields` are those of the cache's configuration."""

    def load(name: str = "full", extents: int = 6, **fields: object) -> Engine:
        method, own = NAMES[name]
        few = method_flags(method, CASES[method].sparse)
        kinds = {"num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "full_attention"]}
        own_shape = SHAPE | kinds if name == HYBRID else SHAPE
        model = random_model({EXPERTS: "qwen3_moe", HYBRID: "qwen3_next"}.get(name, "llama"), **own_shape, **HEADS)
        directory = build_engine(model, method, *WINDOW, *LIMITS, *few, *own)
        return load_changed(directory, {"kv_cache_host_memory_bytes": extents * EXTENT_BYTES, **fields})

    return load


def ask(engine: Engine, requests: Sequence[Request], share: float = 0.0) -> tuple[list[Told], list[int]]:
    """All that clients get of requests that are submitted together, and how often each has been preempted.

    `share` of the steps is followed by a preemption without need, of anybody.
    """
    ids, outputs, chance = [engine.submit(request) for request in requests], list[StepOutput](), random.Random(3)
    while engine.has_work:
        outputs += engine.step()
        if share:
            outputs += engine.settle()
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


def counted(patch: pytest.MonkeyPatch, engine: Engine) -> list[int]:
    """The slots that go on with rows that are kept."""
    slots, resume = list[int](), engine.decoder.resume
    patch.setattr(engine.decoder, "resume", lambda slot: (slots.append(slot), resume(slot)))
    return slots


@pytest.mark.parametrize("name", NAMES)
def test_answers_do_not_tell_of_preemptions(name: str, make: Make) -> None:
    expected, none = ask(make(name, 30, reuse=False), REQUESTS)
    assert sum(none) == 0
    ways = [(True, 6, 0.0, True), (True, 9, 0.1, False)]
    if name in READ_AGAIN:
        ways.append((False, 6, 0.1, False))
    for reuse, extents, share, ahead in ways:
        engine = make(name, extents, reuse=reuse)
        if ahead:
            run_ahead(engine)
        with pytest.MonkeyPatch.context() as patch:
            resumed = counted(patch, engine)
            found, counts = ask(engine, REQUESTS, share)
        assert sum(counts) > 0
        assert found == expected
        if share and reuse and name != HYBRID and method_traits(engine.config).prefix_reuse == "entries":
            assert resumed, "nothing is computed again where all rows are kept"


@pytest.mark.parametrize("name", ["full", "nested", "prkv", HYBRID])
def test_answers_that_come_whole_do_not_tell_of_preemptions(
    name: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their requests take several steps at once, which are settled before one of them makes room."""
    monkeypatch.setattr(engine_module, "LAUNCH_SECONDS", 60.0)
    sampled = SamplingConfig(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=11)
    requests = [Request(prompt(one), 64 - one, sampled if one % 2 else SamplingConfig()) for one in range(5)]
    expected, engine = make(name, 30).generate(requests), make(name, 6)
    decoder, outputs = run_ahead(engine), list[StepOutput]()
    sequences = [engine.prepare(request) for request in requests]
    for sequence in sequences:
        engine.enqueue(sequence, whole=True)
    while engine.has_work:
        outputs += engine.step()
    assert engine.preemptions > 0
    assert decoder.at_once > 1
    found = {one.request_id: [*one.earlier, one.token_id] for one in outputs}
    assert len(outputs) == len(requests), "each has one output"
    assert [found[sequence.request_id] for sequence in sequences] == expected
    assert all(sequence.sampler.prepared is None for sequence in sequences), "nothing stays on the device"


def test_what_a_draw_keeps_outlives_a_preemption(make: Make) -> None:
    """The only request that draws comes back to its slot: its draws are as they were, and so are its tokens' counts."""
    penalties = SamplingConfig(temperature=0.9, repetition_penalty=1.5, frequency_penalty=0.5, seed=11)
    requests = [Request(prompt(0), 60), Request(prompt(1), 50, penalties)]
    engine = make("full", 30)
    expected = engine.generate(requests)
    sequences = [engine.prepare(request) for request in requests]
    for sequence in sequences:
        engine.enqueue(sequence)
    while len(sequences[1].generated) < 14:
        engine.step()
    engine.settle()
    engine._scheduler.preempt(sequences[1])
    others = [torch.full((sequences[1].sampler.vocab_size,), 7, dtype=torch.int32) for _ in range(20)]
    while engine.has_work:
        engine.step()
    assert [sequence.generated for sequence in sequences] == expected
    assert all(bool((other == 7).all()) for other in others)
    assert all(sequence.sampler.prepared is None for sequence in sequences), "nothing stays on the device"


@pytest.mark.parametrize("name", NAMES)
def test_a_request_grows_into_extents_that_hold_anything(name: str, make: Make) -> None:
    request = Request(prompt(1), 100, SamplingConfig(logprobs=0))
    expected, generator = ask(make(name, 30), [request])[0], torch.Generator().manual_seed(3)
    for kind in POISONS[::2]:
        engine, found = make(name, 30), Told()
        engine.submit(request)
        extents, poisoned = engine._cache.extents, False
        while engine.has_work:
            found += [told(output) for output in engine.step() if output.prefill_progress == 1]
            if not poisoned and len(found) > 5:
                poisoned = extents.used == 1
                for array in arrays_of(engine):
                    if array.shape[0] == extents.capacity:
                        for number in extents._free:
                            poison(array[number], kind, generator)
        assert poisoned
        assert [found] == expected, kind


def preempt(engine: Engine, number: int) -> RequestSequence:
    """Preempt a running request, given by its id."""
    (sequence,) = [one for one in engine._scheduler.running if one.request_id == number]
    engine._scheduler.preempt(sequence)
    return sequence


def two_of_which_one_waits(engine: Engine, **fields: object) -> tuple[int, int, list[StepOutput]]:
    """A request that runs, and one that has been preempted behind it and cannot go on before it ends; what both have got."""
    first, second = (engine.submit(Request(prompt(one), 60, **fields)) for one in (0, 1))  # type: ignore[arg-type]
    outputs = list[StepOutput]()
    while not {first, second} <= {output.request_id for output in outputs if output.token_id is not None}:
        outputs += engine.step()
    outputs += [*engine.step(), *engine.step()]
    preempt(engine, second)
    engine._cache.extents._free.clear()  # what is left is the first one's, or will be
    outputs += [*engine.step(), *engine.step()]
    assert (engine.running, engine.waiting) == (1, 1)
    assert outputs[-1].request_id == first
    return first, second, outputs


def test_what_ends_while_it_is_preempted(make: Make) -> None:
    """Cancelled, out of time or shut down: it ends once, with what it has got, and leaves nothing behind."""
    expected = make(extents=30).generate([Request(prompt(0), 60), Request(prompt(1), 60)])
    for reason in (FinishReason.CANCELLED, FinishReason.SHUTDOWN, FinishReason.TIMEOUT):
        engine = make(extents=5)
        first, second, outputs = two_of_which_one_waits(engine, timeout_seconds=3600.0)
        if reason is FinishReason.TIMEOUT:
            sequence = engine._queue.remove(second)
            sequence.statistics.submitted_at -= 7200.0
            engine._queue.put_back(sequence)
            assert engine.next_deadline() == sequence.deadline
            (end,) = engine.expire()
        else:
            ended = engine.cancel_waiting(second, reason)
            assert ended is not None
            end = ended
        assert (end.request_id, end.finish_reason, end.error, end.token_id) == (second, reason, "", None)
        assert end.statistics.num_preemptions == 1
        assert engine.cancel(second) is None
        outputs += run_to_end(engine)
        for number, tokens in zip((first, second), expected, strict=True):
            got = [one.token_id for one in outputs if one.request_id == number and one.token_id is not None]
            assert got == tokens[: len(got)]
            assert len(got) == (60 if number == first else end.statistics.generated_tokens) > 2
        assert engine._cache.extents.used == engine.waiting == 0


def test_who_is_preempted_takes_nobodys_place_in_the_queue(make: Make) -> None:
    engine = make(extents=5)
    engine._queue.max_size = 1
    _, second, _ = two_of_which_one_waits(engine)
    third = engine.submit(Request(prompt(2), 5))
    with pytest.raises(QueueFullError, match="1 requests wait for a slot"):
        engine.submit(Request(prompt(3), 5))
    ends = [output.request_id for output in run_to_end(engine) if output.finish_reason is not None]
    assert ends.index(second) < ends.index(third), "it goes on before all that have come after it"


def test_a_higher_priority_is_preempted_later(make: Make) -> None:
    engine = make(extents=3)
    low, high = engine.submit(Request(prompt(0), 60, priority=100)), engine.submit(Request(prompt(1), 60, priority=200))
    outputs = run_to_end(engine)
    counts = {one.request_id: one.statistics.num_preemptions for one in outputs if one.finish_reason and one.statistics}
    assert counts == {low: 1, high: 0}


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_session_of_a_preempted_request_ends(when: str, make: Make) -> None:
    """What it leaves for itself goes with the session, so it is computed again; the answer is the same."""
    request = Request(prompt(1), 60, session=Session("a"))
    (expected,) = make(extents=30).generate([request])
    engine, outputs = make(extents=9), list[StepOutput]()
    number = engine.submit(request)
    while sum(output.token_id is not None for output in outputs) < 30:
        outputs += engine.step()
    if when == "before":
        assert engine.end_session("a") == EndedSession(0, 0), "it still runs"
    preempt(engine, number)
    if when == "after":
        ended = engine.end_session("a")
        assert ended.freed_extents > 0
    assert engine._cache.extents.idle == 0
    outputs += run_to_end(engine)
    assert [output.token_id for output in outputs if output.token_id is not None] == expected
    assert engine.end_session("a") is None
    assert engine._cache.extents.idle == 0


def test_64_requests_run_at_once_where_few_of_full_length_would(
    random_model: RandomModel, build_engine: BuildEngine
) -> None:
    """None waits, none fails, and the answers are those of each alone."""
    limits = ("--max_batch_size", "64", "--max_seq_len", "4096", "--prefill_chunk_tokens", "512")
    directory = build_engine(
        random_model("llama", **SHAPE, **HEADS), "nested", *WINDOW, *limits, "--nested.top_k", "12"
    )
    engine = load_changed(directory, {"kv_cache_host_memory_bytes": 70 * EXTENT_BYTES})
    requests = [Request(prompt(one, 300), 3700, SamplingConfig(temperature=0.7, seed=one)) for one in range(64)]
    assert engine._cache.extents_needed(4000) == 4, "so that it has room for 17 of full length"
    ids, outputs = [engine.submit(request) for request in requests], list[StepOutput]()
    counts = dict.fromkeys(ids, 0)
    while min(counts.values()) < 6:
        for output in engine.step():
            assert output.finish_reason is None
            counts[output.request_id] += output.token_id is not None
            outputs.append(output)
    assert (engine.running, engine.waiting, engine.preemptions) == (64, 0, 0)
    assert engine._cache.extents.used == 64
    alone = load_changed(directory)
    for number, request in list(zip(ids, requests, strict=True))[::9]:
        got = [one.token_id for one in outputs if one.request_id == number and one.token_id is not None]
        assert alone.generate([Request(request.prompt_ids, len(got), request.sampling)]) == [got]
        engine.cancel(number)
    for number in ids:
        engine.cancel(number)
    assert engine._cache.extents.used == 0


def test_a_service_passes_on_one_uninterrupted_stream_and_drains(make: Make) -> None:
    """Threads that cancel and drain meet requests that run, wait and have been preempted; each ends once."""
    engine = make(extents=4)
    expected = make(extents=30).generate([Request(prompt(one), 60) for one in range(5)])
    service = EngineService(engine)
    try:
        streams = [queue.Queue[StepOutput]() for _ in range(5)]
        handles = [service.submit(Request(prompt(one), 60), streams[one].put) for one in range(5)]
        time.sleep(0.05)
        service.cancel(handles[2])
        service.drain(600.0)
    finally:
        service.close()
    for number, (stream, tokens) in enumerate(zip(streams, expected, strict=True)):
        outputs = [stream.get() for _ in range(stream.qsize())]
        assert [output.finish_reason is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
        got = [output.token_id for output in outputs if output.token_id is not None]
        assert got == (tokens[: len(got)] if number == 2 else tokens)
