"""The endpoints of Triton's generate extension, for all models."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from aiohttp import web

from kvseek.core.errors import RequestError, UnavailableError
from kvseek.server.requests.generations import Generations, Ticket
from kvseek.server.requests.served_request import SEVERAL, Chunk, RequestFactory
from kvseek.server.requests.translation import scalar
from kvseek.server.requests.unread import UnreadAnswer, UnreadError

from .body import BodyReader
from .errors import HttpError, describe
from .fields import shortened
from .generate_json import MODEL_VERSION, GenerateBody, ModelSchema, chunk_to_json, error_to_json
from .listener import tenant_of

JSON = "application/json"
PIECE_BYTES = 64 << 10  # of an answer that are written at a time
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
EVENT_STREAM = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold events back until it has some kilobytes
}
NO_STOP = (
    "stop = true: over HTTP needs an API key, so that a client ends no other's request, and this server has none "
    "(kvseek serve --api_key_file); close the connection of the request that is to end"
)


class GenerateRoutes:
    """Handlers of /generate and /generate_stream.

    Parameters
    ----------
    limits : mapping
        Most bytes of a request's body, for each model. It may be filled in later; requests are refused until then.
    """

    def __init__(
        self,
        generations: Generations,
        factory: RequestFactory,
        schemas: Mapping[str, ModelSchema],
        bodies: BodyReader,
        limits: Mapping[str, int],
    ) -> None:
        self._generations, self._factory, self._schemas = generations, factory, schemas
        self._bodies, self._limits = bodies, limits

    def routes(self) -> list[web.RouteDef]:
        """Make the routes of the handlers."""
        model = "/v2/models/{model}"
        return [
            web.post(f"{start}/{name}", handler)
            for start in (model, f"{model}/versions/{{version}}")
            for name, handler in (("generate", self.generate), ("generate_stream", self.generate_stream))
        ]

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer with one response, when the request has ended."""
        model, last = self._model(request), Chunk()
        async with self._answer(request, model, streams=False) as (request_id, chunks, answer):
            async for chunk in chunks:
                last = chunk
            body, last = chunk_to_json(model, request_id, last), Chunk()
            response = web.StreamResponse(headers={"Content-Type": JSON, "Content-Length": str(len(body))})
            await _deliver(request, response, answer, body, len(body))
        return response

    async def generate_stream(self, request: web.Request) -> web.StreamResponse:
        """Answer with server-sent events, one a chunk. An error before the first gives a status, a later one the last event."""
        model, response = self._model(request), web.StreamResponse(headers=EVENT_STREAM)
        async with self._answer(request, model, streams=True) as (request_id, chunks, answer):
            chunk = await anext(chunks, None)  # until here, an error can still choose the response's status
            await response.prepare(request)

            try:
                while chunk is not None:
                    event = _event(chunk_to_json(model, request_id, chunk))
                    await _deliver(request, response, answer, event, len(event))
                    event, chunk = b"", await anext(chunks, None)
            except ConnectionError:
                raise  # the client has left
            except Exception as error:
                await _deliver(request, response, answer, _event(error_to_json(describe(error)[1])), 0)
        return response

    def _model(self, request: web.Request) -> str:
        model, version = request.match_info["model"], request.match_info.get("version", MODEL_VERSION)
        if model not in self._schemas:
            known = ", ".join(self._schemas)
            raise HttpError(404, f"model {shortened(model)} is not found; there are {known}")
        model = self._schemas[model].model
        if version != MODEL_VERSION:
            raise HttpError(404, f"{model} has no version {shortened(version)}: must be {MODEL_VERSION}; leave it out")
        return model

    @asynccontextmanager
    async def _answer(
        self, request: web.Request, model: str, streams: bool
    ) -> AsyncIterator[tuple[str, AsyncIterator[Chunk], UnreadAnswer]]:
        """Give the client's id of its request, and the chunks of the answer; a request that stops another is done here."""
        if model not in self._limits:
            raise UnavailableError("the server is starting; send the request again in some seconds")
        arrived, tenant = time.monotonic(), tenant_of(request)
        async with AsyncExitStack() as stack:
            answer = stack.enter_context(self._generations.unread.answer())
            with self._generations.counting_refusals():
                async with self._bodies.read(request, self._limits[model]) as data:
                    body = await self._generations.read(lambda: self._parse(model, data, streams))
                    ticket, served = Ticket(body.request_id, arrived, tenant.owner), None
                    if scalar(body.tensors, "stop", False):
                        if (
                            not tenant.owner
                        ):  # anybody could end anybody's request: here each has a connection of its own
                            raise RequestError(NO_STOP)
                        self._generations.stop(body.request_id, tenant.owner)
                    else:
                        tokenises = self._schemas[model].served.takes_text
                        made = self._generations.made(
                            ticket, lambda: self._factory.make_one(model, body.tensors), tokenises
                        )
                        served = await stack.enter_async_context(made)
                        salt = tenant.salt(served.request.cache_salt)
                        served.request = replace(served.request, cache_salt=salt)
            chunks = _nothing()
            if served is not None:
                generated = self._generations.generate(served, ticket, answer, _trace(request))
                chunks = await stack.enter_async_context(generated)
            yield body.request_id, chunks, answer

    def _parse(self, model: str, data: bytes | bytearray, streams: bool) -> GenerateBody:
        """Parse a body; runs in a worker thread."""
        body = self._schemas[model].read(data)
        for name in () if streams or scalar(body.tensors, "stop", False) else SEVERAL:
            if scalar(body.tensors, name, False):
                raise RequestError(
                    f"{name} = true: must be false with generate; use generate_stream for several responses"
                )
        return body


async def _nothing() -> AsyncIterator[Chunk]:
    return
    yield


async def _deliver(
    request: web.Request, response: web.StreamResponse, answer: UnreadAnswer, data: bytes, size: int
) -> None:
    """Write a part of an answer, which counts as so many bytes; see UnreadAnswer.deliver. Who does not read is disconnected."""

    async def write() -> None:
        await response.prepare(request)
        for first in range(0, len(data), PIECE_BYTES):  # the connection would copy all that it is given
            await response.write(data[first : first + PIECE_BYTES])
            answer.progress()

    try:
        await answer.deliver(size, write)
    except UnreadError:
        if request.transport is not None:
            request.transport.abort()
        raise


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _trace(request: web.Request) -> str:
    """Return the client's W3C traceparent; empty if there is none or it is malformed."""
    value = request.headers.get("traceparent", "")
    return value if TRACEPARENT.fullmatch(value) else ""
