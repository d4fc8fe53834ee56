"""The engine process: serves one engine to the frontends of this machine on a Unix socket. `kvseek serve` starts it.

Only this process loads weights and owns the cache. Frontends (the models in Triton, server/frontend.py) are thin: when one of
them dies, its requests are cancelled and all others go on; when this process dies, the frontends tell their clients at once.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from kvseek.core.errors import ErrorCode, KvseekError, RequestError, code_of, renamed
from kvseek.core.liveness import answer_at
from kvseek.core.manifest import read_manifest
from kvseek.core.request import FinishReason, Request, StepOutput
from kvseek.engine.engine import Engine
from kvseek.engine.loading.prefixes import DiskSettings
from kvseek.engine.service import EngineService
from kvseek.server.errors import INTERNAL
from kvseek.server.processes import leave_no_core, run_process
from kvseek.server.requests.engine_client import (
    UNSOUND_REQUESTS,
    Cancel,
    EndSession,
    FromEngine,
    FromFrontend,
    Metrics,
    Outputs,
    Ping,
    Pong,
    Refused,
    SessionEnded,
    Submit,
    frame,
    read_frame,
)
from kvseek.server.settings import ServeSettings

from .metrics import EngineMetrics
from .tracing import RequestTracer

FRAME_BYTES = (
    16 << 20
)  # bytes of logits and selected rows after which a message ends, long before it could be too large
STATUS_FAILED = 3  # exit status when the engine has failed: every further call would fail too
ENDING_SECONDS = 5.0  # that an orderly end may take then, in which threads or other ranks may wait for ever
PROBE_SECONDS = 1.0  # between two probes of an engine whose requests have ended with logits that are not finite
PROBE = Request((0,), 1)
ALONE_SECONDS = 2.0  # time without frontends after which a shared engine process ends
P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger(__name__)


class Probe:
    """Asks the engine for a token while it is not ready, as no client may: one that is answered makes it ready again."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._unsound = False
        self._waits = False  # for an answer
        self._next_at = 0.0

    def look(self) -> None:
        """Ask if it is time to; call this again and again."""
        count = self._service.engine.unsound_in_a_row
        unsound = count >= UNSOUND_REQUESTS
        if unsound != self._unsound:
            self._unsound = unsound
            if unsound:
                logger.error("the logits of %d requests in a row were not finite: the server is not ready", count)
            else:
                logger.warning("logits are finite again: the server is ready")
        if unsound and not self._waits and time.monotonic() >= self._next_at:
            self._next_at, self._waits = time.monotonic() + PROBE_SECONDS, True
            try:
                self._service.submit(PROBE, self._on_output)
            except KvseekError:  # the queue is full of requests that tell as much, or the engine is about to end
                self._waits = False

    def _on_output(self, output: StepOutput) -> None:
        self._waits = output.finish_reason is None


class Outbox:
    """Outputs on their way from the engine's thread to the event loop, which is woken once for those of a step."""

    def __init__(self, loop: asyncio.AbstractEventLoop, metrics: EngineMetrics) -> None:
        self._loop, self._metrics = loop, metrics
        # Safe between threads. A number is the time, by time.perf_counter, of the outputs before it.
        self._items: deque[tuple[FrontendConnection, int, StepOutput] | float] = deque()

    def put(self, frontend: FrontendConnection, number: int, output: StepOutput) -> None:
        """Add an output for a frontend, from any thread; `wake` follows."""
        self._items.append((frontend, number, output))

    def wake(self) -> None:
        """Let the event loop count and send what has been put; from any thread."""
        self._items.append(time.perf_counter())
        self._loop.call_soon_threadsafe(self.flush)

    def flush(self) -> None:
        """Send everything, in order, one message a frontend."""
        outputs, step = dict[FrontendConnection, list[tuple[int, StepOutput]]](), list[StepOutput]()
        self._items.append(time.perf_counter())  # of outputs whose `wake` has not come yet
        while self._items:
            item = self._items.popleft()
            if isinstance(item, float):
                if step:
                    _observed(self._metrics.record, step, item)
                step = []
                continue
            frontend, number, output = item
            step.append(output)
            if frontend in outputs:
                outputs[frontend].append((number, output))
            else:
                outputs[frontend] = [(number, output)]
        for frontend, own in outputs.items():
            frontend.pass_on(own)


