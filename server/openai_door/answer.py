"""One generation over HTTP: reads the body, has the engine generate all choices, and writes the answer, whole or as a stream."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvseek.core.config import EngineConfig
from kvseek.core.errors import UnavailableError
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.http_door.body import BodyReader
from kvseek.server.http_door.fields import shortened
from kvseek.server.http_door.generate import EVENT_STREAM, PIECE_BYTES, TRACEPARENT
from kvseek.server.requests.generations import Generations, Ticket
from kvseek.server.requests.keys import Tenant
from kvseek.server.requests.unread import UnreadAnswer, UnreadError

from .chat_body import CHAT_FORMAT, ChatBody
from .choices import Choice, make_choices
from .completion_body import COMPLETION_FORMAT, CompletionBody
from .errors import JSON, FieldError, StatusError, error_json
from .replies import ChatReply, CompletionReply, Json, Piece, Reply, usage
from .request_body import AsgiBody, ClientLeftError, unless_left

# In the state of a request:
ABORT = "abort"  # closes its connection at once
TENANT = "tenant"  # whose request it is
DONE = b"[DONE]"
MANY_TOKENS = 512  # whose log probabilities take some 2 ms to write
T = TypeVar("T")
Pieces = AsyncIterator[tuple[int, Piece]]  # a choice's number and its next piece


@dataclass
class Service:
    """What requests share.

    Attributes
    ----------
    model, fingerprint : str
        The model's name for clients, and a name of the engine that changes when its answers may change.
    body_limit : int or None
        Most bytes of a body; None until the tokenizer is loaded, and requests are refused until then.
    """

    generations: Generations
    bodies: BodyReader
    tokenizer: Tokenizer
    config: EngineConfig
    model: str
    fingerprint: str
    body_limit: int | None = None


@dataclass(frozen=True)
class Work:
    """A request that has been read and tokenised.

    Attributes
    ----------
    choices : sequence of Choice
        Those of the first prompt first; each prompt has `answers` of them.
    prompt_tokens : int
        Of all prompts, each of them counted once.
    """

    choices: Sequence[Choice]
    answers: int
    prompt_tokens: int
    reply: Reply
    streaming: bool
    usage_in_stream: bool


class Answer(Response):
    """The response to a request for a completion; all its work is done when it is sent.

    Errors before the first event of a stream are raised, and get a status from the application; a later one ends the stream with
    an event {"error": ...}.
    """

    def __init__(self, service: Service, request: Request, chat: bool) -> None:
        super().__init__()
        self._service, self._chat, self._arrived = service, chat, time.monotonic()
        self._tenant: Tenant = request.scope["state"][TENANT]
        value = request.headers.get("traceparent", "")
        self._trace = value if TRACEPARENT.fullmatch(value) else ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; a client that leaves cancels its request."""
        try:
            work = await self._read(AsgiBody(scope, receive), receive)
            with self._service.generations.unread.answer() as answer:
                out = Writer(scope, send, answer)
                await unless_left(receive, self._stream(work, out) if work.streaming else self._whole(work, out))
        except ClientLeftError as error:
            traceback.clear_frames(
                error.__traceback__
            )  # a cycle of the error and its task would keep the answer for long

    async def _read(self, body: AsgiBody, receive: Receive) -> Work:
        service = self._service
        if service.body_limit is None:
            raise UnavailableError("the server is starting; send the request again in some seconds")
        with service.generations.counting_refusals():
            async with service.bodies.read(body, service.body_limit) as data:
                return await unless_left(receive, service.generations.make(lambda: self._make(data)))

    def _make(self, data: bytes | bytearray) -> Work:
        """Parse a body and tokenise its prompts; runs in a worker thread."""
        service = self._service
        body: ChatBody | CompletionBody = CHAT_FORMAT.read(data) if self._chat else COMPLETION_FORMAT.read(data)
        if body.model is None:
            raise FieldError("model", f"model is missing: must be {service.model}; add it")
        if body.model != service.model:
            message = f"model = {shortened(body.model)}: is not served here; there is {service.model}"
            raise StatusError(404, message, "model_not_found", "model")
        choices, prompt_tokens = make_choices(body, body, self._tenant, service.tokenizer, service.config)
        make: Callable[..., Reply] = ChatReply if self._chat else CompletionReply
        with_usage = body.usage_in_stream
        reply = make(service.model, service.fingerprint, service.tokenizer, body.top() is not None, with_usage)
        return Work(choices, body.choices, prompt_tokens, reply, bool(body.stream), with_usage)

    async def _whole(self, work: Work, out: Writer) -> None:
        pieces: list[Piece] = [{}] * len(work.choices)
        async with self._pieces(work, out.answer) as arriving:
            async for index, piece in arriving:
                pieces[index] = piece
        counts = _usage(work, pieces)
        tokens = sum(len(piece["tokens"]) for piece in pieces)
        await out.all(await _written(tokens, lambda: msgspec.json.encode(work.reply.whole(pieces, counts))))

    async def _stream(self, work: Work, out: Writer) -> None:
        async with self._pieces(work, out.answer) as arriving:
            first = await anext(arriving)  # until here, an error can still choose the response's status
            await out.begin()
            for event in work.reply.begin(len(work.choices)):
                await out.event(msgspec.json.encode(event))
            try:
                await self._events(work, out, first, arriving)
            except ConnectionError:
                raise
            except Exception as error:
                await out.error(msgspec.json.encode(error_json(error)[1]))
        await out.end()

    async def _events(self, work: Work, out: Writer, first: tuple[int, Piece], arriving: Pieces) -> None:
        last: list[Piece] = [{}] * len(work.choices)
        index, piece = first
        while True:
            last[index] = piece | {"tokens": ()}
            await self._events_of_piece(work.reply, out, index, piece)
            following = await anext(arriving, None)
            if following is None:
                break
            index, piece = following
        if work.usage_in_stream:
            await out.event(msgspec.json.encode(work.reply.end(_usage(work, last))))
        await out.event(DONE)

    async def _events_of_piece(self, reply: Reply, out: Writer, index: int, piece: Piece) -> None:
        write = partial(_events_of, reply, index, piece)
        for event in await _written(len(piece["tokens"]), write):
            await out.event(event)

    @asynccontextmanager
    async def _pieces(self, work: Work, answer: UnreadAnswer) -> AsyncIterator[Pieces]:
        """Submit all choices, and give their pieces as they come; those that have not ended with the context are cancelled."""
        async with AsyncExitStack() as stack:
            streams = []
            for choice in work.choices:
                ticket = Ticket("", self._arrived)
                generated = self._service.generations.generate(choice, ticket, answer, self._trace)
                streams.append(await stack.enter_async_context(generated))
            pieces = _numbered(0, streams[0]) if len(streams) == 1 else _merged(streams)
            yield await stack.enter_async_context(aclosing(pieces))


