"""Gives the body of an ASGI request to the reader of bodies that all doors share, and notices when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

T = TypeVar("T")


class ClientLeftError(ConnectionError):
    """The client has closed its connection, so nobody waits for an answer."""


class AsgiBody:
    """A request whose headers have arrived; see kvseek.server.http_door.body.Incoming."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.headers = Headers(scope=scope)
        self._receive, self._more = receive, True

    @property
    def content(self) -> AsgiBody:
        """The body; it reads itself."""
        return self

    @property
    def content_length(self) -> int | None:
        """Bytes of the body, if the client says."""
        length = self.headers.get("content-length", "")
        return int(length) if length.isascii() and length.isdigit() else None

    async def readany(self) -> bytes:
        """Wait for some bytes of the body; empty at its end. Raises ClientLeftError."""
        while self._more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError
            self._more = message.get("more_body", False)
            if body := message.get("body", b""):
                return bytes(body)
        return b""


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work of a request whose body has been read; if its client leaves, cancel the work and raise ClientLeftError."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_leaving(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeftError
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _leaving(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
