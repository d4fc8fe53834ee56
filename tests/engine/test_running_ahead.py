"""Steps that are launched before the host knows the tokens of the step before: nothing that a request gets may tell.

On a GPU every engine does so. Here a CPU's steps do, whose results the engine takes a step later, as it does there.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import BuildEngine, RandomModel
from tests.plugins.cases import CASES, method_flags
from tests.support.prefill import run_to_end
from tests.support.steps_ahead import DecoderAhead, run_ahead
from tests.support.waiting import SECONDS

from kvseek.core.guide import Guide, GuideType
from kvseek.core.request import FinishReason, Request, SamplingConfig, Session, StepOutput
from kvseek.engine import engine as engine_module
from kvseek.engine.draws.sampling import NO_TOKEN, Launched
from kvseek.engine.engine import Engine
from kvseek.engine.schedule.reading import Work
from kvseek.engine.service import EngineService
from kvseek.plugins.registry import METHODS

SLOTS = 3
PROMPT = [i * 13 % 101 for i in range(160)]
FLAGS = ("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "32")
LIMITS = ("--max_batch_size", str(SLOTS), "--max_seq_len", "400", "--max_input_len", "300")
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.9},
    {"logprobs": 3},
    {"temperature": 0.8, "top_k": 30, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "logprobs": 0},
    {"temperature": 1.0, "min_tokens": 6},
    {"temperature": 1.2, "bad_words": ((5,), (7, 9))},
    {"temperature": 1.0, "forced_tokens": tuple(range(40, 50)), "logprobs": 0},
    {"temperature": 1.0, "guide": Guide(GuideType.REGEX, "[a-z ]{3,12}")},
]


@dataclass
class Pair:
    """Two engines of a directory, of which one runs ahead."""

    usual: Engine
    ahead: Engine
    decoder: DecoderAhead


@dataclass
class Run:
    """What the requests of a schedule get from an engine."""

    outputs: dict[int, list[StepOutput]] = field(default_factory=dict)

    def told(self) -> list[Any]:
        """All but times, and progress in reading."""
        return [
            [of_output(one) for one in outputs if one.token_id is not None or one.finish_reason]
            for outputs in self.outputs.values()
        ]


def ends_told(run: Run) -> list[Any]:
    """What requests have got when they end, whether it came at once or not."""
    found = []
    for outputs in run.outputs.values():
        end = outputs[-1]
        tokens = [token for one in outputs for token in (*one.earlier, one.token_id) if token is not None]
        assert end.statistics is not None
        counts = end.statistics.generated_tokens, end.statistics.cached_token_steps
        read = pytest.approx(end.statistics.attended_token_steps)
        found.append((tokens, end.end_id, end.finish_reason, end.error, end.cached_tokens, counts, read))
    return found


def of_output(output: StepOutput) -> Any:
    counts: Any = None
    if output.statistics is not None:
        times = dict.fromkeys(("submitted_at", "started_at", "first_token_at", "last_token_at"), 0.0)
        counts = replace(output.statistics, **times)
    logprobs = None if output.logprobs is None else [one for one, _ in output.logprobs.top]
    ends = output.token_id, output.end_id, output.finish_reason
    return ends, output.cached_tokens, output.attended_tokens, counts, logprobs, output.error


def start(directory: Path) -> Pair:
    usual, ahead = Engine.load(directory), Engine.load(directory)
    return Pair(usual, ahead, run_ahead(ahead))


@pytest.fixture(scope="module")
def pair_of(random_model: RandomModel, build_engine: BuildEngine) -> Callable[[str], Pair]:
    pairs = dict[str, Pair]()

    def find(method: str) -> Pair:
        if method not in pairs:
            pairs[method] = start(
                build_engine(
                    random_model("llama"), method, *FLAGS, *LIMITS, *method_flags(method, CASES[method].sparse)
                )
            )
        return pairs[method]

    return find


def submit_whole(engine: Engine, request: Request) -> int:
    """As LLM.generate does, whose caller waits for the end."""
    sequence = engine.prepare(request)
    engine.enqueue(sequence, whole=True)
    assert engine.compile_guide(sequence) is None
    return sequence.request_id


def run(engine: Engine, requests: list[Request], cancels: dict[int, int], whole: bool = False) -> Run:
    """All requests to their ends; `cancels` says after how many tokens a request is cancelled, by its number."""
    ids = {
        submit_whole(engine, request) if whole else engine.submit(request): number
        for number, request in enumerate(requests)
    }
    found = Run({number: [] for number in ids.values()})
    seen = dict.fromkeys(ids, 0)
    while engine.has_work:
        for output in engine.step():
            number = ids[output.request_id]
            found.outputs[number].append(output)
            seen[output.request_id] += output.token_id is not None
            if (
                output.finish_reason is None
                and output.token_id is not None
                and seen[output.request_id] == cancels.get(number)
            ):
                end = engine.cancel(output.request_id)
                assert end is not None
                found.outputs[number].append(end)
    return found


def check_empty(engine: Engine) -> None:
    cache = engine._cache
    assert cache.extents.used == 0
    assert cache.tokens == cache.lengths == [0] * len(cache.tokens)
    assert sorted(engine._scheduler._free_slots) == list(range(SLOTS))
    assert engine._in_flight is None


def kept(engine: Engine) -> set[bytes]:
    """Every sequence of tokens of which something is kept."""
    found = set[bytes]()
    for node in engine._prefixes._tree:
        tokens, one = b"", node
        while one is not None:
            tokens, one = one.tokens + tokens, one.parent
        found.add(tokens)
    return found


requests_drawn = st.lists(
    st.tuples(
        st.integers(5, 160),  # tokens of the prompt
        st.integers(1, 40),  # max_tokens
        st.integers(0, len(SAMPLING) - 1),
        st.integers(0, 3),  # how it may end: by length, an end token, a stop word, a cancellation
        st.integers(0, 1 << 30),
    ),
    min_size=1,
    max_size=6,
)


def make_requests(drawn: list[tuple[int, int, int, int, int]], vocabulary: int) -> tuple[list[Request], dict[int, int]]:
    """Requests, and after how many tokens some are cancelled. Every ninth token is an end token, or a stop word, of some."""
    requests, cancels = list[Request](), dict[int, int]()
    for number, (length, most, kind, end, seed) in enumerate(drawn):
        params, some = SamplingConfig(**(SAMPLING[kind] | {"seed": seed})), range(seed % 9, vocabulary, 9)
        params = replace(params, forced_tokens=params.forced_tokens[:most])
        ends = (1,) if params.guide is not None else tuple(some) if end == 1 else ()
        stops = tuple((token,) for token in some) if end == 2 else ()
        prompt = tuple(PROMPT[seed % 7 :][:length])
        requests.append(Request(prompt, most, params, end_ids=ends, stop_words=stops, cache_salt=str(number)))
        if end == 3:
            cancels[number] = 1 + seed % most
    return requests, cancels


@pytest.mark.parametrize("method", METHODS)
def test_requests_get_the_same(method: str, pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of(method)

    @settings(max_examples=12 if method == "full" else 5)
    @given(requests_drawn)
    def check(drawn: list[tuple[int, int, int, int, int]]) -> None:
        requests, cancels = make_requests(drawn, pair.usual.config.model.vocab_size)
        for engine in (pair.usual, pair.ahead):
            engine._prefixes._evict(engine._cache.extents.capacity)
        before = pair.usual._meter.usage().host_rows, pair.ahead._meter.usage().host_rows
        usual, ahead = (run(engine, requests, cancels) for engine in (pair.usual, pair.ahead))
        assert ahead.told() == usual.told()
        for engine in (pair.usual, pair.ahead):
            check_empty(engine)
        after = pair.usual._meter.usage().host_rows, pair.ahead._meter.usage().host_rows
        assert after[0] - before[0] == pytest.approx(after[1] - before[1], abs=1000)
        if len(requests) <= SLOTS:  # else there is no room for what all leave, and who ends last stays
            assert kept(pair.ahead) == kept(pair.usual)

    check()
    assert pair.decoder.launches > 0


@pytest.mark.parametrize("method", METHODS)
def test_unwatched_requests_get_the_same_from_several_steps_at_once(
    method: str, pair_of: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of(method)
    monkeypatch.setattr(engine_module, "LAUNCH_SECONDS", 60.0)

    @settings(max_examples=12 if method == "full" else 5)
    @given(requests_drawn)
    def check(drawn: list[tuple[int, int, int, int, int]]) -> None:
        requests, _ = make_requests(drawn, pair.usual.config.model.vocab_size)
        for engine in (pair.usual, pair.ahead):
            engine._prefixes._evict(engine._cache.extents.capacity)
        usual, ahead = run(pair.usual, requests, {}), run(pair.ahead, requests, {}, whole=True)
        assert ends_told(ahead) == ends_told(usual)
        check_empty(pair.ahead)
        if len(requests) <= SLOTS:
            assert kept(pair.ahead) == kept(pair.usual)

    check()
    assert pair.decoder.at_once > 1


@pytest.mark.parametrize("how", ["cancel", "fail"])
def test_unwatched_requests_end_between_steps_that_were_launched_at_once(
    how: str, ahead: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what they have got by then; who comes next is served."""
    monkeypatch.setattr(engine_module, "LAUNCH_SECONDS", 60.0)
    request = Request(tuple(PROMPT[:30]), 60, SamplingConfig(temperature=0.8, seed=4))
    (tokens,) = ahead.generate([request])
    number = submit_whole(ahead, request)
    while ahead._in_flight is None or ahead._in_flight.steps < 4:
        assert ahead.step() == []
    if how == "cancel":
        end = ahead.cancel(number)
        assert end is not None
        assert ahead.settle() == []
    else:
        lost = replace(ahead._in_flight.launched, collect=lambda: 1 // 0)  # type: ignore[arg-type, return-value]
        ahead._in_flight = replace(ahead._in_flight, launched=lost)
        (end,) = ahead.settle()
    assert end.finish_reason is (FinishReason.CANCELLED if how == "cancel" else FinishReason.ERROR)
    assert list(end.earlier) == tokens[: len(end.earlier)]
    assert len(end.earlier) > 0
    check_empty(ahead)
    assert ahead.generate([request]) == [tokens]


def test_reports_count_the_tokens_of_all_steps_of_a_launch(ahead: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request ends in the middle of a launch; first tokens come from prompts."""
    monkeypatch.setattr(engine_module, "LAUNCH_SECONDS", 60.0)
    (tokens,) = ahead.generate([Request(tuple(PROMPT[:30]), 40)])
    end = next(token for token in tokens[5:] if token not in tokens[:5])
    requests = [Request(tuple(PROMPT[:30]), 40, end_ids=(end,)), Request(tuple(PROMPT[:50]), 33)]
    sequences, counts = [ahead.prepare(request) for request in requests], list[int]()
    for sequence in sequences:
        ahead.enqueue(sequence, whole=True)
    monkeypatch.setattr(ahead, "on_step", lambda report: counts.append(report.decode_batch))
    run_to_end(ahead)
    assert max(counts) > len(requests)
    assert sum(counts) == sum(len(sequence.generated) - 1 for sequence in sequences)


@pytest.fixture
def ahead(pair_of: Callable[[str], Pair]) -> Engine:
    engine = pair_of("nested").ahead
    engine._prefixes._evict(engine._cache.extents.capacity)
    return engine


def until_first(engine: Engine, *requests: Request) -> list[int]:
    """Submit requests and step until all have a token, and a step is in flight with all of them."""
    ids = [engine.submit(request) for request in requests]
    while engine._in_flight is None or len(engine._in_flight.requests.sequences) < len(requests):
        engine.step()
    return ids


def ends_of(outputs: list[StepOutput]) -> dict[int, StepOutput]:
    return {output.request_id: output for output in outputs if output.finish_reason is not None}


def test_logits_of_a_row_in_vain_fail_nobody(ahead: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a request which the step before has ended, by its end token."""
    (tokens,) = ahead.generate([Request(tuple(PROMPT), 12, cache_salt="b")])
    launch, vain = ahead.decoder.launch, list[int]()

    def spoil(*step: Any) -> Launched:
        launched, slots = launch(*step), step[1]

        def collect() -> list[Any]:
            running = {sequence.slot for sequence in ahead._scheduler.running}
            vain.extend(slot for slot in slots if slot not in running)
            return [
                [one if slot in running else NO_TOKEN for one, slot in zip(step, slots, strict=True)]
                for step in launched.collect()
            ]

        return Launched(launched.attended, collect)

    monkeypatch.setattr(ahead.decoder, "launch", spoil)
    first, second = (
        ahead.submit(Request(tuple(PROMPT), 12, end_ids=ids, cache_salt="c")) for ids in ((tokens[5],), ())
    )
    ends = ends_of(run_to_end(ahead))
    assert ends[first].finish_reason is FinishReason.END_ID
    assert ends[second].finish_reason is FinishReason.LENGTH
    assert len(vain) == 1, "one row, for the request that its host could not foresee to end"
    assert ahead.unsound == 0
    check_empty(ahead)


@pytest.mark.parametrize("step", ["launch", "collect"])
def test_a_step_that_fails_ends_its_requests(step: str, ahead: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its own, after the tokens of the step before it; who comes next is served."""
    ids = until_first(ahead, *(Request(tuple(PROMPT[:n]), 20) for n in (30, 40)))
    launch, calls = ahead.decoder.launch, list[int]()

    def fail(*step_: Any) -> Launched:
        calls.append(1)
        if len(calls) > 1:
            return launch(*step_)
        if step == "launch":
            raise RuntimeError("lost")
        launched = launch(*step_)
        return Launched(launched.attended, lambda: 1 // 0)  # type: ignore[arg-type, return-value]

    monkeypatch.setattr(ahead.decoder, "launch", fail)
    outputs = ahead.step()
    assert [output.request_id for output in outputs if output.token_id is not None] == ids, "of the step before"
    outputs += ahead.step()
    ends = ends_of(outputs)
    assert {ends[one].finish_reason for one in ids} == {FinishReason.ERROR}
    assert ahead.generate([Request(tuple(PROMPT[:30]), 5)])[0]
    check_empty(ahead)


@pytest.mark.parametrize("how", ["cancel", "timeout"])
def test_a_slot_stays_until_its_step_has_ended(how: str, ahead: Engine) -> None:
    ids = until_first(ahead, *(Request(tuple(PROMPT[:40]), 60, timeout_seconds=1000.0) for _ in range(SLOTS)))
    waiting = ahead.submit(Request(tuple(PROMPT[:20]), 3))
    if how == "cancel":
        end = ahead.cancel(ids[0])
    else:
        sequence = next(one for one in ahead._scheduler.running if one.request_id == ids[0])
        sequence.statistics.submitted_at -= 2000.0
        end = ends_of(ahead.step()).get(ids[0])
    assert end.finish_reason is (FinishReason.CANCELLED if how == "cancel" else FinishReason.TIMEOUT)
    while ahead._scheduler.free_slots == 0 and ahead.waiting:
        assert all(output.request_id != ids[0] for output in ahead.step())
    outputs = run_to_end(ahead)
    assert ends_of(outputs)[waiting].finish_reason is FinishReason.LENGTH
    assert not any(output.request_id == ids[0] for output in outputs)
    check_empty(ahead)


def test_a_session_that_ends_meanwhile_keeps_nothing(ahead: Engine) -> None:
    (one,) = until_first(ahead, Request(tuple(PROMPT), 60, session=Session("chat")))
    ahead.cancel(one)
    assert ahead.end_session("chat") is not None
    run_to_end(ahead)
    assert ahead.end_session("chat") is None
    assert ahead._cache.extents.idle == 0


def test_who_asks_the_engine_finds_no_step_under_way(
    random_model: RandomModel, build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = start(build_engine(random_model("llama"), "nested", *FLAGS, *LIMITS, "--nested.top_k", "12"))
    settle, settled, ended = pair.ahead.settle, list[bool](), queue.Queue[StepOutput]()
    monkeypatch.setattr(pair.ahead, "settle", lambda: (settled.append(pair.ahead._in_flight is not None), settle())[1])
    service = EngineService(pair.ahead)
    try:
        for _ in range(SLOTS):
            service.submit(Request(tuple(PROMPT[:60]), 300), ended.put)
        while ended.qsize() < SLOTS * 300:
            found = service.ask(
                lambda engine: [engine._in_flight, [s.sampler.pending for s in engine._scheduler.running]]
            )
            flight, pending = found.result(SECONDS)
            assert flight is None
            assert not any(pending)
    finally:
        service.close()
    assert any(settled)


def test_reading_is_charged_to_the_step_that_waited_for_it(ahead: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units behind a step count for the next one, unless the host had to wait for them first."""
    reader, told = ahead._reader, list[list[Work]]()
    monkeypatch.setattr(reader.pacing, "record", lambda seconds, works, steps: told.append(works))
    first, second, third = Work(2, 20), Work(3, 30, waited=True), Work(4, 40)
    for now, of_step in ((second, first), (third, second), (third, third)):
        reader.work = now
        reader.note_step(of_step, 0.0)
    assert told == [[first, second], [], [third]]
