"""The HTTP port of Triton's clients: its generate extension for all models, and refusals of what this server does not serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from kvseek.core.errors import RequestError, shortened
from kvseek.server.http.content import BodyReader, Writer, body_limit, trace_of
from kvseek.server.http.errors import HttpError, kserve_error
from kvseek.server.http.health import MODEL_VERSION
from kvseek.server.http.server import Endpoint, tenant_of
from kvseek.server.requests.generations import Call, Generations, Submission
from kvseek.server.requests.keys import Tenant
from kvseek.server.requests.models import LOGITS, SEVERAL, Chunk, Logits, RequestFactory
from kvseek.server.requests.translation import scalar
from kvseek.server.requests.unread import UnreadAnswer

from .inputs import ModelSchema

ADMINISTRATION = "is closed: it would let clients change the server; use the flags of kvseek serve and restart it"
CLOSED = {  # paths of Triton's HTTP endpoint that are closed on purpose (docs/security.md)
    "/v2/repository": ADMINISTRATION,
    "/v2/systemsharedmemory": "is closed: it would give clients this machine's memory; send tensors in requests",
    "/v2/cudasharedmemory": "is closed: it would give clients the GPU's memory; send tensors in requests",
    "/v2/trace": ADMINISTRATION,
    "/v2/logging": ADMINISTRATION,
}
LOGITS_AT_A_TIME = 1 << 12  # that are written to JSON, in about a millisecond
ENDPOINTS = "/v2/health, /v2/models/MODEL, /v2/models/MODEL/generate and generate_stream"
NO_STOP = (
    "stop = true: over HTTP needs an API key, so that a client ends no other's request, and this server has none "
    "(kvseek serve --api_key_file); close the connection of the request that is to end"
)


class GenerateRoutes:
    """Endpoints /generate and /generate_stream."""

    def __init__(
        self,
        generations: Generations,
        factory: RequestFactory,
        schemas: Mapping[str, ModelSchema],
        bodies: BodyReader,
    ) -> None:
        self._generations, self._factory, self._schemas, self._bodies = generations, factory, schemas, bodies
        self._turn = asyncio.Lock()  # of answers whose logits are written

    def routes(self) -> list[BaseRoute]:
        """Make the routes."""
        found: list[BaseRoute] = []
        for start in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            found.append(Route(f"{start}/generate", Endpoint(partial(self.answer, streams=False)), methods=["POST"]))
            found.append(
                Route(f"{start}/generate_stream", Endpoint(partial(self.answer, streams=True)), methods=["POST"])
            )
            found.append(Route(f"{start}/infer", infer, methods=["POST"]))
        return found

    async def answer(self, request: Request, send: Send, streams: bool) -> None:
        """Read a request and write its answer."""
        model = self._model(request)
        tenant, served = tenant_of(request), self._schemas[model].served
        limit = body_limit(served.takes_text, self._factory.config, self._factory.tokenizer)
        call = Call(time.monotonic(), trace_of(request), tenant.owner)
        with self._generations.stoppable(call), self._generations.unread.answer() as answer:
            with self._generations.counting_refusals():
                async with self._bodies.read(request, limit) as data:
                    read = partial(self._read, model, data, streams, call, tenant)
                    made = await self._generations.make(read, served.takes_text)
                    del read, data  # the body
            out, write = Writer(request.scope, send, answer), partial(self._to_json, model, call.request_id, answer)
            if made is None:
                self._generations.stop(call.request_id, call.owner)
                await (out.empty_stream() if streams else out.whole(await write({})))
            else:
                async with self._generations.generate([made], call, answer) as chunks:
                    if streams:
                        await out.stream((await write(chunk) async for _, chunk in chunks), kserve_error)
                    else:
                        last = Chunk()
                        async for _, chunk in chunks:
                            last = chunk
                        await out.whole(await write(last))

    def _model(self, request: Request) -> str:
        model, version = request.path_params["model"], request.path_params.get("version", MODEL_VERSION)
        if model not in self._schemas:
            known = ", ".join(self._schemas)
            raise HttpError(404, f"model {shortened(model)} is not found; there are {known}")
        model = self._schemas[model].model
        if version != MODEL_VERSION:
            raise HttpError(404, f"{model} has no version {shortened(version)}: must be {MODEL_VERSION}; leave it out")
        return str(model)

    async def _to_json(self, model: str, request_id: str, answer: UnreadAnswer, chunk: Chunk) -> bytes:
        """Write a chunk. The JSON of logits, which are large, counts while it grows, before it counts as being written."""
        if chunk.keys().isdisjoint(LOGITS):
            return chunk_to_json(model, request_id, chunk)
        counted = 0

        def count(size: int) -> None:
            nonlocal counted
            counted += size
            answer.add(size)
            answer.check()

        try:
            found = {name: await logits_to_json(chunk[name], self._turn, count) for name in LOGITS if name in chunk}
            return chunk_to_json(model, request_id, chunk | found)
        finally:
            answer.remove(counted)

    def _read(
        self, model: str, data: bytes | bytearray, streams: bool, call: Call, tenant: Tenant
    ) -> Submission | None:
        """Make the request that a body asks for, None for one that stops others; runs in a worker thread."""
        body = self._schemas[model].read(data)
        call.request_id = body.request_id
        if scalar(body.inputs, "stop", False):
            if not tenant.owner:  # anybody could end anybody's request: here each has a connection of its own
                raise RequestError(NO_STOP)
            return None
        for name in () if streams else SEVERAL:
            if scalar(body.inputs, name, False):
                raise RequestError(
                    f"{name} = true: must be false with generate; use generate_stream for several responses"
                )
        served = self._factory.make_one(model, body.inputs)
        served.request = replace(served.request, cache_salt=tenant.salt(served.request.cache_salt))
        return self._generations.submission(served, call)


async def infer(_: Request) -> Response:
    """Refuse `infer`, which Triton's HTTP endpoint cannot do either, because the models are decoupled."""
    raise HttpError(
        400, "infer: the models send many responses; use generate or generate_stream, or gRPC ModelStreamInfer"
    )


