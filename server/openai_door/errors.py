"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}, and the status of each."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvseek.core.errors import ErrorCode, KvseekError, RequestError, code_of
from kvseek.server.http_door.errors import CLOSING, RETRY_AFTER_SECONDS, RETRY_LATER, HttpError, describe
from kvseek.server.http_door.listener import LINGER_SECONDS
from kvseek.server.requests.generations import CodedError

CODES = {
    ErrorCode.QUEUE_FULL: "queue_full",
    ErrorCode.UNAVAILABLE: "engine_unavailable",
    ErrorCode.TIMEOUT: "timeout",
    ErrorCode.INTERNAL: "internal_error",
}
# The engine names its inputs as TensorRT-LLM does; here they have OpenAI's names.
PARAMS = {
    "input_ids": "prompt",
    "input_lengths": "prompt",
    "text_input": "prompt",
    "end_id": "stop_token_ids",
    "stop_words_list": "stop",
    "stop_words": "stop",
    "bad_words_list": "bad_words",
    "guided_decoding_guide": "response_format",
}
SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")
LIMITS = ("max_tokens", "min_tokens", "bad_words", "logit_bias", "logprobs", "stop", "priority", "timeout")
REUSE = ("cache_salt", "session_id", "retention_priority", "retention_seconds")
FIELDS = frozenset((*SAMPLING, *LIMITS, *REUSE, "messages", "prompt"))  # that engine and door know by the same name
LEADING_NAME = re.compile(r"([a-z]\w*)(?=[ :\[.,])")
JSON = "application/json"


class FieldError(RequestError):
    """A field of a request's body that cannot be served as it stands.

    Parameters
    ----------
    param : str
        Name of the field at fault; empty for the body as a whole.
    code : str or None
        OpenAI's code of the error, for clients that look for one.
    """

    def __init__(self, param: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class StatusError(HttpError):
    """An error by which the door refuses a request, with its HTTP status and OpenAI's code."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(status, message)
        self.openai_code, self.param = code, param


def error_json(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the JSON of an error; what is no KvseekError is logged and not shown."""
    status, message = describe(error)
    param: str | None = None
    code: str | None = None
    if isinstance(error, StatusError):
        param, code = error.param, error.openai_code
    elif isinstance(error, FieldError):
        param, code = error.param or None, error.code
    elif not isinstance(error, HttpError):
        kind = _kind(error)
        code = CODES.get(kind)
        if kind is ErrorCode.INVALID:
            message, param = renamed(message)
    return status, {"error": {"message": message, "type": error_type(status), "param": param, "code": code}}


def error_type(status: int) -> str:
    """Return OpenAI's type of an error with this HTTP status."""
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def renamed(message: str) -> tuple[str, str | None]:
    """Replace the engine's name of a field, with which a message begins, by OpenAI's; returns the message and the name."""
    found = LEADING_NAME.match(message)
    if found is None or (found[1] not in PARAMS and found[1] not in FIELDS):
        return message, None  # the message begins with something else
    name = PARAMS.get(found[1], found[1])
    return name + message[found.end() :], name


class Refusal(Response):
    """A response after which the connection is closed, as the rest of the request's body may still come.

    A client that is still sending when its connection is closed gets a reset and never reads the response. So the rest is read,
    and dropped, for up to LINGER_SECONDS.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and read what the client still sends."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b""})


def error_response(error: Exception, close: bool = False) -> Response:
    """Make the response for an error; `close` closes the connection after it, as some errors do in any case."""
    status, body = error_json(error)
    headers = {}
    if status in RETRY_LATER:
        headers["Retry-After"] = RETRY_AFTER_SECONDS
    close = close or status in CLOSING
    if close:
        headers["Connection"] = "close"
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return (Refusal if close else Response)(msgspec.json.encode(body), status, headers, JSON)


def _kind(error: Exception) -> ErrorCode:
    if isinstance(error, CodedError):
        return error.code
    return code_of(error) if isinstance(error, KvseekError) else ErrorCode.INTERNAL
