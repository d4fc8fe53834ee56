"""Errors of the HTTP ports: the status of each, and the two forms in which clients get them, KServe's and OpenAI's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvseek.core.errors import CodedError, ErrorCode, KvseekError, code_of
from kvseek.server.errors import HTTP_STATUS, INTERNAL

JSON = "application/json"
RETRY_AFTER_SECONDS = "1"
RETRY_LATER = (429, 503)
CLOSING = (401, 408, 413, 415)  # the rest of a body may still come after these, so the connection cannot be used again
LINGER_SECONDS = 3.0  # time for which a refused client's data is still read, so that the client reads the refusal
logger = logging.getLogger(__name__)
ErrorForm = Callable[[Exception], tuple[int, bytes]]  # writes an error: its status and its JSON


class ClientLeftError(ConnectionError):
    """The client has closed its connection, so nobody waits for an answer."""


class HttpError(CodedError):
    """An error by which a port itself refuses a request, with the HTTP status for its reason.

    Parameters
    ----------
    openai_code, param : str, optional
        OpenAI's code of the error and the field at fault, which only OpenAI's clients get.
    """

    def __init__(self, status: int, message: str, openai_code: str | None = None, param: str | None = None) -> None:
        super().__init__(ErrorCode.UNAVAILABLE if status == 503 else ErrorCode.INVALID, message)
        self.status, self.openai_code, self.param = status, openai_code, param


def describe(error: Exception) -> tuple[int, str]:
    """Return status and message of an error for a client; unforeseen errors are logged, and their text is kept from clients."""
    if isinstance(error, HttpError):
        return error.status, str(error)
    if isinstance(error, KvseekError):
        return HTTP_STATUS[code_of(error)], str(error)
    logger.error("a request failed", exc_info=error)
    return HTTP_STATUS[ErrorCode.INTERNAL], INTERNAL


def kserve_error(error: Exception) -> tuple[int, bytes]:
    """Write an error as KServe's clients expect it: {"error": message}."""
    status, message = describe(error)
    return status, msgspec.json.encode({"error": message})


def headers_of(status: int, close: bool) -> dict[str, str]:
    """Return the headers that an error of this status has besides its length."""
    return {
        "Content-Type": JSON,
        **({"Retry-After": RETRY_AFTER_SECONDS} if status in RETRY_LATER else {}),
        **({"WWW-Authenticate": "Bearer"} if status == 401 else {}),
        **({"Connection": "close"} if close else {}),
    }


def error_response(
    form: ErrorForm, error: Exception, close: bool = False, more: Mapping[str, str] | None = None
) -> Response:
    """Make the response for an error; `close` closes the connection after it, as some errors do in any case."""
    status, body = form(error)
    close = close or status in CLOSING
    return (Refusal if close else Response)(body, status, headers_of(status, close) | dict(more or {}))


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
