"""Makes dataclasses from JSON values, and checks the types of their fields; errors say which field is wrong, and how."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Collection
from typing import Any, TypeVar

import msgspec

from .errors import ConfigError, KvseekError, RequestError

T = TypeVar("T")
SHOWN_CHARACTERS = 60  # of a value, in an error


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
        text = repr(value)
        shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
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
