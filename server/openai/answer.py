"""One generation over HTTP: reads the body, has the engine generate all choices, and writes the answer, whole or as a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from kvseek.core.config import EngineConfig
from kvseek.core.errors import UnavailableError
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.http.content import BodyReader, Writer, trace_of
from kvseek.server.http.errors import HttpError
from kvseek.server.http.json_fields import shortened
from kvseek.server.http.server import tenant_of
from kvseek.server.requests.generations import Call, Generations, Submission
from kvseek.server.requests.keys import Tenant
from kvseek.server.requests.unread import UnreadAnswer

from .bodies import CHAT_FORMAT, COMPLETION_FORMAT, ChatBody, CompletionBody
from .choices import make_choices
from .errors import FieldError, openai_error
from .replies import ChatReply, CompletionReply, Json, Piece, Reply, usage

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
    choices : sequence of Submission
        Those of the first prompt first; each prompt has `answers` of them.
    prompt_tokens : int
        Of all prompts, each of them counted once.
    """

    choices: Sequence[Submission]
    answers: int
    prompt_tokens: int
    reply: Reply
    streaming: bool
    usage_in_stream: bool


class Completions:
    """One of the two endpoints, as an ASGI application."""

    def __init__(self, service: Service, chat: bool) -> None:
        self._service, self._chat = service, chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read a request and write its answer."""
        request = Request(scope, receive)
        call = Call(time.monotonic(), trace_of(request))
        work = await self._read(request, call)
        with self._service.generations.unread.answer() as answer:
            out = Writer(scope, send, answer)
            async with self._pieces(work, call, answer) as arriving:
                if work.streaming:
                    await out.stream(_events(work, arriving), openai_error)
                else:
                    await out.whole(await _whole(work, arriving))

    async def _read(self, request: Request, call: Call) -> Work:
        service = self._service
        if service.body_limit is None:
            raise UnavailableError("the server is starting; send the request again in some seconds")
        with service.generations.counting_refusals():
            async with service.bodies.read(request, service.body_limit) as data:
                return await service.generations.make(partial(self._make, data, call, tenant_of(request)))

    def _make(self, data: bytes | bytearray, call: Call, tenant: Tenant) -> Work:
        """Make the requests that a body asks for; runs in a worker thread."""
        service = self._service
        body: ChatBody | CompletionBody = CHAT_FORMAT.read(data) if self._chat else COMPLETION_FORMAT.read(data)
        if body.model is None:
            raise FieldError("model", f"model is missing: must be {service.model}; add it")
        if body.model != service.model:
            message = f"model = {shortened(body.model)}: is not served here; there is {service.model}"
            raise HttpError(404, message, "model_not_found", "model")
        choices, prompt_tokens = make_choices(body, body, tenant, service.tokenizer, service.config)
        make: Callable[..., Reply] = ChatReply if self._chat else CompletionReply
        with_usage = body.usage_in_stream
        reply = make(service.model, service.fingerprint, service.tokenizer, body.top() is not None, with_usage)
        ready = [service.generations.submission(choice, call) for choice in choices]
        return Work(ready, body.choices, prompt_tokens, reply, bool(body.stream), with_usage)

    @asynccontextmanager
    async def _pieces(self, work: Work, call: Call, answer: UnreadAnswer) -> AsyncIterator[Pieces]:
        """Submit all choices, and give their pieces as they come; those that have not ended with the context are cancelled."""
        async with AsyncExitStack() as stack:
            streams = [
                await stack.enter_async_context(self._service.generations.generate(choice, call, answer))
                for choice in work.choices
            ]
            pieces = _numbered(0, streams[0]) if len(streams) == 1 else _merged(streams)
            yield await stack.enter_async_context(aclosing(pieces))


async def _whole(work: Work, arriving: Pieces) -> bytes:
    """Write the answer when all choices have ended."""
    pieces: list[Piece] = [{}] * len(work.choices)
    async for index, piece in arriving:
        pieces[index] = piece
    counts = _usage(work, pieces)
    tokens = sum(len(piece["tokens"]) for piece in pieces)
    return await _written(tokens, lambda: msgspec.json.encode(work.reply.whole(pieces, counts)))


async def _events(work: Work, arriving: Pieces) -> AsyncIterator[bytes]:
    """Write the events of a stream, of which the first needs the first piece."""
    last: list[Piece] = [{}] * len(work.choices)
    begun = False
    async for index, piece in arriving:
        if not begun:
            begun = True
            for event in work.reply.begin(len(work.choices)):
                yield msgspec.json.encode(event)
        last[index] = piece | {"tokens": ()}
        for data in await _written(len(piece["tokens"]), partial(_events_of, work.reply, index, piece)):
            yield data
    if work.usage_in_stream:
        yield msgspec.json.encode(work.reply.end(_usage(work, last)))
    yield DONE


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
    # One at a time: the others wait where they are counted.
    arrived: asyncio.Queue[tuple[int, Piece] | Exception | None] = asyncio.Queue(1)

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
