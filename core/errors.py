"""Errors that a user can act on. Each message names the field, its value, the limit and the remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum

LEADING_NAMES = re.compile(r"[a-z]\w*(?:, [a-z]\w*)*")  # of the fields that a message is about


class ErrorCode(StrEnum):
    """Kinds of errors that end a request; server/errors.py has the status of each kind in each protocol."""

    INVALID = "invalid"  # the request cannot be served as it stands
    QUEUE_FULL = "queue_full"  # the queue is full: max_queue_size requests wait; a later attempt may succeed
    UNAVAILABLE = "unavailable"  # the engine does not run, is shutting down, or had no memory left for the request
    TIMEOUT = "timeout"  # the request's own time limit passed while it waited
    INTERNAL = "internal"  # a fault of the engine; its log says more


class KvseekError(Exception):
    """Base of every error that kvseek raises on purpose."""


class ConfigError(KvseekError, ValueError):
    """A configuration field is unknown, missing or out of range."""


class EngineDirectoryError(KvseekError):
    """An engine directory is incomplete, corrupt, or of another format version."""


class CheckError(KvseekError):
    """An engine's logits are not those of its checkpoint, or there is nothing to compare them with."""


class RequestError(KvseekError, ValueError):
    """A request that cannot be served as it stands. Other requests are not affected."""


class SamplingError(RequestError):
    """No token can be drawn because of what a request asks for together, which shows only while the request runs."""


class LogitsError(KvseekError, ArithmeticError):
    """The largest of a token's logits is NaN or infinite: weights, rows or what was computed with them are wrong or overflow."""


class CapacityError(KvseekError, MemoryError):
    """The KV cache cannot hold what was asked for."""


class KernelError(KvseekError, RuntimeError):
    """Compiled kernels are missing, or do not support a shape."""


class QueueFullError(KvseekError):
    """The queue is full: max_queue_size requests wait. A later attempt may succeed."""


class UnavailableError(KvseekError):
    """There is no engine to serve the request: the engine is starting, has failed, or is shutting down."""


class EngineHungError(KvseekError):
    """The engine's thread does not come back from a step, such as one whose kernel never ends."""


class TimeoutExpiredError(KvseekError):
    """The request's own time limit passed before it could start."""


class CodedError(KvseekError):
    """An error that ended a request, with its code, at the engine or before it."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def require(
    condition: bool, name: str, value: object, limit: str, remedy: str, error: type[KvseekError] = ConfigError
) -> None:
    """Raise an error that names the field, its value, the limit and the remedy unless `condition` holds."""
    if not condition:
        raise error(f"{name} = {value!r}: must be {limit}; {remedy}")


def text_of(error: Exception) -> str:
    """Return an error's message for a user; that of an OSError is the file and what is wrong with it, without a number."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error)


_CODES: dict[type[Exception], ErrorCode] = {
    RequestError: ErrorCode.INVALID,
    CapacityError: ErrorCode.INVALID,
    QueueFullError: ErrorCode.QUEUE_FULL,
    UnavailableError: ErrorCode.UNAVAILABLE,
    TimeoutExpiredError: ErrorCode.TIMEOUT,
}


def code_of(error: Exception) -> ErrorCode:
    """Return the code of an error that refuses a request; INTERNAL for an error that a client cannot have caused.

    A failure after the engine has accepted a request is no client's fault: Engine._fail chooses the code of those.
    """
    if isinstance(error, CodedError):
        return error.code
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), ErrorCode.INTERNAL)


def renamed(message: str, names: Mapping[str, str]) -> str:
    """Replace the engine's names of fields, with which an error's message begins, by those that the fields' sender knows."""
    found = LEADING_NAMES.match(message)
    if found is None:
        return message
    return ", ".join(names.get(name, name) for name in found[0].split(", ")) + message[found.end() :]
