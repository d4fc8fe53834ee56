"""Messages between frontends and the engine process over its Unix socket: one MessagePack document a frame.

A frontend numbers its requests itself; numbers of different frontends (connections) are independent of each other. Every
submitted request gets outputs, of which exactly the last has a finish reason, unless the connection ends first. Then the
frontend knows that the engine process has ended, and the engine knows that nobody waits for the frontend's requests.

Why a plain socket: the kernel closes it when either process dies, however it dies, so both sides know at once and
without heartbeats. A broker or a message queue between them would hide just that.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Annotated, Any

import msgspec

from kvseek.core.request import EndedSession, Request, StepOutput

MAX_FRAME_BYTES = 256 << 20
UNSOUND_REQUESTS = 5  # in a row whose logits are not finite: with so many the engine is not ready
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