async def unknown(scope: Scope, _: Receive, __: Send) -> None:
    """Refuse a path with 403 if it is closed on purpose, with 404 if it does not exist."""
    path: str = scope["path"]
    if path.endswith("/trace/setting"):
        raise HttpError(403, f"{shortened(path)} {ADMINISTRATION}")
    for prefix, reason in CLOSED.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            raise HttpError(403, f"{prefix} {reason}")
    raise HTTPException(404)


async def logits_to_json(logits: Logits, turn: asyncio.Lock, count: Callable[[int], None]) -> msgspec.Raw:
    """Write logits as Triton writes a tensor: one flat list. In pieces, between which others have their turn.

    A thread would not help: writing a piece holds Python's lock from its first number to its last.

    Parameters
    ----------
    turn : asyncio.Lock
        Is held for a piece and a turn of the event loop, so that all answers together write one piece a turn.
    count : callable
        Called with the bytes of each piece; what it raises ends the writing.
    """
    values, written = memoryview(logits.data).cast("f"), bytearray(b"[")
    for first in range(0, len(values), LOGITS_AT_A_TIME):
        before = len(written)
        async with turn:
            written += msgspec.json.encode(values[first : first + LOGITS_AT_A_TIME].tolist())[1:-1] + b","
            await asyncio.sleep(0)
        count(len(written) - before)
    written[max(1, len(written) - 1) :] = b"]"
    return msgspec.Raw(written)


def chunk_to_json(model: str, request_id: str, chunk: Chunk) -> bytes:
    """Write an answer or a part of one as JSON; a list of one value becomes that value, as in Triton.

    In the place of logits the chunk has what `logits_to_json` has made of them.
    """
    own: Chunk = {"model_name": model, "model_version": MODEL_VERSION}
    if request_id:
        own["id"] = request_id
    return msgspec.json.encode(own | {name: _plain(value) for name, value in chunk.items()})


def _plain(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value
