"""What other APIs have in common, whose requests are translated into that of a chat, and whose answers consist of blocks.

A translation decides nothing: the chat that it makes goes the way of all chats (choices.py), and what is refused there is named
as the client knows it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from kvseek.core.errors import RequestError
from kvseek.server.http.content import first_character

from .answers import AnswerForm
from .bodies import Body
from .choices import Json, Piece
from .fields import ABSENT, FieldError, decode, is_absent, require
from .prompts import VALUES, count_strings
from .tool_formats import ARGUMENTS, CALL
from .tools import FunctionFields

MAX_VALUES = 1 << 15  # texts, names and commas of messages: a value takes up to thirty times as much memory as its JSON


class Answer(Protocol):
    """Writes one answer.

    Attributes
    ----------
    frame : bytes
        How an event becomes a part of the stream.
    held_bytes : int
        Bytes of the request that it needs; see ServedRequest.
    """

    frame: bytes
    held_bytes: int

    def whole(self, pieces: Sequence[Piece], counts: Json) -> bytes:
        """Write a complete answer, of one piece for each choice, with the numbers of tokens (choices.usage)."""

    def begin(self, choices: int) -> list[bytes]:
        """Write the events with which a stream begins."""

    def pieces(self, index: int, piece: Piece) -> list[bytes]:
        """Write the events of a piece of a choice."""

    def end(self, counts: Json) -> list[bytes]:
        """Write the events with which a stream ends."""

    def failed(self, error: Exception) -> tuple[int, bytes]:
        """Write the last event of a stream that fails, and the status that a whole answer would have."""

    def release(self) -> None:
        """Count nothing of the answer any more, however far it has come."""


class Asked(NamedTuple):
    """What a client asks for.

    Attributes
    ----------
    answer : callable
        Makes what writes the answer, given the form of the answer and the number of the prompt's tokens.
    places : mapping
        The client's names of fields, and of places in them, by those of `body`.
    """

    body: Body
    answer: Callable[[AnswerForm, int], Answer]
    places: Mapping[str, str] = {}

    def name(self, text: str) -> str:
        """Replace the place with which an error's message, or its param, begins by that which the client knows."""
        for place in sorted(self.places, key=len, reverse=True):
            rest = text[len(place) :]
            if text.startswith(place) and not (rest[:1].isalnum() or rest[:1] == "_"):
                return self.places[place] + rest
        return text

    def error(self, error: RequestError) -> RequestError:
        """Name the client's places in an error."""
        if isinstance(error, FieldError):
            return FieldError(self.name(error.param), self.name(str(error)), error.code)
        return RequestError(self.name(str(error)))


class Typed(msgspec.Struct):
    """The kind of a block."""

    type: str | None = None


class Function(msgspec.Struct, forbid_unknown_fields=True):
    """A function that may be called, but for the schema of its arguments."""

    name: str
    description: str | None = None
    strict: bool | None = None
    type: str | None = None


Decoders = Mapping[str, msgspec.json.Decoder[Any]]
_raws, _typed, _text = msgspec.json.Decoder(list[msgspec.Raw]), msgspec.json.Decoder(Typed), msgspec.json.Decoder(str)


def decoders(**kinds: type) -> Decoders:
    """Make the decoders of kinds of blocks."""
    return {name: msgspec.json.Decoder(kind) for name, kind in kinds.items()}


def check_values(place: str, raw: msgspec.Raw) -> None:
    """Refuse JSON of too many values before it is decoded; raises FieldError."""
    few = count_strings(raw, MAX_VALUES, VALUES) <= MAX_VALUES
    require(few, place, "more", f"<= {MAX_VALUES} texts and commas", "join texts, or send fewer")


def read_blocks(place: str, raw: msgspec.Raw, kinds: Decoders, remedy: str, default: str | None = None) -> list[Any]:
    """Decode a list of blocks, each by its `type`, or `default` if it has none; raises FieldError."""
    check_values(place, raw)
    found = enumerate(decode(place, _raws, raw))
    return [read_block(f"{place}[{number}]", block, kinds, remedy, default) for number, block in found]


