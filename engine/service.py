"""An engine in a thread of its own: submit and cancel from any thread, outputs by callback."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from .config import EngineConfig
from .engine import Engine
from .errors import KvseekError
from .request import FinishReason, Request, StepOutput
from .tokenizer import Tokenizer

Callback = Callable[[StepOutput], None]
logger = logging.getLogger(__name__)


class EngineService:
    """Runs `Engine.step` while there is work and hands each output to its request's callback, from the engine thread.

    A callback must return soon; an exception that it raises cancels its request and no other. What the engine raises
    (after a CUDA error no call succeeds) ends all requests with that error, and the service is closed.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._callbacks: dict[int, tuple[int, Callback]] = {}  # engine request id → handle, callback
        self._requests: dict[int, int] = {}  # handle → engine request id
        self._handles = 0
        self._lock = threading.Lock()  # guards _handles, _closed and _failure, and orders submit before close
        self._closed = False
        self._failure = ""  # why there is no engine any more
        self._thread = threading.Thread(target=self._run, name="kvseek-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, directory: Path, threads: int | None = None) -> EngineService:
        """Load an engine directory and start its thread; raises as `Engine.load`."""
        return cls(Engine.load(directory, threads))

    @property
    def config(self) -> EngineConfig:
        """Configuration of the engine."""
        return self._engine.config

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the engine."""
        return self._engine.tokenizer

    def submit(self, request: Request, on_output: Callback) -> int:
        """Queue a request and return a handle for `cancel`.

        `on_output` gets every output; one with a finish_reason is the last. Raises RequestError or CapacityError on a
        request that can never be served, KvseekError after `close` or when the engine has failed.
        """
        self._engine.check(request)
        with self._lock:
            if self._failure:
                raise KvseekError(self._failure)
            if self._closed:
                raise KvseekError("the engine is shutting down: no further requests; start the server again")
            self._handles += 1
            handle = self._handles
            self._commands.put(lambda: self._start(handle, request, on_output))
        return handle

    def cancel(self, handle: int) -> None:
        """End a request as cancelled, soon; does nothing if it has ended."""
        self._commands.put(lambda: self._cancel(handle))

    def close(self) -> None:
        """End all requests as cancelled and stop the thread. May be called twice."""
        with self._lock:
            self._closed = True
            self._commands.put(lambda: None)  # wakes the thread
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _start(self, handle: int, request: Request, on_output: Callback) -> None:
        try:
            if self._failure:
                raise KvseekError(self._failure)
            request_id = self._engine.submit(request)
        except Exception as error:  # it ends without an id; those of the engine begin at 1
            logger.error("a request could not be started: %s", error)
            _call(on_output, StepOutput(0, finish_reason=FinishReason.ERROR, error=f"{type(error).__name__}: {error}"))
            return
        self._callbacks[request_id] = (handle, on_output)
        self._requests[handle] = request_id

    def _cancel(self, handle: int) -> None:
        if handle in self._requests:
            output = self._engine.cancel(self._requests[handle])
            if output is not None:
                self._deliver(output)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            logger.exception("the engine failed; all its requests end")
            self._fail(error)

    def _serve(self) -> None:
        while not self._closed:
            self._run_commands(block=not self._engine.has_work)
            if self._engine.has_work and not self._closed:
                for output in self._engine.step():
                    self._deliver(output)
        self._run_commands(block=False)
        for handle in list(self._requests):
            self._cancel(handle)

    def _fail(self, error: Exception) -> None:
        """Close the service and end all requests, without the engine."""
        with self._lock:
            self._closed = True
            reason = f"{type(error).__name__}: {error}"
            self._failure = f"the engine has failed ({reason}): no further requests; start the server again"
        for request_id in list(self._callbacks):
            self._deliver(StepOutput(request_id, finish_reason=FinishReason.ERROR, error=self._failure))
        self._run_commands(block=False)  # those that were submitted, but not started

    def _run_commands(self, block: bool) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get(block)()
                block = False

    def _deliver(self, output: StepOutput) -> None:
        if output.request_id not in self._callbacks:
            return  # cancelled earlier in the same step
        handle, callback = self._callbacks[output.request_id]
        if output.finish_reason is not None:
            del self._callbacks[output.request_id], self._requests[handle]
        if output.finish_reason is FinishReason.ERROR:
            logger.error("request %d failed: %s", output.request_id, output.error)
        if not _call(callback, output) and output.finish_reason is None:
            del self._callbacks[output.request_id], self._requests[handle]
            self._engine.cancel(output.request_id)


def _call(callback: Callback, output: StepOutput) -> bool:
    """Hand an output over; returns whether the callback took it."""
    try:
        callback(output)
    except Exception:
        logger.exception("the callback of request %d failed; the request is cancelled", output.request_id)
        return False
    return True
