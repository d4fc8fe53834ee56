"""OpenAI's Responses API: a request becomes a chat's, and its answer a response of items, whole or as typed events."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from kvseek.core.errors import shortened
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.http.content import first_character
from kvseek.server.http.errors import HttpError
from kvseek.server.requests.keys import Tenant

from .answers import AnswerForm
from .bodies import WITHOUT_EFFECT, ChatBody, CommonFields, JsonSchema, StreamOptions, check_logprobs
from .choices import Json, Piece, chat_logprobs
from .fields import ABSENT, BodyFormat, FieldError, is_absent, openai_error, require
from .kept_responses import LOST, KeptResponses, Unfinished
from .prompts import TOOL
from .tool_formats import ARGUMENTS, CONTENT, REASONING
from .tools import MAX_TOOLS
from .translation import (
    Asked,
    Blocks,
    Function,
    as_json,
    decoders,
    json_list,
    named_event,
    nested_call,
    nested_tools,
    read_block,
    read_blocks,
    read_object,
    read_text,
)

LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")  # the second without effect: thinking is returned in clear
Key = Annotated[str, msgspec.Meta(max_length=64)]
Value = Annotated[str, msgspec.Meta(max_length=512)]
Metadata = Annotated[dict[Key, Value], msgspec.Meta(max_length=16)]  # OpenAI's limits
Summary = Literal["auto", "concise", "detailed"]
UNKNOWN_ITEM = "kvseek has no tools of its own"
RAW_BYTES = 64  # that JSON takes in a list besides its own
FAILURES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}  # codes of a response's error; others are the server's


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """A text within a message; all fields but `text` are without effect."""

    text: str
    type: str | None = None
    annotations: msgspec.Raw = ABSENT
    logprobs: msgspec.Raw = ABSENT
    parsed: msgspec.Raw = ABSENT
    prompt_cache_breakpoint: msgspec.Raw = ABSENT
    cache_control: msgspec.Raw = ABSENT


class Item(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What items have in common, without effect; what clients send as null of kinds of calls that kvseek has not."""

    type: str | None = None
    id: str | None = None
    status: str | None = None
    namespace: None = None
    caller: None = None


class InputMessage(Item, kw_only=True):
    """A message."""

    role: str
    content: msgspec.Raw = ABSENT
    phase: str | None = None


class FunctionCall(Item, kw_only=True):
    """A call that the model has made."""

    call_id: str
    name: str
    arguments: str
    parsed_arguments: msgspec.Raw = ABSENT


class FunctionCallOutput(Item, kw_only=True):
    """What a call has returned."""

    call_id: str
    output: msgspec.Raw = ABSENT
    name: str | None = None


class ReasoningItem(Item, kw_only=True):
    """Thinking."""

    summary: msgspec.Raw = ABSENT
    content: msgspec.Raw = ABSENT
    encrypted_content: str | None = None


class ItemReference(msgspec.Struct, forbid_unknown_fields=True):
    """An item of a response that is kept."""

    type: str
    id: str


class WrittenPart(msgspec.Struct):
    """A text of an item of a response, without its log probabilities."""

    type: str
    text: str


class WrittenItem(msgspec.Struct, omit_defaults=True):
    """An item of a response, as it may be sent back."""

    type: str
    id: str
    status: str
    role: str | None = None
    content: list[WrittenPart] = []
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class WrittenResponse(msgspec.Struct):
    """The items of a response."""

    output: list[WrittenItem]


class FlatTool(Function):
    """See Function."""

    parameters: msgspec.Raw = ABSENT