def read_block(place: str, raw: msgspec.Raw, kinds: Decoders, remedy: str, default: str | None = None) -> Any:
    """Decode a block by its `type`, or `default`; raises FieldError."""
    kind = decode(place, _typed, raw).type or default
    require(kind in kinds, f"{place}.type", kind, " or ".join(f'"{name}"' for name in kinds), remedy)
    return decode(place, kinds[str(kind)], raw)


def read_text(place: str, raw: msgspec.Raw, kinds: Decoders) -> str:
    """Decode a text, or a list of parts of one; raises FieldError."""
    if is_absent(raw):
        raise FieldError(place, f"{place} is missing: must be a text; add it")
    if first_character(raw) == '"':
        return str(decode(place, _text, raw))
    return "".join(part.text for part in read_blocks(place, raw, kinds, "kvseek reads text alone"))


def as_json(value: Any) -> msgspec.Raw:
    """Write JSON of a chat's field."""
    return msgspec.Raw(msgspec.json.encode(value))


def nested_tools(raw: msgspec.Raw, kinds: Decoders, schema: str, default: str | None = None) -> msgspec.Raw:
    """Write tools, Functions with the field `schema`, as a chat has them; raises FieldError."""
    if is_absent(raw):
        return ABSENT
    tools: list[Function] = read_blocks("tools", raw, kinds, "kvseek has no tools of its own", default)
    found = [ABSENT if is_absent(raw) else raw for raw in (getattr(each, schema) for each in tools)]
    own = [
        FunctionFields(each.name, each.description, raw, each.strict) for each, raw in zip(tools, found, strict=True)
    ]
    return as_json([{"type": "function", "function": each} for each in own])


def nested_call(call_id: str, name: str, arguments: str) -> Json:
    """Write a call as a chat has it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def read_object(text: str) -> Json | None:
    """Read a call's arguments; None if they are cut off, or no object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def json_list(items: Sequence[bytes]) -> msgspec.Raw:
    """Make the JSON of a list."""
    return msgspec.Raw(b"[%b]" % b",".join(items))


def named_event(kind: str, fields: Json) -> bytes:
    """Write an event of a stream whose events have names."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))


class Blocks:
    """An answer as blocks, one for each run of thinking or of text, and for each call, while its parts come.

    Attributes
    ----------
    written : list
        The blocks that have ended.
    kind : str or None
        REASONING, CONTENT or ARGUMENTS: what the block that has begun is of; None: none has.
    """

    def __init__(self) -> None:
        self.written, self.kind, self.texts = list[Json](), None, list[str]()

    kind: str | None
    frame, held_bytes = b"%b", 0  # events that have their name and their end

    def open(self, kind: str, name: str) -> list[bytes]:
        """Write that a block of a kind begins; `name` is that of a call's function."""
        raise NotImplementedError

    def delta(self, text: str) -> list[bytes]:
        """Write that the block goes on."""
        raise NotImplementedError

    def close(self, text: str, last: bool) -> tuple[Json, list[bytes]]:
        """Write the block of a text, and that it ends; `last`: as the answer does."""
        raise NotImplementedError

    def release(self) -> None:
        """See Answer."""

    def take(self, piece: Piece) -> list[bytes]:
        """Write the events of a piece's parts."""
        events = []
        for kind, text in piece["parts"]:
            if kind == CALL or kind not in (ARGUMENTS, self.kind):
                events += self.finish(last=False)
                self.kind = ARGUMENTS if kind == CALL else kind
                events += self.open(self.kind, text)
            if kind != CALL and text:
                self.texts.append(text)
                events += self.delta(text)
        return events + (self.finish(last=True) if piece["finish_reason"] is not None else [])

    def finish(self, last: bool) -> list[bytes]:
        """End the block that has begun, if one has."""
        if self.kind is None:
            return []
        block, events = self.close("".join(self.texts), last)
        self.written.append(block)
        self.kind, self.texts = None, []
        return events
