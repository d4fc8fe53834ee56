"""Errors of the HTTP door, and the responses for all errors of requests."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Awaitable, Callable

from aiohttp import web

from kvseek.core.errors import ErrorCode, KvseekError, code_of
from kvseek.server.requests.generations import CodedError
from kvseek.server.requests.status import HTTP_STATUS, INTERNAL

from .fields import shortened
from .generate_json import error_to_json

RETRY_AFTER_SECONDS = "1"
RETRY_LATER = (429, 503)
CLOSING = (401, 408, 413, 415)  # the rest of a body may still come after these, so the connection cannot be used again
logger = logging.getLogger(__name__)


class HttpError(CodedError):
    """An error by which the door itself refuses a request, with the HTTP status for its reason."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(ErrorCode.UNAVAILABLE if status == 503 else ErrorCode.INVALID, message)
        self.status = status


def describe(error: Exception) -> tuple[int, str]:
    """Return status and message of an error for a client; unforeseen errors are logged, and their text is kept from clients."""
    if isinstance(error, HttpError):
        return error.status, str(error)
    if isinstance(error, CodedError):
        return HTTP_STATUS[error.code], str(error)
    if isinstance(error, KvseekError):
        return HTTP_STATUS[code_of(error)], str(error)
    logger.error("a request failed", exc_info=error)
    return HTTP_STATUS[ErrorCode.INTERNAL], INTERNAL


def error_response(status: int, message: str) -> web.Response:
    """Make a response for an error, with the JSON {"error": message}."""
    response = web.Response(status=status, body=error_to_json(message), content_type="application/json")
    if status in RETRY_LATER:
        response.headers["Retry-After"] = RETRY_AFTER_SECONDS
    if status in CLOSING:
        response.force_close()
    return response


@web.middleware
async def errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer every error of a handler that has not begun its response."""
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed as error:
        response = error_response(
            405, f"{request.method} {shortened(request.path)}: use {', '.join(error.allowed_methods)}"
        )
        response.headers["Allow"] = error.headers["Allow"]
        return response
    except web.HTTPException as error:
        return error_response(error.status, error.reason)
    except web.RequestPayloadError:
        return error_response(400, "the body is not what its headers say; send it with a correct length or encoding")
    except ConnectionError as error:  # the client has left, so there is nobody to answer
        traceback.clear_frames(
            error.__traceback__
        )  # aiohttp makes a cycle of the error, which would keep the answer for long
        raise
    except Exception as error:
        return error_response(*describe(error))