class FlatChoice(msgspec.Struct, forbid_unknown_fields=True):
    """The function that has to be called."""

    type: str
    name: str


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The form of the text; see JsonSchema."""

    type: str
    name: str | None = None
    schema: msgspec.Raw = ABSENT
    description: str | None = None
    strict: bool | None = None


class TextFields(msgspec.Struct, forbid_unknown_fields=True):
    """How the text is written."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    """How the model thinks. Summaries have no effect: the thinking itself is returned."""

    effort: str | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


INPUT_TEXT, OUTPUT_TEXT = decoders(input_text=Part, output_text=Part), decoders(output_text=Part, input_text=Part)
THOUGHTS = decoders(reasoning_text=Part, summary_text=Part)
TOOLS, CHOICES = decoders(function=FlatTool), decoders(function=FlatChoice)
ITEMS = decoders(
    message=InputMessage,
    function_call=FunctionCall,
    function_call_output=FunctionCallOutput,
    reasoning=ReasoningItem,
    item_reference=ItemReference,
)
_repeated, _written = msgspec.json.Decoder(dict[str, msgspec.Raw]), msgspec.json.Decoder(WrittenResponse)


class ResponsesBody(CommonFields, kw_only=True):
    """Fields of a request for a response that have an effect."""

    input: msgspec.Raw = ABSENT
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream_options: StreamOptions | None = None
    tools: msgspec.Raw = ABSENT
    tool_choice: msgspec.Raw = ABSENT
    parallel_tool_calls: bool | None = None
    text: TextFields | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: Metadata | None = None
    stop: str | list[str] | None = None
    chat_template_kwargs: msgspec.Raw = ABSENT
    thinking_token_budget: int | None = None

    SAME: ClassVar[tuple[str, ...]] = (
        *(field.name for field in msgspec.structs.fields(CommonFields)),
        *("stream_options", "parallel_tool_calls", "stop", "chat_template_kwargs", "thinking_token_budget"),
    )

    def chat(self, messages: msgspec.Raw) -> ChatBody:
        """Make the chat; raises FieldError."""
        form = None if self.text is None else self.text.format
        return ChatBody(
            **{name: getattr(self, name) for name in self.SAME},
            messages=messages,
            tools=nested_tools(self.tools, TOOLS, "parameters"),
            tool_choice=nested_choice(self.tool_choice),
            response_format=ABSENT if form is None else nested_format(form),
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs if self.logprobs else None,
        )

    @property
    def logprobs(self) -> bool:
        """Whether log probabilities are asked for."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def check(self) -> None:
        """Raise FieldError on what only this API limits."""
        if self.top_logprobs is not None:
            check_logprobs("top_logprobs", self.top_logprobs)
        plain = not self.logprobs or is_absent(self.tools)
        require(plain, "top_logprobs", self.top_logprobs, "absent with tools", "ask for them without tools")
        for number, name in enumerate(self.include or ()):
            place, limit = f"include[{number}]", " or ".join(INCLUDED)
            require(name in INCLUDED, place, name, limit, "kvseek has nothing else to include")
        verbosity = None if self.text is None else self.text.verbosity
        limit, remedy = '"medium" or null: kvseek cannot change it', "say in the instructions how long texts may be"
        require(verbosity in (None, "medium"), "text.verbosity", verbosity, limit, remedy)

    def repeated(self) -> bytes:
        """Write the fields that a response repeats."""
        given = {
            "model": self.model,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "store": self.store is not False,
            "text": self.text or {"format": {"type": "text"}},
            "reasoning": self.reasoning or Reasoning(),
            "tools": [] if is_absent(self.tools) else self.tools,
            "tool_choice": "auto" if is_absent(self.tool_choice) else self.tool_choice,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
        }
        return msgspec.json.encode(given)


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "context_management": ([],),
    **dict.fromkeys(("conversation", "prompt", "max_tool_calls", "moderation", "n", "response_format"), ()),
}
RESPONSES_FORMAT = BodyFormat(
    ResponsesBody,
    ("input", "instructions"),
    NEUTRAL,
    ("cache_control", "prompt_cache_options", *(name for name in WITHOUT_EFFECT if name != "metadata")),
)
PLACES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "tool_choice.function": "tool_choice",
    **{f"tools[{number}].function": f"tools[{number}]" for number in range(MAX_TOOLS + 1)},
}


def nested_choice(raw: msgspec.Raw) -> msgspec.Raw:
    """Write the choice of a tool as a chat has it."""
    if is_absent(raw) or first_character(raw) == '"':
        return raw
    named: FlatChoice = read_block("tool_choice", raw, CHOICES, 'send "none", "auto", "required" or a function')
    return as_json({"type": named.type, "function": {"name": named.name}})


def nested_format(given: TextFormat) -> msgspec.Raw:
    """Write the form of the text as a chat has it."""
    if given == TextFormat(given.type) and given.type != "json_schema":
        return as_json({"type": given.type})
    schema = JsonSchema(given.name or "", given.schema, given.description, given.strict)
    return as_json({"type": given.type, "json_schema": schema})