class FrontendConnection:
    """One connection of a frontend, with the requests that came over it."""

    def __init__(self, server: EngineServer, writer: asyncio.StreamWriter) -> None:
        self._server, self._writer = server, writer
        self._handles: dict[int, int] = {}  # the frontend's number of a request → the service's handle

    def send(self, message: FromEngine) -> None:
        """Send a message, unless the frontend has gone; a frontend that has stopped reading is disconnected."""
        if self._writer.is_closing():  # uvloop raises on a write then, and outputs of other frontends would be lost
            return
        unread = int(self._writer.transport.get_write_buffer_size())
        if unread > self._server.most_unread_bytes:
            logger.error("a frontend has left %d bytes unread: it is disconnected", unread)
            self._writer.transport.abort()
            return
        self._writer.write(frame(message))

    def pass_on(self, outputs: list[tuple[int, StepOutput]]) -> None:
        """Send outputs of the engine; a frontend to which that fails is disconnected, so that it ends its requests itself."""
        try:
            self.send_outputs(outputs)
        except Exception:  # for want of memory, say; outputs of other frontends go on
            logger.exception("outputs could not be sent to a frontend: it is disconnected")
            self._writer.transport.abort()

    def send_outputs(self, outputs: list[tuple[int, StepOutput]]) -> None:
        """Send outputs of the engine, in several messages if they have much beside tokens."""
        large, sent = 0, 0
        for place, (number, output) in enumerate(outputs, 1):
            if output.finish_reason is not None:
                self._handles.pop(number, None)
            if output.context_logits or output.generation_logits or output.selected_rows is not None:
                rows = 0 if output.selected_rows is None else output.selected_rows.size
                large += len(output.context_logits) + len(output.generation_logits) + rows
                if large >= FRAME_BYTES:
                    self.send(Outputs(outputs[sent:place]))
                    large, sent = 0, place
        if sent < len(outputs):
            self.send(Outputs(outputs[sent:]))

    def take(self, message: FromFrontend) -> None:
        """Do what a message of the frontend asks for."""
        service, metrics = self._server.service, self._server.metrics
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Cancel):
            if message.number in self._handles:
                service.cancel(self._handles[message.number])
        elif isinstance(message, Refused):
            metrics.refused(message.code, message.count)
        elif isinstance(message, Ping):
            self._server.ask(self, partial(self._server.state, message.number))
        elif isinstance(message, EndSession):
            asked = message
            self._server.ask(
                self, lambda engine: SessionEnded(asked.number, engine.end_session(asked.session_id, asked.cache_salt))
            )
        else:
            self.send(Metrics(message.number, metrics.text()))

    def _submit(self, message: Submit) -> None:
        server, number = self._server, message.number
        request = server.with_defaults(message.request)
        tracer, span = server.tracer, None
        if tracer is not None:
            span = _observed(tracer.start, request, message.trace)

        def on_output(output: StepOutput) -> None:
            if output.finish_reason is not None:
                if output.code is ErrorCode.TIMEOUT and message.request.timeout_seconds is None:
                    error = renamed(output.error, {"timeout": "default_timeout"})
                    output = msgspec.structs.replace(output, error=error)
                if span is not None:
                    _observed(span.end, output)
            server.outbox.put(self, number, output)

        try:
            self._handles[number] = server.service.submit(request, on_output, server.outbox.wake)
        except Exception as error:
            if not isinstance(error, KvseekError):
                logger.exception("a request could not be submitted")
            code, text = code_of(error), str(error) if isinstance(error, KvseekError) else INTERNAL
            end = StepOutput(number, finish_reason=FinishReason.ERROR, error=text, code=code)
            _observed(server.metrics.refused, code)
            if span is not None:
                _observed(span.end, end)
            self.pass_on([(number, end)])

    def leave(self) -> None:
        """Cancel all requests of a frontend that has gone, because nobody waits for them."""
        for handle in self._handles.values():
            self._server.service.cancel(handle)
        self._writer.close()


