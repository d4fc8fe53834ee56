"""Reads the content of requests and writes that of answers, whole or as server-sent events.

Bodies have limits on their size, on their slowness, and on the bytes held in memory at once. A client can send anything: so a
body of JSON is first split into its fields without building values, and each is decoded by its type. What a client has not read
of its answer counts (requests/unread.py).
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Scope, Send

from kvseek.core.config import EngineConfig
from kvseek.core.errors import SHOWN_CHARACTERS, RequestError, shortened
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.requests.translation import max_text_bytes
from kvseek.server.requests.unread import UnreadAnswer, UnreadError

from .errors import JSON, ClientLeftError, ErrorForm, HttpError
from .server import CONNECTION, Connection

BODY_SECONDS = 30.0  # time in which a body must arrive, or at least the part of it that a slow line carries, see below
BODY_BYTES_PER_SECOND = 64 << 10  # rate of a slow line
BODIES_AT_ONCE = 4  # bodies of the largest size that may be in memory at a time
SMALL_BODIES_BYTES = 256 << 20  # bytes of bodies that may be in memory at a time in any case
MAX_FIELD_BYTES = 1 << 20  # most bytes of JSON for a field that is not the prompt
MAX_HALVES = 1 << 16  # places of a faulty body that are looked at, as each takes 0.5 µs
PIECE_BYTES = 64 << 10  # of an answer that are written at a time: the connection takes all that it is given
JSON_BYTES_PER_BYTE = 6  # a byte of text takes at most \\u0000
JSON_BYTES_PER_ID = 12  # ten digits, a comma and a space
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
KINDS = {'"': "a string", "{": "an object", "[": "a list", "t": "true", "f": "false", "n": "null"}
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


class JsonFault(RequestError):
    """A body that is no JSON object of known fields.

    Parameters
    ----------
    field : str
        The field at fault; empty if there is none.
    unknown : bool
        Whether there is no such field.
    """

    def __init__(self, field: str, message: str, unknown: bool = False) -> None:
        super().__init__(message)
        self.field, self.unknown = field, unknown


class FieldSplitter:
    """Splits bodies into their fields. An unknown field ends that at once, because a body could have a million of them."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(dict.fromkeys(names))
        fields = [(name, msgspec.Raw, None) for name in self.names]
        self._decoder = msgspec.json.Decoder(msgspec.defstruct("Body", fields, forbid_unknown_fields=True))

    def split(self, body: bytes | bytearray) -> dict[str, msgspec.Raw]:
        """Return the JSON of each field that is there; its syntax is right. Raises JsonFault."""
        try:
            found = self._decoder.decode(body)
        except RecursionError:
            raise JsonFault("", "the body nests too deeply: must be an object of fields; send such") from None
        except msgspec.ValidationError as error:
            unknown = re.search(r"unknown field `(.*)`", str(error), re.DOTALL)
            if unknown is None:
                raise JsonFault(
                    "", "the body is not a JSON object; send {...} with the fields of the request"
                ) from None
            name = shortened(unknown[1])
            raise JsonFault(
                name, f"{name}: there is no such field; check the spelling, or leave it out", unknown=True
            ) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise JsonFault(*_fault(body, error, self.names)) from None
        fields = ((name, getattr(found, name)) for name in self.names)
        return {name: raw for name, raw in fields if raw is not None}


# An escape that is half of a surrogate pair: a first half before no second one, or a second behind no first.
_HALF = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|[c-fC-F][0-9a-fA-F]{2}(?<!\\u[dD][89abAB]..\\u....))",
    re.DOTALL,
)


def _half_character(body: bytes | bytearray, end: int) -> int | None:
    """Return where the first half of a surrogate pair stands in JSON before byte `end`; None: nowhere."""
    for found in itertools.islice(_HALF.finditer(body, 0, end), MAX_HALVES):
        at = found.start()
        while at > 0 and body[at - 1] == ord("\\"):
            at -= 1
        if (found.start() - at) % 2 == 0:  # else the backslash is itself escaped
            return found.start()
    return None


def _fault(body: bytes | bytearray, error: Exception, names: Iterable[str]) -> tuple[str, str]:
    """Find what is wrong with a body that msgspec refuses as JSON; its message does not always tell.

    Parameters
    ----------
    names : iterable of str
        The fields that a body may have.

    Returns
    -------
    field : str
        The last field before the fault; empty if there is none.
    message : str
    """
    place = re.search(r"\(byte (\d+)\)", str(error))
    end = int(place[1]) if place else len(body)
    half = _half_character(body, end)
    known = "|".join(map(re.escape, names))
    fields = re.findall(rf'"({known})"\s*:'.encode(), body[: end if half is None else half])
    field = fields[-1].decode() if fields else ""
    if half is not None:
        shown = body[half : half + 6].decode("ascii", "replace")
        what = f"{shown} at byte {half} of the body is half of a surrogate pair, such as half an emoji"
        return field, f"{field or 'the body'}: {what}; send the whole character"
    where = f" (in or after the field {field})" if field else ""
    if place is None and "truncated" in str(error):
        return field, f"the body is not JSON{where}: it ends at byte {end}, before it is complete; send all of it"
    return field, f"the body is not JSON{where}: {error}; send valid JSON, encoded as UTF-8"


def first_character(raw: msgspec.Raw) -> str:
    """Return the first character of JSON, which tells its kind; characters that are not in KINDS begin numbers."""
    return chr(memoryview(raw)[0])


def shown(raw: msgspec.Raw) -> str:
    """Shorten a client's JSON for an error message; lists and objects are only named as such."""
    kind = first_character(raw)
    if kind in "{[":
        return KINDS[kind]
    return shortened(bytes(memoryview(raw)[: 4 * SHOWN_CHARACTERS]).decode("utf-8", "replace"))


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

    async def stream(self, events: AsyncIterator[bytes], form: ErrorForm, frame: bytes = b"data: %b\n\n") -> None:
        """Write a stream of events, each of them put into `frame`.

        An error before the first is raised, and gets a status from the server; a later one is the last event.
        """
        data = await anext(events, None)
        await self._begin()
        try:
            while data is not None:
                event, size = frame % data, len(data)
                del data  # the client may leave the event unread for long, and the next one may be long in coming
                if size > PIECE_BYTES or not self._connection.write_now(event):
                    await self._deliver(event, size)
                del event
                data = await anext(events, None)
        except ConnectionError:
            raise
        except Exception as error:
            await self._deliver(frame % form(error)[1], 0)  # for an error there is always room
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