Find = Callable[[str, str], msgspec.Raw]  # the JSON of a kept item, by the place of a reference to it and its id


def read_items(raw: msgspec.Raw, before: int, find: Find | None = None) -> tuple[list[Json], dict[str, str]]:
    """Read the input as messages of a chat, and name their places; raises FieldError, and what `find` does.

    Thinking, text and calls of the model that follow each other become one message, as they were one answer. `before` is the
    number of messages before these.
    """
    if is_absent(raw):
        raise FieldError("input", "input is missing: must be a text or items; add it")
    if first_character(raw) == '"':
        return [{"role": "user", "content": read_text("input", raw, INPUT_TEXT)}], {f"messages[{before}]": "input"}
    items = read_blocks("input", raw, ITEMS, UNKNOWN_ITEM, "message")
    require(bool(items), "input", [], "at least one item", "send a message")
    messages, places, references = list[Json](), dict[str, str](), set[str]()
    for number, item in enumerate(items):
        place = f"input[{number}]"
        if isinstance(item, ItemReference) and find is not None:
            # Else a body of some bytes would stand for gigabytes.
            require(
                item.id not in references, f"{place}.id", item.id, "another one than before", "send the item itself"
            )
            references.add(item.id)
            item = read_block(place, find(f"{place}.id", item.id), ITEMS, UNKNOWN_ITEM)
        own, joins = _message(place, item)
        last = messages[-1] if messages else {"role": None}
        goes_on = joins == "tool_calls" or (joins == "content" and not {"content", "tool_calls"} & last.keys())
        if own["role"] == last["role"] == "assistant" and goes_on:
            last |= own
        else:
            messages.append(own)
        where = f"messages[{before + len(messages) - 1}]"
        places.setdefault(where, place)
        if isinstance(item, FunctionCall):
            calls = messages[-1].setdefault("tool_calls", [])
            places[f"{where}.tool_calls[{len(calls)}].function"] = place
            calls.append(nested_call(item.call_id, item.name, item.arguments))
        elif isinstance(item, FunctionCallOutput):
            places[f"{where}.tool_call_id"] = f"{place}.call_id"
    return messages, places


def _message(place: str, item: Any) -> tuple[Json, str]:
    """Write an item as a message; returns besides the field with which it continues an answer."""
    match item:
        case InputMessage():
            kinds = OUTPUT_TEXT if item.role == "assistant" else INPUT_TEXT
            roles = ("user", "assistant", "system", "developer")
            require(item.role in roles, f"{place}.role", item.role, " or ".join(roles), "kvseek knows no others")
            return {"role": item.role, "content": read_text(f"{place}.content", item.content, kinds)}, "content"
        case FunctionCallOutput():
            output = read_text(f"{place}.output", item.output, INPUT_TEXT)
            return {"role": TOOL, "tool_call_id": item.call_id, "content": output}, ""
        case ReasoningItem():
            return {"role": "assistant", "reasoning": _thoughts(place, item)}, "reasoning"
    return {"role": "assistant"}, "tool_calls"


def _thoughts(place: str, item: ReasoningItem) -> str:
    for name in ("content", "summary"):
        raw = getattr(item, name)
        if not is_absent(raw) and (thoughts := read_text(f"{place}.{name}", raw, THOUGHTS)):
            return thoughts
    hidden, limit = item.encrypted_content, "null without content"
    require(hidden is None, f"{place}.encrypted_content", "set", limit, "kvseek cannot decrypt it, send the content")
    return ""


def said(items: Sequence[Json]) -> list[Json]:
    """Write the items of an answer as messages of a chat, as read_items does; a call that was cut off has not been made."""
    plain = msgspec.convert(items, list[WrittenItem])
    whole = [item for item in plain if item.type != "function_call" or item.status == "completed"]
    return read_items(as_json(whole), 0)[0] if whole else []


