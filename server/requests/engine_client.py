"""A frontend's connection to the engine process, for any number of requests: submit, cancel, outputs by callback.

Both ends send messages over the engine process's Unix socket, one MessagePack document a frame. A frontend numbers its requests
itself; numbers of different frontends (connections) are independent of each other. Every submitted request gets outputs, of which
exactly the last has a finish reason, unless the connection ends first. Then the frontend knows that the engine process has ended,
and the engine knows that nobody waits for the frontend's requests.

Why a plain socket: the kernel closes it when either process dies, however it dies, so both sides know at once and
without heartbeats. A broker or a message queue between them would hide just that.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from kvseek.core.errors import ErrorCode, RequestError, TimeoutExpiredError, UnavailableError
from kvseek.core.request import EndedSession, FinishReason, Request, StepOutput
from kvseek.server.errors import INTERNAL

MAX_FRAME_BYTES = 256 << 20
UNSOUND_REQUESTS = 5  # in a row whose logits are not finite: with so many the engine is not ready
RETRY_SECONDS = 0.1  # time between attempts to connect: the engine process may be loading, or being restarted
ANSWER_SECONDS = 10.0  # most time for a ping: longer than a step of the engine, also on a loaded machine
METRICS_SECONDS = 2.0  # most time for metrics, which do not wait for a step, and whose reader waits
NOT_RUNNING = "the engine is not running: it is being started or restarted; send the request again in some seconds"
DIED = "the engine process ended while the request was with it, and is being restarted; send the request again"
_LENGTH = struct.Struct("<I")


class Submit(msgspec.Struct, tag="submit"):
    """Frontend to engine: generate."""

    number: int
    request: Request
    trace: str = ""  # W3C traceparent of the client, or empty


class Cancel(msgspec.Struct, tag="cancel"):
    """Frontend to engine: cancel a request, whose client has left. Without effect if the request has ended."""

    number: int


class Refused(msgspec.Struct, tag="refused"):
    """Frontend to engine: number of requests that ended without reaching this engine process, for the metrics."""

    code: str
    count: Annotated[int, msgspec.Meta(ge=1)] = 1


class Ping(msgspec.Struct, tag="ping"):
    """Frontend to engine: ask whether the engine's loop answers."""

    number: int


class ReadMetrics(msgspec.Struct, tag="read_metrics"):
    """Frontend to engine: ask for the metrics."""

    number: int


class EndSession(msgspec.Struct, tag="end_session"):
    """Frontend to engine: forget a session and free what only it has used."""

    number: int
    session_id: str
    cache_salt: str | None


class Outputs(msgspec.Struct, tag="outputs"):
    """Engine to frontend: outputs of requests, in order, as pairs of a request's number and an output."""

    outputs: list[tuple[int, StepOutput]]


class Pong(msgspec.Struct, tag="pong"):
    """Engine to frontend: the answer to Ping, sent by the engine's loop between two steps."""

    number: int
    waiting: int  # requests in the queue
    running: int  # requests with a slot
    draining: bool  # no new requests are taken
    unsound: int = 0  # requests that ended because their logits were not finite, since one last ended well


class Metrics(msgspec.Struct, tag="metrics"):
    """Engine to frontend: the answer to ReadMetrics, in Prometheus' text format."""

    number: int
    text: str


class SessionEnded(msgspec.Struct, tag="session_ended"):
    """Engine to frontend: the answer to EndSession, sent by the engine's loop between two steps."""

    number: int
    ended: EndedSession | None  # None: there is no such session


FromFrontend = Submit | Cancel | Refused | Ping | ReadMetrics | EndSession
FromEngine = Outputs | Pong | Metrics | SessionEnded
_encoder = msgspec.msgpack.Encoder()


def frame(message: FromFrontend | FromEngine) -> bytes:
    """Encode a message, with its length before it."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    """Read the next message; raises IncompleteReadError at the end of the stream, MsgspecError if it is no message."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise msgspec.ValidationError(f"a frame of {length} bytes: must be <= {MAX_FRAME_BYTES}")
    data = await reader.readexactly(length)
    try:
        return decoder.decode(data)
    except UnicodeDecodeError as error:  # raised by msgspec, although it is no MsgspecError
        raise msgspec.ValidationError(f"a string that is no UTF-8: {error}") from None


Callback = Callable[[list[StepOutput]], None]
Answer = TypeVar("Answer", Pong, Metrics, SessionEnded)
logger = logging.getLogger(__name__)


