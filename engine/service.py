"""An engine in a thread of its own: submit and cancel from any thread, outputs by callback."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from kvseek.core.errors import EngineHungError, ErrorCode, UnavailableError
from kvseek.core.request import FinishReason, Request, StepOutput, StepReport
from kvseek.engine.loading.prefixes import DiskSettings
from kvseek.engine.parallel.nodes import ONE_NODE, Nodes
from kvseek.engine.schedule.sequence import RequestSequence
from kvseek.engine.speculation import Speculation

from .engine import MAX_NUM_TOKENS, NO_DISK, Engine

Callback = Callable[[StepOutput], None]
Flush = Callable[[], object]
T = TypeVar("T")
FORKED = (
    "the engine belongs to process {parent}, of which this process is a fork, without the engine's threads; load the engine in "
    "this process, or start processes by multiprocessing's method spawn"
)
SHUTTING_DOWN = "the server is shutting down: no further requests; send them to another server, or start this one again"
NOT_PASSED_ON = "a part of the answer could not be passed on, so the request has ended; the log says why"
LOOK_SECONDS = 5.0  # between two looks of the timer, at most
# Most time of a round of the engine's loop. None takes as long, because it reads only units of a prompt.
HUNG_SECONDS = 300.0
logger = logging.getLogger(__name__)


def _nothing() -> None:
    """Do nothing where nobody waits for the end of a step's outputs."""


