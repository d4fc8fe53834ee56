"""What callers get while the engine is busy: full queues, cancellations, time limits, and the end of the service."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import BuildEngine, RandomModel

from kvseek.core.errors import ErrorCode, QueueFullError, UnavailableError
from kvseek.core.guide import Guide, GuideType
from kvseek.core.request import FinishReason, Request, SamplingConfig, StepOutput
from kvseek.engine.engine import Engine
from kvseek.engine.schedule.guides import GuideMatcher, Guides
from kvseek.engine.service import EngineService

PROMPT = tuple(i * 13 % 101 for i in range(60))
TIMEOUT = 60.0
Outputs = queue.Queue[StepOutput]


@pytest.fixture(scope="module")
def directory(random_model: RandomModel, build_engine: BuildEngine) -> Path:
    model = random_model("qwen3")
    return build_engine(model, "full", "--max_batch_size", "1", "--max_seq_len", "1000")


class SlowEngine:
    """An engine whose steps begin only when `go_on` is set."""

    def __init__(self, directory: Path, max_queue_size: int | None = None) -> None:
        self.engine = Engine.load(directory, max_queue_size=max_queue_size)
        self.stepping, self.go_on = threading.Event(), threading.Event()
        self.step, self.engine.step = self.engine.step, self.slow_step  # type: ignore[method-assign]

    def slow_step(self) -> list[StepOutput]:
        self.stepping.set()
        assert self.go_on.wait(TIMEOUT)
        return self.step()


@pytest.fixture
def slow(directory: Path) -> Iterator[tuple[EngineService, SlowEngine]]:
    """A service in the middle of a long step, with one slot and room for one that waits beside the one that will get it."""
    engine = SlowEngine(directory, max_queue_size=1)
    service = EngineService(engine.engine)
    yield service, engine
    engine.go_on.set()
    service.close()


def end_of(outputs: Outputs) -> StepOutput:
    """The last output; there is no other behind it."""
    while (output := outputs.get(timeout=TIMEOUT)).finish_reason is None:
        pass
    assert outputs.empty()
    return output


def submit(service: EngineService, tokens: int = 5, timeout: float | None = None) -> tuple[int, Outputs]:
    outputs: Outputs = queue.Queue()
    return service.submit(Request(PROMPT, tokens, timeout_seconds=timeout), outputs.put), outputs


def test_a_full_queue_refuses_at_once(slow: tuple[EngineService, SlowEngine]) -> None:
    service, engine = slow
    accepted = [submit(service) for _ in range(2)]
    assert engine.stepping.wait(TIMEOUT)
    with pytest.raises(QueueFullError, match="1 requests wait"):
        submit(service)
    assert (service.engine.waiting, service.engine.running) == (2, 0)
    engine.go_on.set()
    for _, outputs in accepted:
        assert end_of(outputs).finish_reason is FinishReason.LENGTH
    submit(service)


def test_waiting_requests_are_cancelled_during_a_long_step(slow: tuple[EngineService, SlowEngine]) -> None:
    service, engine = slow
    (_, first), (handle, second) = submit(service), submit(service)
    assert engine.stepping.wait(TIMEOUT)
    service.cancel(handle)
    assert end_of(second).finish_reason is FinishReason.CANCELLED
    service.cancel(handle)  # a second time: nothing happens
    submit(service)  # there is room again
    engine.go_on.set()
    assert end_of(first).finish_reason is FinishReason.LENGTH
    assert second.empty()


def test_waiting_requests_expire_during_a_long_step(slow: tuple[EngineService, SlowEngine]) -> None:
    service, engine = slow
    _, first = submit(service)
    assert engine.stepping.wait(TIMEOUT)
    _, second = submit(service, timeout=0.2)
    end = end_of(second)
    assert (end.finish_reason, end.code) == (FinishReason.ERROR, ErrorCode.TIMEOUT)
    waited = re.match(r"timeout = 0\.2 s: passed while the request waited for its turn, for (\S+) s", end.error)
    assert waited is not None, end.error
    assert float(waited[1]) >= 0.2
    engine.go_on.set()
    assert end_of(first).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("seconds", [1e10, float("inf")])
def test_draining_may_take_any_time(directory: Path, seconds: float) -> None:
    service = EngineService.load(directory)
    _, outputs = submit(service, 20)
    service.drain(seconds)
    assert end_of(outputs).finish_reason is FinishReason.LENGTH
    service.close()


class SlowGuides:
    """Compiles a guide only when `go_on` is set."""

    def __init__(self, guides: Guides) -> None:
        self.guides, self.compiling, self.go_on = guides, threading.Event(), threading.Event()

    def matcher(self, guide: Guide) -> GuideMatcher:
        self.compiling.set()
        assert self.go_on.wait(TIMEOUT)
        return self.guides.matcher(guide)


@pytest.fixture
def compiling(directory: Path) -> Iterator[tuple[EngineService, SlowGuides]]:
    """A service with one slot, room for two requests that wait, and slow guides."""
    engine = Engine.load(directory, max_queue_size=2)
    guides = SlowGuides(engine._guides)
    engine._guides = guides  # type: ignore[assignment]
    service = EngineService(engine)
    yield service, guides
    guides.go_on.set()
    service.close()


def guided(service: EngineService, guide: str = "(yes|no)", timeout: float | None = None) -> tuple[int, Outputs]:
    outputs: Outputs = queue.Queue()
    sampling = SamplingConfig(guide=Guide(GuideType.REGEX, guide))
    request = Request(PROMPT, 20, sampling, end_ids=(1,), timeout_seconds=timeout)
    return service.submit(request, outputs.put), outputs


def test_others_do_not_wait_for_a_guide(compiling: tuple[EngineService, SlowGuides]) -> None:
    service, guides = compiling
    (_, first), (_, wrong) = guided(service), guided(service, "(")
    assert guides.compiling.wait(TIMEOUT)
    _, other = submit(service)
    assert end_of(other).finish_reason is FinishReason.LENGTH
    assert (first.empty(), service.engine.waiting) == (True, 2)
    _, third = guided(service)
    with pytest.raises(QueueFullError, match="2 requests wait"):
        submit(service)
    guides.go_on.set()
    assert end_of(first).finish_reason is FinishReason.END_ID
    end = end_of(wrong)
    assert (end.finish_reason, end.code) == (FinishReason.ERROR, ErrorCode.INVALID)
    assert end.error.startswith("guided_decoding_guide: cannot be followed: ")
    assert end_of(third).finish_reason is FinishReason.END_ID


def test_requests_end_while_their_guides_are_compiled(compiling: tuple[EngineService, SlowGuides]) -> None:
    """By being cancelled, and by their time limits; the first one's guide is under way, the second one's waits."""
    service, guides = compiling
    for timeout in (None, 0.2):
        requests = [guided(service, timeout=timeout) for _ in range(2)]
        assert guides.compiling.wait(TIMEOUT)
        for handle, outputs in requests:
            if timeout is None:
                service.cancel(handle)
                assert end_of(outputs).finish_reason is FinishReason.CANCELLED
            else:
                assert end_of(outputs).code is ErrorCode.TIMEOUT
    assert service.engine.waiting == 0
    guides.go_on.set()
    assert end_of(guided(service)[1]).finish_reason is FinishReason.END_ID
    assert all(outputs.empty() for _, outputs in requests)


def test_draining_waits_for_guides(compiling: tuple[EngineService, SlowGuides]) -> None:
    service, guides = compiling
    (_, first), (_, second) = guided(service), guided(service)
    assert guides.compiling.wait(TIMEOUT)
    threading.Timer(0.2, guides.go_on.set).start()
    service.drain(TIMEOUT)
    assert end_of(first).finish_reason is end_of(second).finish_reason is FinishReason.END_ID


def test_closing_ends_requests_whose_guides_are_compiled(compiling: tuple[EngineService, SlowGuides]) -> None:
    service, guides = compiling
    (_, first), (_, second) = guided(service), guided(service)
    assert guides.compiling.wait(TIMEOUT)
    closing = threading.Thread(target=service.close)
    closing.start()
    assert end_of(first).finish_reason is end_of(second).finish_reason is FinishReason.CANCELLED
    guides.go_on.set()
    closing.join(TIMEOUT)
    assert not closing.is_alive()


def test_a_running_request_ends_with_what_it_has(slow: tuple[EngineService, SlowEngine]) -> None:
    """Its limit passes when it has some tokens, however slow the machine is: the engine's clock is told."""
    service, engine = slow
    outputs: Outputs = queue.Queue()
    tokens = list[int]()

    def late(output: StepOutput) -> None:
        if output.token_id is not None:
            tokens.append(output.token_id)
        if len(tokens) == 3 and output.finish_reason is None:
            (sequence,) = engine.engine._scheduler.running
            sequence.statistics.submitted_at -= 2000.0
        outputs.put(output)

    service.submit(Request(PROMPT, 900, timeout_seconds=1000.0), late)
    engine.go_on.set()
    end = end_of(outputs)
    assert end.finish_reason is FinishReason.TIMEOUT
    assert len(tokens) == 3
    assert service.engine.running == 0