class EngineClient:
    """Connects to the engine process, and connects again whenever it has been restarted.

    `encoded`, `cancel` and `refused` may be called from any thread. Callbacks run on the client's event loop, must return soon,
    and get every output of their request, those that a turn of the loop finds together: of one step, or of several when the
    loop is behind. The last has a finish reason and comes alone. If the engine process ends, the last output of every
    request is an error with code UNAVAILABLE; if a callback raises, the last output of its request is one with code INTERNAL.

    Parameters
    ----------
    socket : Path
        The engine process's Unix socket.
    loop : asyncio loop
        A running loop to use.
    absent : callable
        Called, on the loop, whenever there is no engine process to connect to.
    """

    def __init__(
        self, socket: Path, loop: asyncio.AbstractEventLoop, absent: Callable[[], None] = lambda: None
    ) -> None:
        self._socket, self._absent = socket, absent
        self._numbers = itertools.count(1)
        self._callbacks: dict[int, Callback] = {}  # used on the loop alone
        self._arrived: dict[int, list[StepOutput]] = {}  # outputs that have not been handed out, by request
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._connected_at = 0.0  # time.monotonic of the last connection
        self._uncounted = Counter[str]()  # requests that ended while there was no engine to count them, by code
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._loop = loop
        self._running = asyncio.run_coroutine_threadsafe(self._run(), loop)

    @property
    def connected(self) -> bool:
        """Whether there is an engine process to submit to."""
        return self._writer is not None

    @property
    def connected_seconds(self) -> float:
        """Seconds since there is this engine process to submit to; 0 if there is none."""
        return time.monotonic() - self._connected_at if self.connected else 0.0

    def encoded(self, request: Request, trace: str = "", arrived: float | None = None) -> tuple[int, bytes]:
        """Give a request a number, and encode what submits it. Any thread may call this: long prompts must not hold up the loop.

        Parameters
        ----------
        trace : str
            W3C traceparent of the client, or empty.
        arrived : float, optional
            When the frontend got the request, in seconds of time.monotonic: what has passed since is a part of its time limit.

        Raises
        ------
        TimeoutExpiredError
            If the time limit has passed.
        RequestError
            If a number of the request has more than 64 bits.
        """
        if arrived is not None:
            request = replace(request, waited_seconds=time.monotonic() - arrived)
            limit, waited = request.timeout_seconds, request.waited_seconds
            if (
                limit is not None and 0 < limit <= waited
            ):  # of a limit that is not above 0 the engine says what is wrong
                raise TimeoutExpiredError(
                    f"timeout = {limit:g} s: passed before the request was tokenised, after {waited:.1f} s; "
                    "send it again later, or with a longer timeout"
                )
        number = next(self._numbers)
        try:
            return number, frame(Submit(number, request, trace))
        except OverflowError as error:
            raise RequestError(f"a number of the request is too large ({error}); send smaller numbers") from None

    def start(self, number: int, data: bytes, on_output: Callback) -> None:
        """Send what `encoded` has made, on the client's loop; raises UnavailableError if the engine process does not run."""
        if self._writer is None or self._writer.is_closing():
            raise UnavailableError(NOT_RUNNING)
        self._callbacks[number] = on_output
        try:
            self._writer.write(data)
        except Exception:
            logger.exception("a request could not be sent to the engine process")
            self._end(number, on_output, _failure(number, INTERNAL, ErrorCode.INTERNAL))

    def cancel(self, number: int) -> None:
        """End a request as cancelled, soon; does nothing if it has ended."""
        self._loop.call_soon_threadsafe(self._send, Cancel(number))

    def refused(self, code: ErrorCode) -> None:
        """Let the engine count a request that was refused before it was submitted."""
        self._loop.call_soon_threadsafe(self._count, code.value, 1)

    async def ping(self) -> Pong:
        """Ask the engine's loop for its state; raises UnavailableError if it does not answer within ANSWER_SECONDS."""
        number = next(self._numbers)
        return await self._ask(Ping(number), number, Pong, ANSWER_SECONDS)

    async def read_metrics(self) -> str:
        """Ask for the engine's metrics in Prometheus' text format; raises UnavailableError after METRICS_SECONDS."""
        number = next(self._numbers)
        return (await self._ask(ReadMetrics(number), number, Metrics, METRICS_SECONDS)).text

    async def end_session(self, session_id: str, cache_salt: str | None) -> EndedSession | None:
        """Let the engine end a session; None if it knows none. Raises UnavailableError if it does not answer as to a ping."""
        number = next(self._numbers)
        message = EndSession(number, session_id, cache_salt)
        return (await self._ask(message, number, SessionEnded, ANSWER_SECONDS)).ended

    def close(self) -> None:
        """Disconnect; the engine cancels the requests that have not ended, and their callbacks get an error."""
        self._running.cancel()

    def _count(self, code: str, count: int) -> None:
        if self._writer is None or self._writer.is_closing():
            self._uncounted[code] += count
        else:
            self._send(Refused(code, count))

    def _send(self, message: FromFrontend) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))

    async def _ask(
        self, message: Ping | ReadMetrics | EndSession, number: int, kind: type[Answer], seconds: float
    ) -> Answer:
        if self._writer is None:
            raise UnavailableError(NOT_RUNNING)
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._answers[number] = answer
        try:
            self._send(message)
            return await asyncio.wait_for(answer, seconds)
        except TimeoutError:
            raise UnavailableError(f"the engine has not answered for {seconds:g} s; try again later") from None
        finally:
            del self._answers[number]

    async def _run(self) -> None:
        while True:
            try:
                await self._serve()
            except Exception:  # if it ended this task, no engine process would ever be found again
                logger.exception("the connection to the engine process failed; a new one is made")
            await asyncio.sleep(RETRY_SECONDS)

    async def _serve(self) -> None:
        """Connect to the engine process, if it listens, and hand out its messages until the connection ends."""
        try:
            reader, self._writer = await asyncio.open_unix_connection(str(self._socket))
        except OSError:
            self._absent()
            return
        writer, self._connected_at = self._writer, time.monotonic()
        try:
            uncounted, self._uncounted = self._uncounted, Counter()
            for code, count in (+uncounted).items():  # + leaves only counts above 0
                self._count(code, count)
            while True:
                self._take(await read_frame(reader, self._decoder))
        except (asyncio.IncompleteReadError, ConnectionError):
            logger.warning("the engine process has ended; %d requests end with it", len(self._callbacks))
        except msgspec.MsgspecError as error:
            logger.error(
                "the engine process sent what is no message (%s); %d requests end", error, len(self._callbacks)
            )
        finally:
            self._writer = None
            self._end_all()
            writer.close()

    def _take(self, message: FromEngine) -> None:
        if not isinstance(message, Outputs):
            answer = self._answers.get(message.number)
            if answer is not None and not answer.done():  # else nobody waits for it any more
                answer.set_result(message)
            return
        arrived = self._arrived
        if not arrived:
            self._loop.call_soon(self._hand_out)  # after all messages that have come
        for number, output in message.outputs:
            if number in arrived:
                arrived[number].append(output)
            else:
                arrived[number] = [output]

    def _hand_out(self) -> None:
        arrived, self._arrived = self._arrived, {}
        for number, outputs in arrived.items():
            callback = self._callbacks.get(number)
            if callback is None:
                continue
            last = outputs.pop() if outputs[-1].finish_reason is not None else None
            if outputs and not _call(callback, outputs):
                self._end(number, callback, _failure(number, INTERNAL, ErrorCode.INTERNAL))
                self._send(Cancel(number))
            elif last is not None:
                self._end(number, callback, last)

    def _end(self, number: int, callback: Callback, end: StepOutput) -> None:
        """Give a request its end, and take no further outputs for it."""
        self._callbacks.pop(number, None)
        _call(callback, [end])

    def _end_all(self) -> None:
        self._hand_out()
        callbacks, self._callbacks = self._callbacks, {}
        self._uncounted[ErrorCode.UNAVAILABLE.value] += len(callbacks)
        for number, callback in callbacks.items():
            _call(callback, [_failure(number, DIED)])
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(UnavailableError(NOT_RUNNING))


def _failure(number: int, message: str, code: ErrorCode = ErrorCode.UNAVAILABLE) -> StepOutput:
    return StepOutput(number, finish_reason=FinishReason.ERROR, error=message, code=code)


def _call(callback: Callback, outputs: list[StepOutput]) -> bool:
    """Hand outputs over; returns whether the callback took them."""
    try:
        callback(outputs)
    except Exception:
        logger.exception("outputs could not be passed on; their request ends")
        return False
    return True
