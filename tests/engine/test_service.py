"""The engine thread: callbacks, cancellation, shutdown, and isolation of callers from each other."""

from __future__ import annotations

import itertools
import os
import queue
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

from kvseek.core.errors import ErrorCode, UnavailableError
from kvseek.core.guide import Guide, GuideType
from kvseek.core.request import FinishReason, Request, SamplingConfig, StepOutput
from kvseek.engine import service as service_module
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
