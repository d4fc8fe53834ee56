"""Reads the content of requests and writes that of answers, whole or as server-sent events.

Bodies have limits on their size, on their slowness, and on the bytes held in memory at once. What a client has not read of its
answer counts (requests/unread.py).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import Request
from starlette.types import Scope, Send

from kvseek.core.config import EngineConfig
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.requests.translation import max_text_bytes
from kvseek.server.requests.unread import UnreadAnswer, UnreadError

from .errors import JSON, ClientLeftError, ErrorForm, HttpError
from .json_fields import MAX_FIELD_BYTES
from .server import CONNECTION, Connection

BODY_SECONDS = 30.0  # time in which a body must arrive, or at least the part of it that a slow line carries, see below
BODY_BYTES_PER_SECOND = 64 << 10  # rate of a slow line
BODIES_AT_ONCE = 4  # bodies of the largest size that may be in memory at a time
SMALL_BODIES_BYTES = 256 << 20  # bytes of bodies that may be in memory at a time in any case
PIECE_BYTES = 64 << 10  # of an answer that are written at a time: the connection takes all that it is given
JSON_BYTES_PER_BYTE = 6  # a byte of text takes at most \\u0000
JSON_BYTES_PER_ID = 12  # ten digits, a comma and a space
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back until it has some kilobytes
]


def body_limit(takes_text: bool, config: EngineConfig, tokenizer: Tokenizer) -> int:
    """Return the most bytes of a body: a prompt of max_input_len tokens, as escaped text or as ids, and the other fields."""
    if takes_text:
        return max_text_bytes(config, tokenizer) * JSON_BYTES_PER_BYTE + MAX_FIELD_BYTES
    return config.max_input_len * JSON_BYTES_PER_ID + MAX_FIELD_BYTES


def largest_body(config: EngineConfig, tokenizer: Tokenizer) -> int:
    """Return the most bytes of a body that may have either; loads the tokenizer, which may take a second."""
    return max(body_limit(takes_text, config, tokenizer) for takes_text in (True, False))


class BodyReader:
    """Reads the bodies of the requests of all ports.

    Parameters
    ----------
    seconds : float
        Time in which a body must arrive, or BODY_BYTES_PER_SECOND for each of these seconds; it begins anew until the body is
        complete.
    """

    def __init__(self, seconds: float = BODY_SECONDS) -> None:
        self._seconds = seconds
        self._room, self._held = SMALL_BODIES_BYTES, 0

    def make_room_for(self, limit: int) -> None:
        """Allow BODIES_AT_ONCE bodies of `limit` bytes in memory at a time; a body counts until its request is tokenised."""
        self._room = max(self._room, BODIES_AT_ONCE * limit)

    @asynccontextmanager
    async def read(self, request: Request, limit: int) -> AsyncIterator[bytearray]:
        """Read the body of a request; it counts as held in memory until the context ends.

        Raises
        ------
        HttpError
            408 if the body comes too slowly, 413 if it has more bytes than `limit`, 415 if it is compressed, 503 if there is
            no room for it now.
        ClientLeftError
            If the client leaves before.
        """
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise HttpError(415, "Content-Encoding: must be absent; send the body uncompressed")
        announced = int(request.headers.get("content-length", 0))  # the parser has refused what is no number
        if announced > limit:
            raise _too_large(f"{announced}", limit)
        body = bytearray()
        try:
            await self._receive(request, limit, body)
            yield body
        finally:
            self._held -= len(body)

    async def _receive(self, request: Request, limit: int, body: bytearray) -> None:
        enough, received, more = int(self._seconds * BODY_BYTES_PER_SECOND), 0, True
        try:
            async with asyncio.timeout(self._seconds) as deadline:
                while more:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeftError
                    more, data = message["more_body"], message["body"]
                    body += data
                    self._held += len(data)
                    received += len(data)
                    if received >= enough:
                        received = 0
                        deadline.reschedule(asyncio.get_running_loop().time() + self._seconds)
                    if len(body) > limit:
                        raise _too_large(f"more than {limit}", limit)
                    if self._held > self._room:
                        raise HttpError(
                            503, f"bodies of requests have {self._held} bytes: no room now; try again later"
                        )
        except TimeoutError:
            raise HttpError(
                408,
                f"a body must arrive in {self._seconds:g} s, a large one at {BODY_BYTES_PER_SECOND} bytes/s; send it faster",
            ) from None


def _too_large(size: str, limit: int) -> HttpError:
    return HttpError(
        413, f"the body has {size} bytes: must be <= {limit}, enough for max_input_len tokens; shorten the prompt"
    )


def trace_of(request: Request) -> str:
    """Return the client's W3C traceparent; empty if there is none or it is malformed."""
    value = request.headers.get("traceparent", "")
    return value if TRACEPARENT.fullmatch(value) else ""


class Writer:
    """Writes one response. A client that does not read is disconnected, and ClientLeftError raised.

    Parameters
    ----------
    answer : UnreadAnswer
        Counts what is written.
    """

    def __init__(self, scope: Scope, send: Send, answer: UnreadAnswer) -> None:
        self._connection: Connection = scope["state"][CONNECTION]
        self._send, self._answer = send, answer

    async def whole(self, data: bytes) -> None:
        """Write a whole answer of JSON; raises QueueFullError."""
        headers = [(b"content-type", JSON.encode()), (b"content-length", b"%d" % len(data))]
        await self._deliver(data, len(data), {"type": "http.response.start", "status": 200, "headers": headers})

    async def stream(self, events: AsyncIterator[bytes], form: ErrorForm) -> None:
        """Write a stream of events.

        An error before the first is raised, and gets a status from the server; a later one is the last event.
        """
        data = await anext(events, None)
        await self._begin()
        try:
            while data is not None:
                event, size = b"data: %b\n\n" % data, len(data)
                del data  # the client may leave the event unread for long, and the next one may be long in coming
                if size > PIECE_BYTES or not self._connection.write_now(event):
                    await self._deliver(event, size)
                del event
                data = await anext(events, None)
        except ConnectionError:
            raise
        except Exception as error:
            await self._deliver(b"data: " + form(error)[1] + b"\n\n", 0)  # for an error there is always room
        await self._end()

    async def empty_stream(self) -> None:
        """Write a stream without events."""
        await self._begin()
        await self._end()

    async def _begin(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})

    async def _end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def _deliver(self, data: bytes, size: int, start: dict[str, Any] | None = None) -> None:
        async def write() -> None:
            if start is not None:
                await self._send(start)
            for first in range(0, len(data), PIECE_BYTES):
                more = start is None or first + PIECE_BYTES < len(data)
                piece = data[first : first + PIECE_BYTES]
                await self._send({"type": "http.response.body", "body": piece, "more_body": more})
                self._answer.progress()

        try:
            await self._answer.deliver(size, write)
        except UnreadError:
            self._connection.transport.abort()
            raise ClientLeftError from None
