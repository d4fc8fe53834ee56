"""The OpenAI port: its endpoints, put together (docs/openai.md)."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from kvseek.core.config import EngineConfig
from kvseek.core.manifest import read_manifest
from kvseek.core.request import MAX_SALT
from kvseek.core.session import MAX_SESSION_ID, check_text
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.http.content import BodyReader
from kvseek.server.http.errors import JSON, HttpError
from kvseek.server.http.json_fields import MAX_FIELD_BYTES, shortened
from kvseek.server.http.server import HEADER_SECONDS, HttpServer, tenant_of
from kvseek.server.kserve.inputs import JSON_BYTES_PER_BYTE, JSON_BYTES_PER_ID
from kvseek.server.requests.generations import Generations
from kvseek.server.requests.keys import keys_of
from kvseek.server.requests.translation import max_text_bytes
from kvseek.server.requests.unread import WRITE_SECONDS
from kvseek.server.settings import ServeSettings

from .answer import Completions, Service
from .errors import FieldError, openai_error

HEALTH, MODELS = "/health", "/v1/models"
ENDPOINTS = "/v1/models, /v1/chat/completions, /v1/completions, /v1/sessions/ID, /health and /metrics"
SALT = "cache_salt"
FINGERPRINT_CHARACTERS = 16
Handler = Callable[[Request], Awaitable[Response]]


class OpenAIPort:
    """All parts of the port, put together.

    Parameters
    ----------
    ready, metrics : callable
        Endpoints that the port has in common with others: whether the server is ready, and its metrics.
    open_models : bool
        Whether the list of models asks for no key, as a router has none.
    """

    def __init__(
        self,
        engine_dir: Path,
        config: EngineConfig,
        tokenizer: Tokenizer,
        settings: ServeSettings,
        generations: Generations,
        bodies: BodyReader,
        ready: Handler,
        metrics: Handler,
        header_seconds: float = HEADER_SECONDS,
        write_seconds: float = WRITE_SECONDS,
        open_models: bool = False,
    ) -> None:
        manifest = read_manifest(engine_dir)
        name = settings.served_model_name or manifest.source_model
        fingerprint = f"fp_{manifest.fingerprint[:FINGERPRINT_CHARACTERS]}"
        self._service = Service(generations, bodies, tokenizer, config, name, fingerprint)
        open_paths = (HEALTH, MODELS) if open_models else (HEALTH,)
        self.server = HttpServer(
            [*_routes(self._service), Route(HEALTH, ready), Route("/metrics", metrics)],
            ENDPOINTS,
            settings.most_connections(config),
            openai_error,
            header_seconds=header_seconds,
            write_seconds=write_seconds,
            keys=keys_of(settings),
            is_open=lambda path: path in open_paths,
            cors_origins=settings.cors_origins,
        )

    async def start(self, host: str, port: int, held: bool = False) -> int:
        """Listen, and load the tokenizer; returns the port. Raises ServerError. `held`: see HttpServer."""
        port = await self.server.start(host, port, "--openai_port", held)
        limit = await asyncio.to_thread(body_limit, self._service.config, self._service.tokenizer)
        self._service.bodies.make_room_for(limit)
        self._service.body_limit = limit
        return port


def _routes(service: Service) -> list[BaseRoute]:
    """Make the routes of the endpoints that the port has for itself."""
    started = int(time.time())

    def model_card() -> dict[str, Any]:
        card = {"id": service.model, "object": "model", "created": started, "owned_by": "kvseek"}
        return card | {"max_model_len": service.config.max_seq_len}

    async def models(_: Request) -> Response:
        return _json({"object": "list", "data": [model_card()]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != service.model:
            message = f"model = {shortened(name)}: is not served here; there is {service.model}"
            raise HttpError(404, message, "model_not_found", "model")
        return _json(model_card())

    return [
        Route(MODELS, models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/chat/completions", Completions(service, chat=True), methods=["POST"]),
        Route("/v1/completions", Completions(service, chat=False), methods=["POST"]),
        Route("/v1/sessions/{session_id:path}", partial(_end_session, service), methods=["DELETE"]),
    ]


async def _end_session(service: Service, request: Request) -> Response:
    salt, session_id = _salt(request), request.path_params["session_id"]
    check_text("session_id", session_id, MAX_SESSION_ID)
    ended = await service.generations.end_session(session_id, tenant_of(request).salt(salt))
    if ended is None:  # the same words for sessions of others, so that nobody learns of them
        what = f"session_id = {shortened(session_id)}: there is no such session of this API key and cache_salt"
        message = f"{what}, or it has been forgotten; nothing is left to do"
        raise HttpError(404, message, "session_not_found", "session_id")
    own = {"id": session_id, "object": "session.deleted", "deleted": True}
    return _json(own | dataclasses.asdict(ended))


def _salt(request: Request) -> str | None:
    """Read the only parameter that a query may have here; raises RequestError."""
    given = request.query_params
    if unknown := [name for name in given if name != SALT]:
        name = shortened(unknown[0])
        raise FieldError(name, f"{name}: there is no such parameter; leave it out", "unknown_parameter")
    salt = given.get(SALT)
    if salt is not None:
        check_text(SALT, salt, MAX_SALT)
    return salt


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


def body_limit(config: EngineConfig, tokenizer: Tokenizer) -> int:
    """Return the most bytes of a body: a prompt of max_input_len tokens, escaped or as ids, and the other fields."""
    text = max_text_bytes(config, tokenizer) * JSON_BYTES_PER_BYTE
    return max(text, config.max_input_len * JSON_BYTES_PER_ID) + MAX_FIELD_BYTES