def test_draining_lets_requests_end(directory: Path) -> None:
    service = EngineService.load(directory)
    requests = [submit(service, 20) for _ in range(3)]
    service.drain(TIMEOUT)
    assert [end_of(outputs).finish_reason for _, outputs in requests] == [FinishReason.LENGTH] * 3
    with pytest.raises(UnavailableError, match="the server is shutting down: no further requests"):
        submit(service)
    answered = threading.Event()
    service.call(answered.set)
    assert answered.wait(TIMEOUT), "the engine's thread goes on until close"
    service.close()


def test_draining_ends_what_is_left(slow: tuple[EngineService, SlowEngine]) -> None:
    service, engine = slow
    running: Outputs = queue.Queue()
    has_token = threading.Event()

    def hold(output: StepOutput) -> None:
        running.put(output)
        if output.token_id is not None:
            has_token.set()
            time.sleep(0.02)  # 900 tokens take longer than the drain takes to begin, on any machine

    service.submit(Request(PROMPT, 900), hold)
    _, waiting = submit(service, 900)
    engine.go_on.set()
    assert has_token.wait(TIMEOUT)
    service.drain(0.0)
    assert end_of(running).finish_reason is FinishReason.SHUTDOWN
    assert end_of(waiting).finish_reason is FinishReason.SHUTDOWN
    assert (service.engine.waiting, service.engine.running) == (0, 0)