def _observed(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T | None:
    """Call metrics or tracing, which only look on: an exception of theirs is logged, and the request goes on."""
    try:
        return function(*arguments, **named)
    except Exception:
        logger.exception("metrics or tracing failed; the request goes on")
        return None


class EngineServer:
    """Serves the frontends of one engine until it is told to stop or the engine fails.

    Parameters
    ----------
    shared : bool
        Whether nobody but the frontends looks after this process (server/engine/shared.py), so that it ends when the last of them
        has left.
    """

    def __init__(
        self,
        service: EngineService,
        settings: ServeSettings,
        metrics: EngineMetrics,
        tracer: RequestTracer | None = None,
        shared: bool = False,
    ) -> None:
        self.service, self.settings, self.metrics, self.tracer = service, settings, metrics, tracer
        self.outbox, self.most_unread_bytes = Outbox(asyncio.get_running_loop(), metrics), settings.most_unread_bytes
        self._loop = asyncio.get_running_loop()
        self._decoder = msgspec.msgpack.Decoder(FromFrontend)
        self._draining = False
        self._shared, self._frontends, self._used_at = shared, 0, time.monotonic()

    def with_defaults(self, request: Request) -> Request:
        """Complete a request: it gets the server's time limit if it has none of its own."""
        if request.timeout_seconds is None and self.settings.default_timeout is not None:
            return replace(request, timeout_seconds=self.settings.default_timeout)
        return request

    def ask(self, frontend: FrontendConnection, answer: Callable[[Engine], FromEngine]) -> None:
        """Send a frontend what the engine's own loop answers between two steps; one that hangs or has failed does not answer."""

        def on_loop() -> None:
            self._loop.call_soon_threadsafe(frontend.send, answer(self.service.engine))

        self.service.call(on_loop)

    def state(self, number: int, engine: Engine) -> Pong:
        """Make the answer to a ping."""
        return Pong(number, engine.waiting, engine.running, self._draining, engine.unsound_in_a_row)

    async def serve(self, socket: Path, alive: Path | None = None) -> int:
        """Listen until SIGTERM or until the engine fails; returns the process's exit status. `alive`: see `answer_at`."""
        stop = asyncio.Event()
        self._loop.add_signal_handler(signal.SIGTERM, stop.set)
        server = await asyncio.start_unix_server(self._connected, str(socket))
        answering = None if alive is None else await answer_at(alive)
        logger.info("the engine is ready")
        probe, drained = Probe(self.service), asyncio.create_task(self._drain_after(stop))
        try:
            while not drained.done():
                await asyncio.wait((drained,), timeout=0.1)
                if self.service.failure:
                    logger.critical("%s: its process ends", self.service.failure)
                    self.outbox.flush()
                    await asyncio.sleep(0.2)  # the frontends still get the errors of their requests
                    _end_within(ENDING_SECONDS)
                    return STATUS_FAILED
                probe.look()
                if self._frontends or not self._shared:
                    self._used_at = time.monotonic()
                elif time.monotonic() - self._used_at > ALONE_SECONDS:
                    logger.info("no frontend is connected any more: the engine process ends")
                    return 0
            drained.result()
            return 0
        finally:
            server.close()
            if answering is not None:
                answering.close()
            drained.cancel()

    async def _drain_after(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._draining = True
        await asyncio.to_thread(self.service.drain, self.settings.drain_seconds)
        self.outbox.flush()
        await asyncio.sleep(0.2)  # so that written messages leave this process

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frontend = FrontendConnection(self, writer)
        self._frontends += 1
        try:
            while True:
                message = await read_frame(reader, self._decoder)
                try:
                    frontend.take(message)
                except Exception:  # one message must not end the frontend's connection, and all its requests
                    logger.exception("a message of a frontend could not be handled")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the frontend's process has ended
        except asyncio.CancelledError:
            pass  # the loop ends; Python 3.11 would log a traceback if this task ended as cancelled
        except msgspec.MsgspecError as error:
            logger.error("a frontend sent what is no message: %s", error)
        finally:
            self._frontends -= 1
            frontend.leave()


async def run(arguments: argparse.Namespace) -> int:
    """Load the engine and serve it."""
    settings = ServeSettings.from_json(arguments.settings)
    if not settings.core_dumps:
        leave_no_core()  # here too, for an engine process that was started in a tritonserver
    model_name = read_manifest(arguments.engine_dir).source_model
    tracer = None if settings.otlp_endpoint is None else RequestTracer(settings.otlp_endpoint, model_name)
    disk = DiskSettings(None if settings.disk_dir is None else Path(settings.disk_dir), settings.disk_bytes)
    limits = (settings.threads, settings.max_queue_size, settings.max_num_tokens)
    if arguments.shared:  # its frontends wait however long loading takes, and kill what does not answer meanwhile
        answering = await answer_at(arguments.alive)  # noqa: F841  until the loop ends
    service = await asyncio.to_thread(
        EngineService.load, arguments.engine_dir, *limits, disk, settings.nodes, settings.drafts
    )
    await asyncio.to_thread(_load_vocabulary, service)
    metrics = EngineMetrics(service, model_name, settings.max_queue_size)
    service.on_step(metrics.record_step)
    try:
        server = EngineServer(service, settings, metrics, tracer, arguments.shared)
        return await server.serve(arguments.socket, None if arguments.shared else arguments.alive)
    finally:
        await asyncio.to_thread(service.close)
        if tracer is not None:
            await asyncio.to_thread(tracer.close)


def _end_within(seconds: float) -> None:
    """End this process after so long, however far its orderly end has got."""
    timer = threading.Timer(seconds, os._exit, (STATUS_FAILED,))
    timer.daemon = True
    timer.start()


def _load_vocabulary(service: EngineService) -> None:
    """Load now what guided decoding needs: all streams would wait while the first guide loads it."""
    try:
        service.engine.load_vocabulary()
    except RequestError as error:
        logger.info("requests with guides are refused: %s", error)


def main(argv: Sequence[str] | None = None) -> int:
    """Run an engine process; its arguments come from `kvseek serve`, or from SharedEngine."""
    parser = argparse.ArgumentParser(prog="python -m kvseek.server.engine.process", description=__doc__)
    parser.add_argument("--engine_dir", type=Path, required=True)
    parser.add_argument("--socket", type=Path, required=True, help="in a folder that only this user can enter")
    parser.add_argument("--settings", required=True, help="ServeSettings as JSON")
    parser.add_argument(
        "--alive", type=Path, help="socket at which whoever looks after the process asks whether it works"
    )
    parser.add_argument("--shared", action="store_true", help="end when the last frontend has left")
    status = run_process(run(parser.parse_args(argv)))
    if status == STATUS_FAILED:
        os._exit(status)  # what PyTorch and the driver do at the end of a process may wait for the GPU for ever
    return status


if __name__ == "__main__":
    sys.exit(main())
