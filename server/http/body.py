"""Reads the bodies of requests, with limits on their size, on their slowness, and on the bytes held in memory at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from .errors import HttpError

BODY_SECONDS = 30.0  # time in which a body must arrive, or at least the part of it that a slow line carries, see below
BODY_BYTES_PER_SECOND = 64 << 10  # rate of a slow line
BODIES_AT_ONCE = 4  # bodies of the largest size that may be in memory at a time
SMALL_BODIES_BYTES = 256 << 20  # bytes of bodies that may be in memory at a time in any case


class ClientLeftError(ConnectionError):
    """The client has closed its connection, so nobody waits for an answer."""


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