class Responses:
    """Reads requests for responses, and keeps responses that may be continued. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, kept: KeptResponses) -> None:
        self._tokenizer, self._kept = tokenizer, kept

    def read(self, data: bytes | bytearray, tenant: Tenant) -> Asked:
        """Read a body; raises FieldError, and HttpError if the response that it continues is not kept."""
        body = RESPONSES_FORMAT.read(data)
        body.check()
        earlier = [] if body.previous_response_id is None else self._kept.messages(body.previous_response_id, tenant)
        first = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
        own, places = read_items(body.input, len(first) + len(earlier), self._finder(tenant))
        own_json = [msgspec.json.encode(message) for message in own]
        messages = json_list([*map(msgspec.json.encode, first), *earlier, *own_json])
        places = {"messages[0]": "instructions" if first else "input", **places, **PLACES}
        previous, fields = body.previous_response_id, body.repeated()

        def keep(response_id: str, response: bytes, items: Sequence[Json]) -> None:
            messages = (*own_json, *map(msgspec.json.encode, said(items)))
            self._kept.add(response_id, response, messages, previous, tenant)

        def answer(form: AnswerForm, _: int) -> ResponseAnswer:
            own = (keep, sum(map(len, own_json))) if body.store is not False else (None, 0)
            return ResponseAnswer(fields, body.logprobs, form, self._tokenizer, self._kept.unfinished(tenant), *own)

        return Asked(body.chat(messages), answer, places)

    def _finder(self, tenant: Tenant) -> Find:
        """Make what finds items of the responses that are kept for a tenant: their ids begin with those of the responses."""
        known = dict[str, dict[str, WrittenItem]]()

        def find(place: str, item_id: str) -> msgspec.Raw:
            response = f"resp_{item_id.partition('_')[2].partition('_')[0]}"
            if response not in known:
                data = self._kept.find(response, tenant)
                known[response] = {} if data is None else {item.id: item for item in _written.decode(data).output}
            if item_id not in known[response]:
                what = f"Item with id '{shortened(item_id, 80)}' not found. {LOST} the item itself."
                raise HttpError(404, what, "item_not_found", place)
            return as_json(known[response][item_id])

        return find


class ResponseAnswer(Blocks):
    """Writes a response; its blocks are items. See translation.Answer.

    Parameters
    ----------
    repeated : bytes
        JSON of fields of the request; of these alone, as the request's other memory is not counted any more.
    logprobs : bool
        Whether log probabilities are asked for.
    unfinished : Unfinished
        Counts what a stream holds until its end.
    keep : callable or None
        Keeps the response, given its id, its JSON and its items, once it has ended.
    kept_bytes : int
        What that needs of the request.
    """

    def __init__(
        self,
        repeated: bytes,
        logprobs: bool,
        form: AnswerForm,
        tokenizer: Tokenizer,
        unfinished: Unfinished,
        keep: Any,
        kept_bytes: int,
    ) -> None:
        super().__init__()
        self._unfinished, self._streams, self._timed_out = unfinished, False, False
        self.id, self.held_bytes = f"resp_{uuid.uuid4().hex}", len(repeated) + kept_bytes
        self._form, self._tokenizer, self._keep = form, tokenizer, keep
        self._response: Json = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            **_repeated.decode(repeated),
            "truncation": "disabled",
            "output": self.written,
            "usage": None,
        }
        self._asks_logprobs, self._reason, self._number = logprobs, "", 0
        thinking = form.thinking
        self._thinks = thinking is not None and thinking.opened  # the next token does
        # As JSON, which takes a tenth of the memory, and is written several times.
        self._new_logprobs, self._logprobs = list[msgspec.Raw](), list[msgspec.Raw]()
        self._item: Json = {}

    def begin(self, choices: int) -> list[bytes]:
        """See Answer."""
        self._streams = True
        self._unfinished.add(self.held_bytes)
        return [self._event(f"response.{name}", response=self._response) for name in ("created", "in_progress")]

    def pieces(self, index: int, piece: Piece) -> list[bytes]:
        """See Answer."""
        held = sum(sys.getsizeof(text) for _, text in piece["parts"])
        if self._asks_logprobs:
            new = [each for each in piece["tokens"] if self._is_text(each[0])]
            written = list(map(as_json, chat_logprobs(new, self._tokenizer)["content"]))
            self._new_logprobs += written
            held += sum(memoryview(each).nbytes + RAW_BYTES for each in written)
        if self._streams:
            self._unfinished.add(held)
        self._reason, self._timed_out = piece["finish_reason"], piece["timed_out"]
        events = self.take(piece)
        if self._reason not in (None, "length") and not any(item["type"] != "reasoning" for item in self.written):
            self.kind = CONTENT  # an answer without a word is one all the same
            events += self.open(CONTENT, "") + self.finish(last=True)
        return events

    def end(self, counts: Json) -> list[bytes]:
        """See Answer."""
        done = self._done(counts)
        return [self._event(f"response.{done['status']}", response=done)]

    def whole(self, pieces: Sequence[Piece], counts: Json) -> bytes:
        """See Answer."""
        self.pieces(0, pieces[0])
        return msgspec.json.encode(self._done(counts))

    def failed(self, error: Exception) -> tuple[int, bytes]:
        """See Answer."""
        status, data = openai_error(error)
        told = {"code": FAILURES.get(status, "server_error"), "message": msgspec.json.decode(data)["error"]["message"]}
        return status, self._event("response.failed", response=self._response | {"status": "failed", "error": told})

    def release(self) -> None:
        """See Answer."""
        self._unfinished.close()

    def _done(self, counts: Json) -> Json:
        cut = "timeout" if self._timed_out else "max_output_tokens" if self._reason == "length" else None
        if cut is None and any(item["status"] != "completed" for item in self.written):
            cut = "stop"  # a stop text has ended the answer within a call
        details = counts.get("completion_tokens_details", {"reasoning_tokens": 0})
        done = self._response | {
            "status": "incomplete" if cut else "completed",
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": cut} if cut else None,
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": details,
                "total_tokens": counts["total_tokens"],
            },
        }
        self.release()
        if self._keep is not None:
            self._keep(self.id, msgspec.json.encode(done), self.written)
        return done

    def _is_text(self, token: int) -> bool:
        """Whether the next token is no thinking."""
        thinking = self._form.thinking
        if thinking is not None and token in (thinking.opening, thinking.closing):
            self._thinks = token == thinking.opening
            return False
        return not self._thinks

    def open(self, kind: str, name: str) -> list[bytes]:
        """See Blocks."""
        own: dict[str, tuple[str, Json]] = {
            REASONING: ("rs", {"type": "reasoning", "summary": [], "content": []}),
            CONTENT: ("msg", {"type": "message", "role": "assistant", "content": []}),
            ARGUMENTS: (
                "fc",
                {"type": "function_call", "call_id": self._form.call_id(), "name": name, "arguments": ""},
            ),
        }
        prefix, item = own[kind]
        item_id = f"{prefix}_{self.id.removeprefix('resp_')}_{len(self.written)}"
        self._item = {"id": item_id, **item, "status": "in_progress"}
        added = self._event("response.output_item.added", output_index=len(self.written), item=self._item)
        return [added] if kind == ARGUMENTS else [added, self._of_item("content_part.added", part=self._part(""))]

    def delta(self, text: str) -> list[bytes]:
        """See Blocks."""
        return [self._of_item(f"{self._name}.delta", delta=text, **self._taken_logprobs())]

    def close(self, text: str, last: bool) -> tuple[Json, list[bytes]]:
        """See Blocks."""
        self._taken_logprobs()
        cut = last and self._reason == "length"
        if self.kind == ARGUMENTS:
            own: Json = {"arguments": text}
            cut = cut or read_object(text) is None
            events = [self._of_item(f"{self._name}.done", **own)]
        else:
            part = self._part(text)
            told = {name: part[name] for name in ("text", "logprobs") if name in part}
            own, events = {"content": [part]}, [self._of_item(f"{self._name}.done", **told)]
            events.append(self._of_item("content_part.done", part=part))
        item = self._item | own | {"status": "incomplete" if cut else "completed"}
        self._logprobs = []
        return item, [*events, self._event("response.output_item.done", output_index=len(self.written), item=item)]

    @property
    def _name(self) -> str:
        names = {REASONING: "reasoning_text", CONTENT: "output_text", ARGUMENTS: "function_call_arguments"}
        return names[str(self.kind)]

    def _part(self, text: str) -> Json:
        if self.kind == REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    def _taken_logprobs(self) -> Mapping[str, Any]:
        """Return the log probabilities that no event has had, as those of a text have to."""
        if self.kind != CONTENT:
            return {}
        new, self._new_logprobs = self._new_logprobs, []
        self._logprobs += new
        return {"logprobs": new}

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        place = {"item_id": self._item["id"], "output_index": len(self.written)}
        return self._event(
            f"response.{kind}", **place, **({} if self.kind == ARGUMENTS else {"content_index": 0}), **fields
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return named_event(kind, {"sequence_number": self._number - 1, **fields})