class EngineService:
    """Runs `Engine.step` while there is work and hands each output to its request's callback.

    Outputs come from the engine's thread. The output that ends a waiting request may also come from the thread that cancels
    the request or from the timer's thread, so that cancellations and time limits need not wait for a long step. A callback
    must return soon; an exception that it raises ends its request and no other, and the callback gets that end too. An exception
    of the engine itself (after a CUDA error no call succeeds) ends all requests with that error and closes the service, and so
    does a round of its loop that does not end within HUNG_SECONDS, such as a step whose kernel never ends.

    A fork of the process has none of the service's threads, and its locks may be held for ever. There `submit` and `ask` raise
    UnavailableError; `cancel`, `call` and `close` do nothing.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._process = engine, os.getpid()
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._uncompiled: queue.SimpleQueue[RequestSequence | None] = (
            queue.SimpleQueue()
        )  # with guides; None: the service is closed
        # By request id; each is taken out by the request's last output.
        self._callbacks: dict[int, tuple[Callback, Flush, RequestSequence]] = {}
        self._ending = 0  # callbacks that are being given a last output
        # Guards _callbacks, _ending, _refusal and _failure; never held while a callback runs.
        self._lock = threading.Lock()
        self._empty = threading.Condition(self._lock)  # notified when no request is left and its callback has returned
        self._asked: set[Future[Any]] = set()  # that have no answer yet
        self._refusal = ""  # why no request is taken any more
        self._failure = ""  # why there is no engine any more
        self._closed = False
        self._round, self._working, self._hung = 0, False, False  # number of the loop's round; whether it is under way
        self._deadlines = threading.Event()  # a request with a time limit has come, or the service is closed
        self._thread = threading.Thread(target=self._run, name="kvseek-engine", daemon=True)
        self._timer = threading.Thread(target=self._watch_deadlines, name="kvseek-timer", daemon=True)
        # One thread for all guides: more would take the engine's cores.
        self._compiler = threading.Thread(target=self._compile_guides, name="kvseek-guides", daemon=True)
        for thread in (self._thread, self._timer, self._compiler):
            thread.start()

    @classmethod
    def load(
        cls,
        directory: Path,
        threads: int | None = None,
        max_queue_size: int | None = None,
        max_num_tokens: int = MAX_NUM_TOKENS,
        disk: DiskSettings = NO_DISK,
        nodes: Nodes = ONE_NODE,
        speculation: Speculation | None = None,
    ) -> EngineService:
        """Load an engine directory and start its thread; see Engine.load for arguments and errors.

        A thread that has run PyTorch's parallel loops keeps OpenMP threads of its own until it ends. When a process has more
        OpenMP threads than cores, libgomp lets all of them sleep between two loops instead of spinning, and a decode step takes
        1.5 times as long. So the engine is loaded in a thread that ends, and later only the engine's thread runs such loops.
        """
        with ThreadPoolExecutor(1) as loader:
            engine = loader.submit(
                Engine.load, directory, threads, max_queue_size, max_num_tokens, disk, nodes, speculation
            ).result()
        return cls(engine)

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that has the engine."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Raise UnavailableError in a fork of the process that has the engine."""
        if self.forked:
            raise UnavailableError(FORKED.format(parent=self._process))

    def on_step(self, function: Callable[[StepReport], None]) -> None:
        """Set the function that the engine's thread calls with the report of each step; its exceptions are logged."""

        def look(report: StepReport) -> None:
            _try(function, report)

        self._engine.on_step = look

    @property
    def engine(self) -> Engine:
        """The engine. It belongs to the service's thread: others may only call methods that are safe from any thread."""
        return self._engine

    @property
    def failure(self) -> str:
        """Why the engine has failed; empty if it has not."""
        return self._failure

    def submit(self, request: Request, on_output: Callback, flush: Flush = _nothing) -> int:
        """Queue a request and return a handle for `cancel`, the outputs' request_id.

        `on_output` gets every output; the output with a finish_reason is the last. It may be called before `submit` returns.
        `flush` is called after it: once for all outputs of a step whose requests have an equal one.
        A guide is compiled later, in a thread of its own; if that fails, the only output has the error.

        Raises
        ------
        RequestError, CapacityError
            If the request can never be served.
        QueueFullError
            If the queue is full (max_queue_size).
        UnavailableError
            After `drain` or `close`, when the engine has failed, or in a fork of the process.
        """
        return self.start(self._engine.prepare(request), on_output, flush)

    def start(
        self, sequence: RequestSequence, on_output: Callback, flush: Flush = _nothing, *, whole: bool = False
    ) -> int:
        """Queue what Engine.prepare has made of a request; see `submit`, and Engine.enqueue for `whole`."""
        self.check_process()
        request = sequence.request
        with self._lock:
            if self._refusal:
                raise UnavailableError(self._refusal)
            self._engine.enqueue(sequence, whole)
            # `_deliver` takes the same lock to look for the callback, so no output can come before the callback is known.
            self._callbacks[sequence.request_id] = on_output, flush, sequence
        if request.timeout_seconds is not None:
            self._deadlines.set()
        if request.sampling.guide is None:
            self._wake()
        else:
            self._uncompiled.put(sequence)
        return sequence.request_id

    def cancel(self, handle: int) -> None:
        """End a request as cancelled: at once if it waits, soon if it runs; does nothing if it has ended."""
        if not self.forked:
            self._end(handle, FinishReason.CANCELLED)

    def call(self, function: Callable[[], object]) -> None:
        """Let the engine's thread call a function between two steps, which shows that the thread still works.

        The function is never called if the engine hangs or has failed, or the service is closed. Its exceptions are logged.
        """
        if not self.forked:
            self._commands.put(lambda: _try(function))

    def ask(self, function: Callable[[Engine], T]) -> Future[T]:
        """Let the engine's thread call a function between two steps, when no step is under way.

        The future gets what the function returns or raises.

        That is UnavailableError if the service is closed or the engine fails before; after that, it is raised here.
        """
        self.check_process()
        answer: Future[T] = Future()
        with self._lock:
            if self._refusal:
                raise UnavailableError(self._refusal)
            self._asked.add(answer)

        def work() -> None:
            if not answer.done():  # else whoever asked waits no longer
                self._deliver(self._engine.settle())
            with contextlib.suppress(InvalidStateError):  # the engine has failed meanwhile
                try:
                    if not answer.done():
                        answer.set_result(function(self._engine))
                except Exception as error:
                    answer.set_exception(error)
            self._asked.discard(answer)

        self._commands.put(work)
        return answer

    def drain(self, seconds: float) -> None:
        """Take no further requests, let the present ones go on for `seconds`, and end those that are left as shut down.

        Returns when no request is left; the thread goes on until `close`. Must not be called from a callback.
        """
        self._refuse(SHUTTING_DOWN)
        with self._empty:
            self._empty.wait_for(self._is_empty, min(seconds, threading.TIMEOUT_MAX))
            left = list(self._callbacks)
        for handle in left:
            self._end(handle, FinishReason.SHUTDOWN)
        with self._empty:
            self._empty.wait_for(self._is_empty)

    def close(self) -> None:
        """End all requests as cancelled and stop the threads. May be called twice."""
        if self.forked:
            return
        self._refuse(SHUTTING_DOWN)
        self._closed = True
        self._wake()
        self._deadlines.set()
        self._uncompiled.put(None)
        for thread in (self._thread, self._timer, self._compiler):
            if threading.current_thread() is not thread and not (thread is self._thread and self._hung):
                thread.join()

    def _refuse(self, reason: str) -> None:
        with self._lock:
            self._refusal = self._refusal or reason

    def _wake(self) -> None:
        self._commands.put(lambda: None)

    def _end(self, handle: int, reason: FinishReason) -> None:
        output = self._engine.cancel_waiting(handle, reason)
        if output is not None:
            self._deliver_alone(output)
        else:
            self._commands.put(lambda: self._end_running(handle, reason))

    def _end_running(self, handle: int, reason: FinishReason) -> None:
        output = self._engine.cancel(handle, reason)
        if output is not None:
            self._deliver_alone(output)

    def _watch_deadlines(self) -> None:
        """Expire waiting requests on time, even while the engine's thread is in a long step, and notice one that does not end."""
        number, seconds, looked_at = 0, 0.0, time.monotonic()
        while not self._closed:
            try:
                self._expire()
                now = time.monotonic()
                same = self._working and number == self._round
                # A process that was stopped meanwhile has not worked for all of the time.
                seconds = seconds + min(now - looked_at, 2 * LOOK_SECONDS) if same else 0.0
                number, looked_at = self._round, now
                if seconds > HUNG_SECONDS and not self._closed:
                    self._hung = True
                    faulthandler.dump_traceback(sys.__stderr__ or 2)
                    self._fail(EngineHungError(f"a step has not ended for {HUNG_SECONDS:g} s"))
            except Exception:  # without the timer no request would expire any more
                logger.exception("the timer failed; it goes on")
                time.sleep(1.0)  # an error that stays must not fill the log

    def _expire(self) -> None:
        """Wait until the next deadline passes or a new one is set, and end the requests whose deadlines have passed."""
        deadline = self._engine.next_deadline()
        wait = LOOK_SECONDS if deadline is None else max(0.0, deadline - time.perf_counter())
        self._deadlines.wait(min(wait, LOOK_SECONDS))
        self._deadlines.clear()
        for output in self._engine.expire():
            self._deliver_alone(output)

    def _compile_guides(self) -> None:
        """Compile guides, one after the other, while other requests run."""
        while (sequence := self._uncompiled.get()) is not None and not self._closed:
            try:
                output = self._engine.compile_guide(sequence)
            except Exception as error:  # without this thread no request with a guide would ever start
                logger.exception("a guide could not be compiled")
                self._engine.cancel_waiting(sequence.request_id)
                output = _failure(sequence, f"{type(error).__name__}: {error}", ErrorCode.INTERNAL)
            if output is None:
                self._wake()
            else:
                self._deliver_alone(output)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            logger.exception("the engine failed; all its requests end")
            self._fail(error)
        finally:
            _try(self._engine.close)
        self._refuse_asked()

    def _refuse_asked(self) -> None:
        for answer in tuple(self._asked):
            with contextlib.suppress(InvalidStateError):  # it has an answer by now, or nobody waits for it
                answer.set_exception(UnavailableError(self._refusal))

    def _serve(self) -> None:
        while not self._closed:
            self._round += 1
            self._run_commands(block=not self._engine.has_work)
            if self._engine.has_work and not self._closed:
                self._deliver(self._engine.step())
        self._run_commands(block=False)
        for handle in self._handles():
            self._end_running(handle, FinishReason.CANCELLED)

    def _fail(self, error: Exception) -> None:
        """Close the service and end all requests, without the engine."""
        reason = f"{type(error).__name__}: {error}"
        failure = f"the engine has failed ({reason}): no further requests; start the server again"
        with self._lock:
            self._failure = self._refusal = failure
            running = [sequence for *_, sequence in self._callbacks.values()]
        self._closed = True
        self._deadlines.set()
        for sequence in running:
            self._deliver_alone(_failure(sequence, failure, ErrorCode.UNAVAILABLE))
        self._refuse_asked()

    def _handles(self) -> list[int]:
        with self._lock:
            return list(self._callbacks)

    def _run_commands(self, block: bool) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._working = not block
                command = self._commands.get(block)
                self._working, block = True, False
                command()

    def _deliver(self, outputs: Sequence[StepOutput]) -> None:
        """Hand a step's outputs to the callbacks of their requests, in the engine's thread."""
        with self._lock:
            callbacks = [self._callbacks.get(output.request_id) for output in outputs]
        flushes, failed = dict[Flush, None](), set[int]()
        for output, callback in zip(outputs, callbacks, strict=True):
            if self._failure:  # another thread has ended all requests
                break
            if output.finish_reason is not None:
                flush = self._deliver_last(output)
            elif callback is None or output.request_id in failed:
                continue
            elif _try(callback[0], output):
                flush = callback[1]
            else:
                failed.add(output.request_id)
                self._engine.cancel(output.request_id)
                flush = self._deliver_last(_failure(callback[2], NOT_PASSED_ON, ErrorCode.INTERNAL))
            flushes[flush] = None
        for flush in flushes:
            _try(flush)

    def _deliver_alone(self, output: StepOutput) -> None:
        """Hand over the output that ends a request, in any thread."""
        _try(self._deliver_last(output))

    def _deliver_last(self, output: StepOutput) -> Flush:
        """Hand over the output that ends a request, and return what has to be called next."""
        with self._lock:
            callback = self._callbacks.pop(output.request_id, None)
            if callback is None:
                return _nothing
            self._ending += 1
        if output.finish_reason is FinishReason.ERROR and output.code in (ErrorCode.INTERNAL, ErrorCode.UNAVAILABLE):
            # Errors that clients cause, such as a time limit that passes, must not fill the log.
            logger.error("request %d failed: %s", output.request_id, output.error)
        _try(callback[0], output)
        with self._empty:
            self._ending -= 1
            if self._is_empty():
                self._empty.notify_all()
        return callback[1]

    def _is_empty(self) -> bool:
        return not self._callbacks and not self._ending


def _failure(sequence: RequestSequence, error: str, code: ErrorCode) -> StepOutput:
    earlier = sequence.unsent()
    return StepOutput(sequence.request_id, finish_reason=FinishReason.ERROR, error=error, code=code, earlier=earlier)


def _try(function: Callable[..., object], *arguments: object) -> bool:
    """Call a function that is not the service's own and log its exception; returns whether it raised none."""
    try:
        function(*arguments)
    except Exception:
        logger.exception("a callback failed; if it was a request's, the request ends")
        return False
    return True