def test_a_call_shows_whether_the_engine_takes_turns(slow: tuple[EngineService, SlowEngine]) -> None:
    service, engine = slow
    answered = threading.Event()
    submit(service)
    assert engine.stepping.wait(TIMEOUT)
    service.call(answered.set)
    assert not answered.wait(0.2), "the step is not over"
    engine.go_on.set()
    assert answered.wait(TIMEOUT)
    service.call(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    outputs = submit(service)[1]
    assert end_of(outputs).finish_reason is FinishReason.LENGTH, "what it raises is its own affair"


def test_every_request_ends_once_whoever_ends_it(directory: Path) -> None:
    """Cancellations, time limits, a bounded queue and a drain at the same time."""
    service = EngineService.load(directory, max_queue_size=30)
    ends: list[tuple[int, FinishReason]] = []
    accepted: list[int] = []
    refused: list[Exception] = []

    def ask(number: int) -> None:
        for i in range(12):
            name = number * 100 + i

            def record(output: StepOutput, name: int = name) -> None:
                if output.finish_reason is not None:
                    ends.append((name, output.finish_reason))

            try:
                limit = 0.05 if i % 3 == 0 else None
                handle = service.submit(Request(PROMPT[:9], 3 + i, timeout_seconds=limit), record)
            except (QueueFullError, UnavailableError) as error:
                refused.append(error)
                continue
            accepted.append(name)
            if i % 4 == 1:
                service.cancel(handle)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    service.drain(0.3)
    assert sorted(name for name, _ in ends) == sorted(accepted)
    assert len(accepted) + len(refused) == 72
    assert service._engine._cache.extents.used == 0
    service.close()
