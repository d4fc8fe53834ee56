"""The engine's thread: callbacks, cancellation, full queues, time limits, the end of the service, and isolation of callers."""

from __future__ import annotations

import itertools
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.conftest import BuildEngine, RandomModel

from kvseek.core.errors import ErrorCode, QueueFullError, UnavailableError
from kvseek.core.guide import Guide, GuideType
from kvseek.core.request import FinishReason, Request, SamplingConfig, StepOutput
from kvseek.engine import service as service_module
from kvseek.engine.engine import Engine
from kvseek.engine.schedule.guides import GuideMatcher, Guides
from kvseek.engine.service import EngineService

PROMPT = tuple(i * 13 % 101 for i in range(60))
TIMEOUT = 60.0


@pytest.fixture(scope="module")
def directory(random_model: RandomModel, build_engine: BuildEngine) -> Path:
    return build_engine(random_model("qwen3"), "full")


@pytest.fixture
def service(directory: Path) -> Iterator[EngineService]:
    service = EngineService.load(directory)
    yield service
    service.close()


def collect(outputs: queue.Queue[StepOutput]) -> list[StepOutput]:
    found = [outputs.get(timeout=TIMEOUT)]
    while found[-1].finish_reason is None:
        found.append(outputs.get(timeout=TIMEOUT))
    return found


def test_a_failing_callback_ends_its_request_only(service: EngineService) -> None:
    """The callback is told of the end, once."""
    told: queue.Queue[StepOutput] = queue.Queue()

    def fail(output: StepOutput) -> None:
        told.put(output)
        raise RuntimeError("the stream is gone")

    outputs: queue.Queue[StepOutput] = queue.Queue()
    service.submit(Request(PROMPT, 400), fail)
    service.submit(Request(PROMPT, 20), outputs.put)
    assert collect(outputs)[-1].finish_reason is FinishReason.LENGTH
    _, end = collect(told)
    assert (end.finish_reason, end.code) == (FinishReason.ERROR, ErrorCode.INTERNAL)
    assert "could not be passed on" in end.error
    service.drain(TIMEOUT)
    assert told.empty()


def test_what_looks_on_and_fails_ends_nothing(service: EngineService) -> None:
    def fail(_: object) -> None:
        raise MemoryError("no room for a count")

    outputs: queue.Queue[StepOutput] = queue.Queue()
    service.on_step(fail)
    service.submit(Request(PROMPT, 20), outputs.put)
    assert collect(outputs)[-1].finish_reason is FinishReason.LENGTH


def test_a_question_whose_asker_has_gone_ends_nothing(service: EngineService) -> None:
    held, outputs = threading.Event(), queue.Queue[StepOutput]()
    service.call(lambda: held.wait(TIMEOUT))
    assert service.ask(lambda engine: engine.waiting).cancel()
    held.set()
    service.submit(Request(PROMPT, 20), outputs.put)
    assert collect(outputs)[-1].finish_reason is FinishReason.LENGTH
    assert not service.failure


