"""Fields of a request's JSON body, read into a typed struct, and errors as OpenAI's clients expect them:
{"error": {"message", "type", "param", "code"}}. What is unknown, of a wrong kind or unsupported is refused by name.

A client can send anything. So the body is first split into its fields without building values, and each field is decoded alone,
by a decoder of its type: nothing nests deeper than the types say, and a field that is not the prompt has a limit in bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from kvseek.core.errors import LEADING_NAMES, SHOWN_OF_VALUE, ErrorCode, RequestError, code_of, renamed, shortened
from kvseek.server.http.content import MAX_FIELD_BYTES, FieldSplitter, JsonFault, first_character, shown
from kvseek.server.http.errors import HttpError, describe

CODES = {
    ErrorCode.QUEUE_FULL: "queue_full",
    ErrorCode.UNAVAILABLE: "engine_unavailable",
    ErrorCode.TIMEOUT: "timeout",
    ErrorCode.INTERNAL: "internal_error",
}
# The engine's errors begin with TensorRT-LLM's names of inputs; here they have OpenAI's. Those of the prompt and of the number of
# tokens depend on the request (Choice.names).
PARAMS = {
    "end_id": "stop_token_ids",
    "bad_words_list": "bad_words",
    "guided_decoding_guide": "response_format",
    "guided_decoding_guide_type": "response_format",
    "apply_chat_template": "messages",
}
TOO_LONG = "context_length_exceeded"
TOO_LONG_WORDS = "; this model's maximum context length is exceeded"  # in which clients look for OpenAI's words
FIELDS = set[str]()  # of all endpoints; each BodyFormat adds its own


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


def require(condition: bool, name: str, value: object, limit: str, remedy: str) -> None:
    """Raise FieldError unless a condition holds; a value's text is shortened."""
    if not condition:
        shown = shortened(repr(value), SHOWN_OF_VALUE)
        raise FieldError(name, f"{name} = {shown}: must be {limit}; {remedy}")


def openai_error(error: Exception) -> tuple[int, bytes]:
    """Return the HTTP status and the JSON of an error; what is no KvseekError is logged and not shown."""
    status, message = describe(error)
    param: str | None = None
    code: str | None = None
    if isinstance(error, HttpError):
        param, code = error.param, error.openai_code
    elif isinstance(error, FieldError):
        param, code = error.param or None, error.code
    else:
        kind = code_of(error)
        code = CODES.get(kind)
        if kind is ErrorCode.INVALID:
            message = renamed(message, PARAMS)
            param = field_of(message)
    if code == TOO_LONG:
        message += TOO_LONG_WORDS
    content = {"message": message, "type": error_type(status), "param": param, "code": code}
    return status, msgspec.json.encode({"error": content})


def error_type(status: int) -> str:
    """Return OpenAI's type of an error with this HTTP status."""
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def field_of(message: str) -> str | None:
    """Return the field with which a message begins; None if it begins with something else."""
    found = LEADING_NAMES.match(message)
    name = "" if found is None else found[0].split(", ")[0]
    return name if name in FIELDS else None


MAX_NEUTRAL_BYTES = 64  # JSON of a value that switches something off is never longer
T = TypeVar("T", bound=msgspec.Struct)
ABSENT = msgspec.Raw()  # stands for a field that is not there, where its JSON is kept: no union may have a Raw
_json = msgspec.json.Decoder()


def is_absent(raw: msgspec.Raw) -> bool:
    """Whether a field that is kept as JSON was left out; null is the same as nothing."""
    return bytes(memoryview(raw)[:8]) in (b"", b"null")


class BodyFormat(Generic[T]):
    """The fields that one endpoint takes.

    Parameters
    ----------
    kind : type
        A msgspec.Struct; its fields, with their types, are those that have an effect.
    prompts : sequence of str
        The fields whose size only the limit of the body limits.
    neutral : mapping
        Names of fields that kvseek does not support, each with the values at which they have no effect; null always has none.
    without_effect : iterable of str
        Names of fields that may have any value, because they never change an answer.
    """

    def __init__(
        self,
        kind: type[T],
        prompts: Sequence[str],
        neutral: Mapping[str, tuple[Any, ...]],
        without_effect: Iterable[str],
    ) -> None:
        self._kind, self._prompts, self._neutral, self._ignored = kind, prompts, neutral, frozenset(without_effect)
        fields = msgspec.structs.fields(kind)
        self._decoders = {field.name: msgspec.json.Decoder(field.type) for field in fields}
        self._fields = FieldSplitter((*self._decoders, *neutral, *self._ignored))
        FIELDS.update(self._decoders)

    def read(self, body: bytes | bytearray) -> T:
        """Read a body; raises FieldError that names the field at fault."""
        try:
            found = self._fields.split(body)
        except JsonFault as fault:
            raise FieldError(fault.field, str(fault), "unknown_parameter" if fault.unknown else None) from None
        values: dict[str, Any] = {}
        for name, raw in found.items():
            if name in self._ignored or first_character(raw) == "n":  # null is the same as nothing
                continue
            if name in self._neutral:
                self._refuse(name, raw)
            else:
                values[name] = self._value(name, raw)
        return self._kind(**values)

    def _value(self, name: str, raw: msgspec.Raw) -> Any:
        size = memoryview(raw).nbytes
        if name not in self._prompts and size > MAX_FIELD_BYTES:
            raise FieldError(name, f"{name} has {size} bytes of JSON: must be <= {MAX_FIELD_BYTES}; send less")
        return decode(name, self._decoders[name], raw)

    def _refuse(self, name: str, raw: msgspec.Raw) -> None:
        """Refuse a field that is not supported, unless its value switches it off."""
        neutral = self._neutral[name]
        if memoryview(raw).nbytes <= MAX_NEUTRAL_BYTES:
            value = decode(name, _json, raw)
            if any(type(value) is type(allowed) and value == allowed for allowed in neutral):  # 0 is not false
                return
        wanted = " or ".join(msgspec.json.encode(value).decode() for value in (*neutral, None))
        message = f"{name} = {shown(raw)}: must be {wanted}; kvseek does not support it, leave it out"
        raise FieldError(name, message, "unsupported_parameter")


def decode(name: str, decoder: msgspec.json.Decoder[Any], raw: msgspec.Raw) -> Any:
    """Decode the JSON of a field; raises FieldError that names the field and the place in it."""
    try:
        return decoder.decode(raw)
    except UnicodeDecodeError as error:
        raise FieldError(name, f"{name}: not UTF-8 ({error.reason}); send the text encoded as UTF-8") from None
    except RecursionError:
        raise FieldError(name, f"{name}: nests too deeply; send flat values") from None
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$")
        unknown = re.search(r"unknown field `(.*)`", reason, re.DOTALL)
        where = name + place.removesuffix("`")
        if unknown is not None:
            where, reason = f"{where}.{shortened(unknown[1])}", "there is no such field"
        value = "" if place or unknown else f" = {shown(raw)}"
        # a client's own text may stand in the reason
        message = f"{where}{value}: {shortened(reason, 200)}; correct it, or leave it out for its default"
        raise FieldError(name, message) from None
    except msgspec.DecodeError as error:
        raise FieldError(name, f"{name} = {shown(raw)}: not JSON ({error}); send valid JSON") from None