class Writer:
    """Writes one response, in pieces, as uvicorn takes whatever it is given at once; raises ClientLeftError on an UnreadError.

    Parameters
    ----------
    answer : UnreadAnswer
        Counts what is written.
    """

    def __init__(self, scope: Scope, send: Send, answer: UnreadAnswer) -> None:
        self._abort, self._send, self.answer = scope["state"][ABORT], send, answer

    async def all(self, data: bytes) -> None:
        """Write a whole answer; raises QueueFullError."""
        headers = [(b"content-type", JSON.encode()), (b"content-length", str(len(data)).encode())]
        await self._deliver(data, len(data), {"type": "http.response.start", "status": 200, "headers": headers})

    async def begin(self) -> None:
        """Begin a stream of events."""
        headers = [(name.lower().encode(), value.encode()) for name, value in EVENT_STREAM.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def event(self, data: bytes) -> None:
        """Write an event; raises QueueFullError."""
        await self._deliver(b"data: " + data + b"\n\n", len(data))

    async def error(self, data: bytes) -> None:
        """Write an error as an event, for which there is always room."""
        await self._deliver(b"data: " + data + b"\n\n", 0)

    async def end(self) -> None:
        """End a stream."""
        await self._send({"type": "http.response.body", "body": b""})

    async def _deliver(self, data: bytes, size: int, start: dict[str, Any] | None = None) -> None:
        async def write() -> None:
            if start is not None:
                await self._send(start)
            for first in range(0, len(data), PIECE_BYTES):
                more = start is None or first + PIECE_BYTES < len(data)
                piece = data[first : first + PIECE_BYTES]
                await self._send({"type": "http.response.body", "body": piece, "more_body": more})
                self.answer.progress()

        try:
            await self.answer.deliver(size, write)
        except UnreadError:
            self._abort()
            raise ClientLeftError from None


def _usage(work: Work, last: Sequence[Piece]) -> Json:
    """Count tokens by the last piece of each choice. A token of a prompt was cached if no choice has read it."""
    reused = [piece["reused"] for piece in last]
    cached = sum(min(reused[first : first + work.answers]) for first in range(0, len(reused), work.answers))
    return usage(work.prompt_tokens, sum(piece["count"] for piece in last), cached)


def _events_of(reply: Reply, index: int, piece: Piece) -> list[bytes]:
    return [msgspec.json.encode(event) for event in reply.pieces(index, piece)]


async def _written(tokens: int, write: Callable[[], T]) -> T:
    """Call a function that writes the log probabilities of so many tokens; in a thread, if other answers would wait for it."""
    return write() if tokens <= MANY_TOKENS else await asyncio.to_thread(write)


async def _numbered(index: int, pieces: AsyncIterator[Piece]) -> AsyncGenerator[tuple[int, Piece], None]:
    async for piece in pieces:
        yield index, piece


async def _merged(streams: Sequence[AsyncIterator[Piece]]) -> AsyncGenerator[tuple[int, Piece], None]:
    """Give the pieces of several choices as they come; raises the first error that one of them raises."""
    arrived: asyncio.Queue[tuple[int, Piece] | Exception | None] = asyncio.Queue(
        1
    )  # the others wait where they are counted

    async def pass_on(index: int, pieces: AsyncIterator[Piece]) -> None:
        try:
            async for piece in pieces:
                await arrived.put((index, piece))
        except Exception as error:
            await arrived.put(error)
        else:
            await arrived.put(None)

    tasks = [asyncio.create_task(pass_on(*each)) for each in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
