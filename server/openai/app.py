"""The OpenAI port (docs/openai.md): its endpoints.

A generation reads the body, has the engine generate all choices, and writes the answer, whole or as a stream. The page on which
people ask about a document and see what each step read of it is as good as public: its files, in the folder `ui/`, have no data,
and it asks the port's own endpoints.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Send

from kvseek.core.config import EngineConfig
from kvseek.core.errors import RequestError, shortened
from kvseek.core.manifest import read_manifest
from kvseek.core.request import MAX_SALT, MAX_SESSION_ID, check_text
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.http.content import BodyReader, Writer, largest_body, trace_of
from kvseek.server.http.errors import JSON, HttpError
from kvseek.server.http.server import Endpoint, HttpServer, tenant_of
from kvseek.server.requests.generations import Call, Generations, Submission
from kvseek.server.requests.keys import Tenant
from kvseek.server.settings import ServeSettings

from . import anthropic
from .answers import AnswerForm, AnswerForms
from .bodies import CHAT_FORMAT, COMPLETION_FORMAT, DETOKENIZE_FORMAT, TOKENIZE_FORMAT
from .choices import Json, Piece, Reply, make_choices, token_text, usage
from .fields import FieldError, openai_error
from .kept_responses import KeptResponses
from .responses import Responses
from .translation import Answer, Asked

HEALTH, MODELS = "/health", "/v1/models"
ENDPOINTS = (
    "/v1/models, /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/sessions/ID, /tokenize, /detokenize, "
    "/health and /metrics"
)
SALT = "cache_salt"
FINGERPRINT_CHARACTERS = 16
MANY_TOKENS = 512  # whose log probabilities take some 2 ms to write
MANY_BYTES = 1 << 17  # of selected rows, of which the same holds
FOLDER = Path(__file__).parent / "ui"
PATHS = {
    "/": ("index.html", "text/html"),
    "/ui/page.js": ("page.js", "text/javascript"),
    "/ui/page.css": ("page.css", "text/css"),
}
HEADERS = {
    # Of other servers the page reads what the user names as the other server, and nothing else.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self' "
    "http: https:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
Handler = Callable[[Request], Awaitable[Response]]
Pieces = AsyncIterator[tuple[int, Piece]]  # a choice's number and its next piece
Read = Callable[[bytes | bytearray, Tenant], Asked]  # makes a request of a body


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
    reply: Answer
    streaming: bool


class OpenAIRoutes:
    """The endpoints of the port."""

    def __init__(
        self,
        engine_dir: Path,
        config: EngineConfig,
        tokenizer: Tokenizer,
        settings: ServeSettings,
        generations: Generations,
        bodies: BodyReader,
    ) -> None:
        manifest = read_manifest(engine_dir)
        self._generations, self._bodies, self._tokenizer, self._config = generations, bodies, tokenizer, config
        self._settings = settings
        self._forms = AnswerForms(tokenizer, settings.tool_parser, settings.reasoning_parser)
        self._model = settings.served_model_name or manifest.source_model
        self._fingerprint = f"fp_{manifest.fingerprint[:FINGERPRINT_CHARACTERS]}"  # changes when answers may change
        self._started = int(time.time())
        self._kept = KeptResponses()

    def server(self, ready: Handler, metrics: Handler, open_models: bool = False) -> HttpServer:
        """Make the port.

        Parameters
        ----------
        ready, metrics : callable
            Endpoints that the port has in common with others: whether the server is ready, and its metrics.
        open_models : bool
            Whether the list of models asks for no key, as a router has none.
        """
        settings = self._settings
        page = page_routes() if settings.ui else []
        open_paths = {HEALTH, *((MODELS,) if open_models else ()), *(PATHS if settings.ui else ())}
        return HttpServer(
            [*self._routes(), Route(HEALTH, ready), Route("/metrics", metrics), *page],
            ENDPOINTS,
            settings.most_connections(self._config),
            openai_error,
            keys=settings.keys,
            is_open=lambda path: path in open_paths,
            cors_origins=settings.cors_origins,
            forms={anthropic.PATH: anthropic.anthropic_error},
        )

    def _routes(self) -> list[BaseRoute]:
        """Make the routes of the endpoints that the port has for itself."""
        reads: tuple[Read, ...] = (
            partial(self._asked, chat=True),
            partial(self._asked, chat=False),
            Responses(self._tokenizer, self._kept).read,
            anthropic.read_messages,
        )
        chat, completion, responses, messages = (Endpoint(partial(self._complete, read=read)) for read in reads)
        return [
            Route(MODELS, self._models),
            Route("/v1/models/{name:path}", self._one_model),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completion, methods=["POST"]),
            Route("/v1/responses", responses, methods=["POST"]),
            Route("/v1/responses/{response_id}", self._response, methods=["GET", "DELETE"]),
            Route(anthropic.PATH, messages, methods=["POST"]),
            Route(f"{anthropic.PATH}/count_tokens", partial(self._convert, self._count), methods=["POST"]),
            Route("/tokenize", partial(self._convert, self._tokenize), methods=["POST"]),
            Route("/detokenize", partial(self._convert, self._detokenize), methods=["POST"]),
            Route("/v1/sessions/{session_id:path}", self._end_session, methods=["DELETE"]),
        ]

    def _model_card(self) -> dict[str, Any]:
        card = {"id": self._model, "object": "model", "created": self._started, "owned_by": "kvseek"}
        return card | {"max_model_len": self._config.max_seq_len}

    async def _models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [self._model_card()]})

    async def _one_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return _json(self._model_card())

    def _check_model(self, name: str) -> None:
        if name != self._model:
            message = f"model = {shortened(name)}: is not served here; there is {self._model}"
            raise HttpError(404, message, "model_not_found", "model")

    async def _end_session(self, request: Request) -> Response:
        salt, session_id = _salt(request), request.path_params["session_id"]
        check_text("session_id", session_id, MAX_SESSION_ID)
        ended = await self._generations.end_session(session_id, tenant_of(request).salt(salt))
        if ended is None:  # the same words for sessions of others, so that nobody learns of them
            what = f"session_id = {shortened(session_id)}: there is no such session of this API key and cache_salt"
            message = f"{what}, or it has been forgotten; nothing is left to do"
            raise HttpError(404, message, "session_not_found", "session_id")
        own = {"id": session_id, "object": "session.deleted", "deleted": True}
        return _json(own | dataclasses.asdict(ended))

    async def _response(self, request: Request) -> Response:
        """Show a response that is kept, or forget it."""
        _check_query(request)
        response_id, tenant = request.path_params["response_id"], tenant_of(request)
        if request.method != "DELETE":
            return Response(self._kept.get(response_id, tenant), media_type=JSON)
        self._kept.delete(response_id, tenant)
        return _json({"id": response_id, "object": "response", "deleted": True})

    async def _convert(self, convert: Callable[[bytes | bytearray], Json], request: Request) -> Response:
        """Answer by what one function makes of the body, in a worker thread."""
        async with self._bodies.read(request, largest_body(self._config, self._tokenizer)) as data:
            return await self._generations.make(lambda: _json(convert(data)))

    def _tokenize(self, data: bytes | bytearray) -> Json:
        body, tokenizer = TOKENIZE_FORMAT.read(data), self._tokenizer
        self._check_model(body.model or self._model)
        ids = body.ids(tokenizer, self._config, self._forms)
        texts = [token_text(token, tokenizer) for token in ids] if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": self._config.max_seq_len, "tokens": ids, "token_strs": texts}

    def _count(self, data: bytes | bytearray) -> Json:
        asked = anthropic.read_messages(data, Tenant(), answers=False)
        self._check_model(asked.body.model or self._model)
        try:
            return {"input_tokens": len(asked.body.prompts(self._tokenizer, self._config, self._forms)[0].ids)}
        except RequestError as error:
            raise asked.error(error) from None

    def _detokenize(self, data: bytes | bytearray) -> Json:
        body = DETOKENIZE_FORMAT.read(data)
        self._check_model(body.model or self._model)
        return {"prompt": body.text(self._tokenizer, self._config)}

    async def _complete(self, request: Request, send: Send, read: Read) -> None:
        """Read a request and write its answer."""
        call = Call(time.monotonic(), trace_of(request))
        work = await self._read(request, call, read)
        with ExitStack() as stack:
            stack.callback(work.reply.release)
            answer = stack.enter_context(self._generations.unread.answer())
            out = Writer(request.scope, send, answer)
            async with self._generations.generate(work.choices, call, answer) as arriving:
                if work.streaming:
                    await out.stream(_events(work, arriving), work.reply.failed, work.reply.frame)
                else:
                    await out.whole(await _whole(work, arriving))

    async def _read(self, request: Request, call: Call, read: Read) -> Work:
        limit = largest_body(self._config, self._tokenizer)
        with self._generations.counting_refusals():
            async with self._bodies.read(request, limit) as data:
                return await self._generations.make(partial(self._make, data, call, tenant_of(request), read))

    def _asked(self, data: bytes | bytearray, _: Tenant, chat: bool) -> Asked:
        """Read the body of a chat, or of a completion."""
        body = CHAT_FORMAT.read(data) if chat else COMPLETION_FORMAT.read(data)

        def answer(form: AnswerForm, _: int) -> Reply:
            logprobs = body.top() is not None
            return Reply(chat, self._model, self._fingerprint, self._tokenizer, logprobs, body.usage_in_stream, form)

        return Asked(body, answer)

    def _make(self, data: bytes | bytearray, call: Call, tenant: Tenant, read: Read) -> Work:
        """Make the requests that a body asks for; runs in a worker thread."""
        asked = read(data, tenant)
        body = asked.body
        if body.model is None:
            raise FieldError("model", f"model is missing: must be {self._model}; add it")
        self._check_model(body.model)
        try:
            choices, prompt_tokens = make_choices(body, tenant, self._tokenizer, self._config, self._forms)
        except RequestError as error:
            raise asked.error(error) from None
        for choice in choices:
            choice.names = {name: asked.places.get(own, own) for name, own in choice.names.items()}
        reply = asked.answer(choices[0].form, prompt_tokens)
        choices[0].held_bytes += reply.held_bytes
        ready = [self._generations.submission(choice, call) for choice in choices]
        return Work(ready, body.choices, prompt_tokens, reply, bool(body.stream))


def _check_query(request: Request, *known: str) -> None:
    """Raise FieldError if a query has other parameters."""
    if unknown := [name for name in request.query_params if name not in known]:
        name = shortened(unknown[0])
        raise FieldError(name, f"{name}: there is no such parameter; leave it out", "unknown_parameter")


def _salt(request: Request) -> str | None:
    """Read the only parameter that a query may have here; raises RequestError."""
    _check_query(request, SALT)
    salt = request.query_params.get(SALT)
    if salt is not None:
        check_text(SALT, salt, MAX_SALT)
    return salt


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


async def _whole(work: Work, arriving: Pieces) -> bytes:
    """Write the answer when all choices have ended."""
    pieces: list[Piece] = [{}] * len(work.choices)
    async for index, piece in arriving:
        pieces[index] = piece
    counts = _usage(work, pieces)
    write = partial(work.reply.whole, pieces, counts)
    return write() if _is_small(*pieces) else await asyncio.to_thread(write)


def _is_small(*pieces: Piece) -> bool:
    """Whether an answer of these pieces is written in less time than a thread takes to begin."""
    tokens = sum(len(piece["tokens"]) + (len(piece["prompt"].offsets) if piece["prompt"] else 0) for piece in pieces)
    return tokens <= MANY_TOKENS and sum(each.size for piece in pieces for each in piece["rows"] if each) <= MANY_BYTES


async def _events(work: Work, arriving: Pieces) -> AsyncIterator[bytes]:
    """Write the events of a stream, of which the first needs the first piece."""
    last: list[Piece] = [{}] * len(work.choices)
    begun = False
    async for index, piece in arriving:
        if not begun:
            begun = True
            for event in work.reply.begin(len(work.choices)):
                yield event
        write, small = work.reply.pieces, not (piece["tokens"] or piece["rows"]) or _is_small(piece)
        for event in write(index, piece) if small else await asyncio.to_thread(write, index, piece):
            yield event
        piece["tokens"], piece["rows"], piece["prompt"], piece["parts"] = (), (), None, ()  # which take memory
        last[index] = piece
    for event in work.reply.end(_usage(work, last)):
        yield event


def _usage(work: Work, last: Sequence[Piece]) -> Json:
    """Count tokens by the last piece of each choice. A token of a prompt was cached if no choice has read it."""
    reused = [piece["reused"] for piece in last]
    cached = sum(min(reused[first : first + work.answers]) for first in range(0, len(reused), work.answers))
    thought = [piece["reasoning"] for piece in last if piece["reasoning"] is not None]
    return usage(work.prompt_tokens, sum(piece["count"] for piece in last), cached, sum(thought) if thought else None)


def page_routes() -> list[BaseRoute]:
    """Make the routes of the page's files."""
    return [_route(path, (FOLDER / name).read_bytes(), kind) for path, (name, kind) in PATHS.items()]


def _route(path: str, data: bytes, kind: str) -> Route:
    async def answer(_: Request) -> Response:
        return Response(data, media_type=kind, headers=HEADERS)

    return Route(path, answer)
