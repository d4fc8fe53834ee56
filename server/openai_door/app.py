"""The FastAPI application of the OpenAI door: its endpoints, and what holds for all of them (keys, ids, errors)."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvseek.core.errors import KvseekError, UnavailableError
from kvseek.core.request import MAX_SALT
from kvseek.core.session import MAX_SESSION_ID, check_text
from kvseek.server.http_door.fields import shortened
from kvseek.server.http_door.listener import FULL
from kvseek.server.http_door.metrics import CONTENT_TYPE
from kvseek.server.requests.keys import REFUSAL, Keys
from kvseek.server.requests.served_request import MAX_ID_CHARACTERS
from kvseek.server.requests.unread import WRITE_SECONDS

from .answer import ABORT, TENANT, Answer, Service
from .errors import JSON, FieldError, StatusError, error_response
from .request_body import ClientLeftError

HEALTH, MODELS = "/health", "/v1/models"
ENDPOINTS = "/v1/models, /v1/chat/completions, /v1/completions, /v1/sessions/ID, /health and /metrics"
SALT = "cache_salt"
REQUEST_ID = "x-request-id"


def make_app(
    service: Service,
    keys: Keys,
    obstacles: Callable[[], list[str]],
    metrics: Callable[[], Awaitable[bytes]],
    is_full: Callable[[], bool],
    open_models: bool = False,
) -> ASGIApp:
    """Make the application.

    Parameters
    ----------
    obstacles : callable
        Returns the reasons why the server is not ready; empty if it is.
    metrics : callable
        Returns the metrics in Prometheus' text format.
    is_full : callable
        Whether there are more connections than may ask for completions.
    open_models : bool
        Whether the list of models asks for no key, as a router has none.
    """
    # Without the pages that describe the API: they would load scripts of others' servers.
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    started = int(time.time())

    def model_card() -> dict[str, Any]:
        card = {"id": service.model, "object": "model", "created": started, "owned_by": "kvseek"}
        return card | {"max_model_len": service.config.max_seq_len}

    @app.get(MODELS)
    async def models() -> Response:
        return _json({"object": "list", "data": [model_card()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != service.model:
            message = f"model = {shortened(name)}: is not served here; there is {service.model}"
            raise StatusError(404, message, "model_not_found", "model")
        return _json(model_card())

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return Answer(service, request, chat=True)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return Answer(service, request, chat=False)

    @app.delete("/v1/sessions/{session_id:path}")
    async def end_session(request: Request, session_id: str) -> Response:
        salt = _salt(request)
        check_text("session_id", session_id, MAX_SESSION_ID)
        ended = await service.generations.end_session(session_id, request.scope["state"][TENANT].salt(salt))
        if ended is None:  # the same words for sessions of others, so that nobody learns of them
            what = f"session_id = {shortened(session_id)}: there is no such session of this API key and cache_salt"
            message = f"{what}, or it has been forgotten; nothing is left to do"
            raise StatusError(404, message, "session_not_found", "session_id")
        own = {"id": session_id, "object": "session.deleted", "deleted": True}
        return _json(own | dataclasses.asdict(ended))

    @app.get(HEALTH)
    async def health() -> Response:
        if found := obstacles():
            raise UnavailableError("not ready: " + "; ".join(found))
        return Response()

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(await metrics(), headers={"Content-Type": CONTENT_TYPE})

    app.add_exception_handler(HTTPException, _routing_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(KvseekError, _error)
    app.add_exception_handler(Exception, _error)  # what no handler has foreseen; Starlette raises it again afterwards
    return Gate(ErrorsAsJson(app), keys, is_full, (HEALTH, MODELS) if open_models else (HEALTH,))


class ErrorsAsJson:
    """Ends requests whose handling raised an error: with an answer if there is none yet, without one if it is complete."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        begun = complete = False

        async def note(message: Message) -> None:
            nonlocal begun, complete
            begun = True
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, note)
        except Exception as error:
            if complete:
                return
            if begun:
                raise  # half an answer is there: the connection is closed
            await error_response(error)(scope, receive, send)


class Gate:
    """Lets requests through that have a key, while there are connections; answers have the request's id as X-Request-Id."""

    def __init__(
        self, app: ASGIApp, keys: Keys, is_full: Callable[[], bool], open_paths: Collection[str] = (HEALTH,)
    ) -> None:
        self._app, self._keys, self._is_full, self._open_paths = app, keys, is_full, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        fits = 0 < len(given) <= MAX_ID_CHARACTERS and given.isascii() and given.isprintable()
        own = given if fits else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = own
            try:
                async with asyncio.timeout(WRITE_SECONDS):
                    await send(message)
            except TimeoutError:
                scope["state"][ABORT]()
                raise ClientLeftError from None

        app = self._app
        tenant = self._keys.tenant(headers.get("authorization", ""))
        scope.setdefault("state", {})[TENANT] = tenant
        if scope["path"] not in self._open_paths and tenant is None:
            app = error_response(StatusError(401, REFUSAL, "invalid_api_key"))
        elif scope["method"] == "POST" and self._is_full():
            app = error_response(UnavailableError(FULL), close=True)
        await app(scope, receive, send_with_id)


async def _error(_: Request, error: Exception) -> Response:
    return error_response(error)


async def _routing_error(request: Request, error: Exception) -> Response:
    """Answer a path or a method that there is not."""
    assert isinstance(error, HTTPException)
    path, allowed = shortened(request.url.path), (error.headers or {}).get("Allow", "")
    if error.status_code == 405:
        response = error_response(StatusError(405, f"{request.method} {path}: use {allowed}", "method_not_allowed"))
        response.headers["Allow"] = allowed
        return response
    return error_response(StatusError(error.status_code, f"{path} is not found; there are {ENDPOINTS}", "not_found"))


async def _validation_error(_: Request, error: Exception) -> Response:
    """Answer what FastAPI itself finds wrong with status 400; its own answer would be 422, in another form."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"][1:])
    return error_response(FieldError(name, f"{name}: {first['msg']}; correct it"))


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