def test_a_guide_that_cannot_be_compiled_ends_its_request_only(
    service: EngineService, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, outputs = service.engine.compile_guide, queue.Queue[StepOutput]()
    failing = [MemoryError("no room for a guide")]
    monkeypatch.setattr(
        service.engine, "compile_guide", lambda sequence: raise_(failing.pop()) if failing else compiled(sequence)
    )
    guided = Request(PROMPT, 20, SamplingConfig(guide=Guide(GuideType.REGEX, "a+")), end_ids=(1,))
    service.submit(guided, outputs.put)
    (end,) = collect(outputs)
    assert "no room for a guide" in end.error
    assert service.engine.waiting == 0
    service.submit(guided, outputs.put)
    assert "no room" not in collect(outputs)[-1].error


def raise_(error: Exception) -> None:
    raise error


def test_the_engines_thread_answers_what_it_is_asked(service: EngineService) -> None:
    asked = service.ask(lambda engine: (engine is service.engine, threading.current_thread().name))
    assert asked.result(TIMEOUT) == (True, "kvseek-engine")
    with pytest.raises(ZeroDivisionError):
        service.ask(lambda engine: 1 // 0).result(TIMEOUT)
    assert service.ask(lambda engine: engine.waiting).result(TIMEOUT) == 0, "an error ends its own question"
    service.close()
    with pytest.raises(UnavailableError, match="shutting down"):
        service.ask(lambda engine: engine.waiting)


class BrokenEngine:
    """Takes requests, but neither a step nor a cancellation succeeds, as after a CUDA error."""

    error = RuntimeError("CUDA error: an illegal memory access was encountered")

    def __init__(self) -> None:
        self.requests, self.ids, self.stepping, self.go_on = 0, itertools.count(1), threading.Event(), threading.Event()
        self.closed = False

    @property
    def has_work(self) -> bool:
        return self.requests > 0

    def prepare(self, request: Request) -> Any:
        if request.max_tokens == 13:
            raise MemoryError("no room for a sampler")
        return SimpleNamespace(request_id=next(self.ids), request=request, unsent=lambda: (7,))

    def enqueue(self, sequence: Any, whole: bool) -> None:
        self.requests += 1

    def cancel_waiting(self, request_id: int, reason: FinishReason) -> None:
        return

    def cancel(self, request_id: int, reason: FinishReason) -> StepOutput:
        raise self.error

    def next_deadline(self) -> None:
        return

    def expire(self) -> list[StepOutput]:
        return []

    def close(self) -> None:
        self.closed = True

    def step(self) -> list[StepOutput]:
        self.stepping.set()
        assert self.go_on.wait(TIMEOUT)
        raise self.error


def test_an_engine_that_fails_ends_all_requests_and_refuses_new_ones() -> None:
    engine: Any = BrokenEngine()
    service = EngineService(engine)
    outputs: list[queue.Queue[StepOutput]] = [queue.Queue() for _ in range(4)]
    handles = [service.submit(Request(PROMPT, 5), outputs[0].put)]
    assert engine.stepping.wait(TIMEOUT)
    handles += [service.submit(Request(PROMPT, 5), one.put) for one in outputs[1:]]  # these have not been started
    service.cancel(handles[3])
    asked = service.ask(lambda engine: engine.waiting)
    engine.go_on.set()
    with pytest.raises(UnavailableError, match="the engine has failed"):
        asked.result(TIMEOUT)
    for one in outputs:
        (end,) = collect(one)
        assert (end.finish_reason, end.code) == (FinishReason.ERROR, ErrorCode.UNAVAILABLE)
        assert end.earlier == (7,), "tokens of which nobody has been told"
        assert "the engine has failed (RuntimeError: CUDA error: an illegal memory access" in end.error
    with pytest.raises(UnavailableError, match=r"has failed \(RuntimeError: CUDA error.*start the server again"):
        service.submit(Request(PROMPT, 5), outputs[0].put)
    service.close()
    assert all(one.empty() for one in outputs), "each request ends once"
    assert engine.closed, "its other ranks end, too"


def test_a_step_that_does_not_end_fails_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a kernel that never ends: callers get an error with its name, and nothing waits for the thread."""
    monkeypatch.setattr(service_module, "HUNG_SECONDS", 0.5)
    monkeypatch.setattr(service_module, "LOOK_SECONDS", 0.1)
    engine: Any = BrokenEngine()
    service = EngineService(engine)
    time.sleep(1.0)  # a thread that waits for requests does not hang
    outputs: queue.Queue[StepOutput] = queue.Queue()
    service.submit(Request(PROMPT, 5), outputs.put)
    assert engine.stepping.wait(TIMEOUT)
    asked = service.ask(lambda engine: engine.waiting)
    (end,) = collect(outputs)
    assert (end.finish_reason, end.code) == (FinishReason.ERROR, ErrorCode.UNAVAILABLE)
    assert "the engine has failed (EngineHungError: a step has not ended for 0.5 s)" in end.error
    with pytest.raises(UnavailableError, match="EngineHungError"):
        asked.result(TIMEOUT)
    with pytest.raises(UnavailableError, match="EngineHungError"):
        service.submit(Request(PROMPT, 5), outputs.put)
    service.close()
    assert not engine.go_on.is_set()
    engine.go_on.set()
    assert outputs.empty()


def test_an_engine_that_fails_while_closing_ends_its_requests() -> None:
    engine: Any = BrokenEngine()
    service = EngineService(engine)
    outputs: queue.Queue[StepOutput] = queue.Queue()
    engine.step = list  # nothing happens
    service.submit(Request(PROMPT, 5), outputs.put)
    service.close()
    assert "illegal memory access" in collect(outputs)[-1].error


def test_a_request_that_cannot_be_started_ends_alone() -> None:
    engine: Any = BrokenEngine()
    service = EngineService(engine)
    outputs: queue.Queue[StepOutput] = queue.Queue()
    with pytest.raises(MemoryError, match="no room for a sampler"):
        service.submit(Request(PROMPT, 13), outputs.put)
    service.submit(Request(PROMPT, 5), outputs.put)
    assert engine.stepping.wait(TIMEOUT), "the service goes on"
    engine.go_on.set()
    service.close()


ONE_POOL = """
import os, sys
from pathlib import Path
from kvseek.core.request import Request, SamplingConfig
from kvseek.engine.draws.sampling import Sampler
from kvseek.engine.service import EngineService

before = len(os.listdir("/proc/self/task"))
service = EngineService.load(Path(sys.argv[1]), threads=2)
Sampler(Request(tuple(range(100_000)), 1, SamplingConfig(repetition_penalty=1.5)), 1_000_000)  # made by the thread that submits
service.submit(Request(tuple(range(60)), 4), lambda output: None)
service.drain(60)
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_only_the_engines_thread_keeps_openmp_threads(directory: Path) -> None:
    """With more of them than cores all would sleep between parallel loops: steps take 1.5 times as long."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", ONE_POOL, str(directory)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(result.stdout) == 4, "the engine's thread, its second OpenMP thread, the timer's and the guides'"


Outputs = queue.Queue[StepOutput]


@pytest.fixture(scope="module")
def directory_of_service_waiting(random_model: RandomModel, build_engine: BuildEngine) -> Path:
    model = random_model("qwen3")
    return build_engine(model, "full", "--max_batch_size", "1", "--max_seq_len", "1000")


class SlowEngine:
    """An engine whose steps begin only when `go_on` is set."""

    def __init__(self, directory_of_service_waiting: Path, max_queue_size: int | None = None) -> None:
        self.engine = Engine.load(directory_of_service_waiting, max_queue_size=max_queue_size)
        self.stepping, self.go_on = threading.Event(), threading.Event()
        self.step, self.engine.step = self.engine.step, self.slow_step  # type: ignore[method-assign]

    def slow_step(self) -> list[StepOutput]:
        self.stepping.set()
        assert self.go_on.wait(TIMEOUT)
        return self.step()


@pytest.fixture
def slow(directory_of_service_waiting: Path) -> Iterator[tuple[EngineService, SlowEngine]]:
    """A service in the middle of a long step, with one slot and room for one that waits beside the one that will get it."""
    engine = SlowEngine(directory_of_service_waiting, max_queue_size=1)
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
def test_draining_may_take_any_time(directory_of_service_waiting: Path, seconds: float) -> None:
    service = EngineService.load(directory_of_service_waiting)
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
def compiling(directory_of_service_waiting: Path) -> Iterator[tuple[EngineService, SlowGuides]]:
    """A service with one slot, room for two requests that wait, and slow guides."""
    engine = Engine.load(directory_of_service_waiting, max_queue_size=2)
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


def test_draining_lets_requests_end(directory_of_service_waiting: Path) -> None:
    service = EngineService.load(directory_of_service_waiting)
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


def test_every_request_ends_once_whoever_ends_it(directory_of_service_waiting: Path) -> None:
    """Cancellations, time limits, a bounded queue and a drain at the same time."""
    service = EngineService.load(directory_of_service_waiting, max_queue_size=30)
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
