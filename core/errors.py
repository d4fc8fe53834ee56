"""Errors that a user can act on, and checks that raise them. A message names the field, its value, the limit and the remedy."""

from __future__ import annotations

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

LEADING_NAMES = re.compile(r"[a-z]\w*(?:, [a-z]\w*)*")  # of the fields that a message is about
SHOWN_CHARACTERS = 40  # of what a client has sent, in an error,
SHOWN_OF_VALUE = 60  # and of a field's value
T = TypeVar("T")


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


def shortened(value: object, most: int = SHOWN_CHARACTERS) -> str:
    """Shorten a value for an error message, to what a reader needs to find it."""
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}…"


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


def from_dict(cls: type[T], values: dict[str, Any], where: str) -> T:
    """Build the dataclass `cls` from JSON values, nested dataclasses included.

    Raises
    ------
    ConfigError
        On an unknown key, a missing key, or a value of the wrong type; `where` begins the message.
    """
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    refuse_unknown(values, names, where)
    return cls(**read_fields(cls, names, values, where))


def refuse_unknown(values: dict[str, Any], known: Collection[str], where: str) -> None:
    """Raise ConfigError if `values` has keys that are not `known`; it names the first of them and lists the known keys."""
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known keys: {', '.join(sorted(known))}")


def read_fields(cls: type[Any], names: Collection[str], values: dict[str, Any], where: str) -> dict[str, Any]:
    """Convert the JSON values of the fields of the dataclass `cls` that `names` lists; other keys are not looked at.

    Raises
    ------
    ConfigError
        On a value of the wrong type, or a missing key whose field has no default; `where` begins the message.
    """
    hints = _type_hints(cls)  # type: ignore[arg-type]  # classes are hashable
    arguments = {name: _convert(hints[name], values[name], f"{where}: {name}") for name in values if name in names}
    for f in dataclasses.fields(cls):
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if f.name in names and f.name not in arguments and required:
            raise ConfigError(
                f"{where}: key {f.name!r} is missing; add it, or, in an engine directory, build the engine again"
            )
    return arguments


def typed(name: str, value: Any, kind: Any, error: type[KvseekError] = RequestError) -> Any:
    """Return a value as the type `kind`: where that says so, lists become tuples, and integers floats. Nothing else is converted.

    Raises
    ------
    RequestError, or `error`
        If the value is something else; `name` begins the message.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as found:
        reason, _, place = str(found).partition(" - at `$")
        shown = shortened(repr(value), SHOWN_OF_VALUE)
        where = f"{name}{place.removesuffix('`')}" if place else f"{name} = {shown}"
        raise error(f"{where}: {reason}; correct it, or leave it out for its default") from None


def check_unicode(name: str, text: str) -> None:
    """Raise RequestError if UTF-8 cannot encode a text; `name` begins the message."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = "is half of a surrogate pair, such as half an emoji"
        raise RequestError(f"{name}: character {error.start} {half}; send text that UTF-8 can encode") from None


def check_types(instance: object, but: Collection[str] = ()) -> None:
    """Raise RequestError unless the fields of a frozen dataclass have the types that the class says; see `typed`."""
    cls = type(instance)
    for name, hint in _type_hints(cls).items():  # type: ignore[arg-type]  # classes are hashable
        value = getattr(instance, name)
        if name not in but and value is not getattr(cls, name, instance):  # a default, as most are, needs no look
            object.__setattr__(instance, name, typed(name, value, hint))


@functools.cache
def _type_hints(cls: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields; they are cached: `kvseek build --plan` makes hundreds of configurations."""
    return typing.get_type_hints(cls)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (hint,) = (a for a in arguments if a is not type(None))
        return _convert(hint, value, where)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ConfigError(f"{where} = {value!r}: must be an object")
        return from_dict(typing.cast(type, hint), value, where)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_convert(arguments[0], item, where) for item in value)
    if origin is dict and isinstance(value, dict):
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{where} has {len(str(value))} digits: must be a number that a float can hold") from None
    if not isinstance(hint, type) or not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where} = {value!r}: must be {getattr(hint, '__name__', hint)}")
    return value
