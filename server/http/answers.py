"""Writes an answer whole, or as a stream of server-sent events; what the client has not read counts (requests/unread.py)."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.types import Scope, Send

from kvseek.server.requests.unread import UnreadAnswer, UnreadError

from .body import ClientLeftError
from .errors import JSON, ErrorForm
from .server import CONNECTION, Connection

PIECE_BYTES = 64 << 10  # of an answer that are written at a time: the connection takes all that it is given
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back until it has some kilobytes
]


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
                event, size = b"data: " + data + b"\n\n", len(data)
                del data  # the client may leave the event unread for long, and the next one may be long in coming
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
