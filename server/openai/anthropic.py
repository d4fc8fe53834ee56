"""Anthropic's Messages API: a request becomes a chat's, and its answer a message of blocks, whole or as events."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from kvseek.server.http.content import first_character
from kvseek.server.requests.keys import Tenant

from .answers import AnswerForm
from .bodies import ChatBody, CommonFields
from .choices import Json, Piece
from .fields import ABSENT, TOO_LONG, BodyFormat, FieldError, decode, is_absent, openai_error, require
from .prompts import TOOL
from .tool_formats import ARGUMENTS, CONTENT, REASONING
from .tools import MAX_TOOLS
from .translation import (
    Asked,
    Blocks,
    Function,
    as_json,
    check_values,
    decoders,
    named_event,
    nested_call,
    nested_tools,
    read_blocks,
    read_object,
    read_text,
)

PATH = "/v1/messages"
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Block(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What blocks have in common; prompts are kept whether `cache_control` asks for it or not."""

    type: str
    cache_control: msgspec.Raw = ABSENT


class Text(Block, kw_only=True):
    """A text."""

    text: str
    citations: msgspec.Raw = ABSENT


class ThinkingBlock(Block, kw_only=True):
    """Thinking; kvseek signs none."""

    thinking: str
    signature: str | None = None


class ToolUse(Block, kw_only=True):
    """A call that the model has made."""

    id: str
    name: str
    input: msgspec.Raw
    caller: msgspec.Raw = ABSENT  # without effect, as what kvseek does not support is refused in `tools`
    toolset_name: None = None


class ToolResult(Block, kw_only=True):
    """What a call has returned; that it failed is for its content to say."""

    tool_use_id: str
    content: msgspec.Raw = ABSENT
    is_error: bool | None = None
    toolset_name: None = None


class InputMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: msgspec.Raw = ABSENT


class CustomTool(Function):
    """See Function."""

    input_schema: msgspec.Raw = ABSENT
    cache_control: msgspec.Raw = ABSENT
    eager_input_streaming: bool | None = None  # without effect: arguments are streamed as they come


class Choice(msgspec.Struct, forbid_unknown_fields=True):
    """Whether a tool is called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingFields(msgspec.Struct, forbid_unknown_fields=True):
    """Whether the model thinks, and most tokens of it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized"] | None = None


class JsonFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The schema that the text follows."""

    type: Literal["json_schema"]
    schema: msgspec.Raw


class OutputFields(msgspec.Struct, forbid_unknown_fields=True):
    """How the answer is written."""

    effort: str | None = None
    format: JsonFormat | None = None


TEXT, TOOLS = decoders(text=Text), decoders(custom=CustomTool)
USER = decoders(text=Text, tool_result=ToolResult)
ASSISTANT = decoders(text=Text, thinking=ThinkingBlock, tool_use=ToolUse)
_messages = msgspec.json.Decoder(list[InputMessage])


class MessagesBody(CommonFields, kw_only=True):
    """Fields of a request for a message that have an effect."""

    messages: msgspec.Raw = ABSENT
    system: msgspec.Raw = ABSENT
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    tools: msgspec.Raw = ABSENT
    tool_choice: Choice | None = None
    thinking: ThinkingFields | None = None
    output_config: OutputFields | None = None

    def asked(self) -> tuple[ChatBody, dict[str, str]]:
        """Make the chat, and name the places of its messages; raises FieldError."""
        check_values("messages", self.messages)
        found: list[InputMessage] = [] if is_absent(self.messages) else decode("messages", _messages, self.messages)
        texts = list[Json]()
        if not is_absent(self.system):
            texts.append({"role": "system", "content": read_text("system", self.system, TEXT)})
        places = {"messages[0]": "system"} if texts else {}
        for number, message in enumerate(found):
            for own, names in _written(f"messages[{number}]", message):
                places |= {f"messages[{len(texts)}]{field}": name for field, name in names.items()}
                texts.append(own)
        wanted = self.tool_choice
        chat = ChatBody(
            **{field.name: getattr(self, field.name) for field in msgspec.structs.fields(CommonFields)},
            messages=as_json(texts),
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            tools=nested_tools(self.tools, TOOLS, "input_schema", "custom"),
            tool_choice=ABSENT if wanted is None else _wanted(wanted),
            parallel_tool_calls=wanted is None or not wanted.disable_parallel_tool_use,
            continue_final_message=bool(found) and _is_begun(texts[-1]),
            **self._thinking(),
        )
        return chat, places

    def _thinking(self) -> Json:
        output, thinking = self.output_config or OutputFields(), self.thinking or ThinkingFields("adaptive")
        fields: Json = {"reasoning_effort": output.effort, "thinking_token_budget": thinking.budget_tokens}
        if output.format is not None:
            schema = {"name": "output", "schema": output.format.schema}
            fields["response_format"] = as_json({"type": "json_schema", "json_schema": schema})
        if thinking.type == "disabled":
            fields["chat_template_kwargs"] = msgspec.Raw(b'{"enable_thinking":false}')
        return fields


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "diagnostics": (),
}
MESSAGES_FORMAT = BodyFormat(
    MessagesBody,
    ("messages", "system"),
    NEUTRAL,
    ("metadata", "service_tier", "cache_control", "inference_geo", "user_profile_id", "workspace_id"),
)
PLACES = {
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "tool_choice.function": "tool_choice",
    **{f"tools[{number}].function.parameters": f"tools[{number}].input_schema" for number in range(MAX_TOOLS + 1)},
    **{f"tools[{number}].function": f"tools[{number}]" for number in range(MAX_TOOLS + 1)},
}


def _written(where: str, message: InputMessage) -> list[tuple[Json, dict[str, str]]]:
    """Write a message as those of a chat, each result of a call as its own; returns besides the places of their fields."""
    place, raw, names = f"{where}.content", message.content, {"": where}
    if is_absent(raw) or first_character(raw) == '"' or message.role == "system":
        return [({"role": message.role, "content": read_text(place, raw, TEXT)}, names)]
    if message.role == "user":
        return _users(where, place, raw)
    own, texts, thoughts = Json(role="assistant"), list[str](), list[str]()
    for number, block in enumerate(read_blocks(place, raw, ASSISTANT, "kvseek knows no others")):
        if isinstance(block, Text):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        else:
            calls = own.setdefault("tool_calls", [])
            names[f".tool_calls[{len(calls)}].function.arguments"] = f"{place}[{number}].input"
            calls.append(nested_call(block.id, block.name, bytes(block.input).decode("utf-8", "replace")))
    return [(own | {"content": "".join(texts), "reasoning": "".join(thoughts) or None}, names)]


def _users(where: str, place: str, raw: msgspec.Raw) -> list[tuple[Json, dict[str, str]]]:
    messages, blocks = list[tuple[Json, dict[str, str]]](), read_blocks(place, raw, USER, "kvseek reads text alone")
    require(bool(blocks), place, [], "at least one block", "send a text")
    for number, block in enumerate(blocks):
        if isinstance(block, ToolResult):
            content = "" if is_absent(block.content) else read_text(f"{place}[{number}].content", block.content, TEXT)
            own: Json = {"role": TOOL, "tool_call_id": block.tool_use_id, "content": [content]}
            messages.append((own, {"": where, ".tool_call_id": f"{place}[{number}].tool_use_id"}))
        elif messages and messages[-1][0]["role"] == "user":
            messages[-1][0]["content"].append(block.text)
        else:
            messages.append(({"role": "user", "content": [block.text]}, {"": where}))
    return [(own | {"content": "".join(own["content"])}, names) for own, names in messages]


def _is_begun(message: Json) -> bool:
    """Whether a message is an answer that the model goes on with."""
    return message["role"] == "assistant" and "tool_calls" not in message


def _wanted(choice: Choice) -> msgspec.Raw:
    named = {"type": "function", "function": {"name": choice.name or ""}}
    return as_json({"any": "required", "tool": named}.get(choice.type, choice.type))


def anthropic_error(error: Exception) -> tuple[int, bytes]:
    """Return the HTTP status and the JSON of an error, as Anthropic's clients expect it."""
    status, data = openai_error(error)
    told = json.loads(data)["error"]
    too_long = told["code"] == TOO_LONG and told["param"] != "max_tokens"
    message = f"prompt is too long: {told['message']}" if too_long else told["message"]
    kind = ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return status, msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


def read_messages(data: bytes | bytearray, _: Tenant, answers: bool = True) -> Asked:
    """Read a body, which needs `max_tokens` if it is answered; raises FieldError."""
    body = MESSAGES_FORMAT.read(data)
    if body.max_tokens is None and answers:
        raise FieldError("max_tokens", "max_tokens is missing: must be >= 1; add it")
    chat, places = body.asked()
    return Asked(chat, partial(MessageAnswer, body.model), {**places, **PLACES})


class MessageAnswer(Blocks):
    """Writes a message; its blocks are those of its content. See translation.Answer."""

    def __init__(self, model: str | None, form: AnswerForm, prompt_tokens: int) -> None:
        super().__init__()
        self._form, self._prompt_tokens, self._last = form, prompt_tokens, Piece()
        self._block: Json = {}
        self._message: Json = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}

    def begin(self, choices: int) -> list[bytes]:
        """See Answer."""
        own: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage(0, 0)}
        return [named_event("message_start", {"message": self._message | own}), named_event("ping", {})]

    def pieces(self, index: int, piece: Piece) -> list[bytes]:
        """See Answer."""
        self._last = {name: piece[name] for name in ("finish_reason", "stop")}
        return self.take(piece)

    def end(self, counts: Json) -> list[bytes]:
        """See Answer."""
        delta = {"delta": self._ended(), "usage": self._counted(counts)}
        return [named_event("message_delta", delta), named_event("message_stop", {})]

    def whole(self, pieces: Sequence[Piece], counts: Json) -> bytes:
        """See Answer. A call that was cut off is left out, as it has no input."""
        self.pieces(0, pieces[0])
        content = [block for block in self.written if block.get("input", {}) is not None]
        return msgspec.json.encode(
            self._message | {"content": content, **self._ended(), "usage": self._counted(counts)}
        )

    @staticmethod
    def failed(error: Exception) -> tuple[int, bytes]:
        """See Answer."""
        status, data = anthropic_error(error)
        return status, b"event: error\ndata: %b\n\n" % data

    def _ended(self) -> Json:
        reason, stop = self._last["finish_reason"], self._last["stop"] or None
        found = "stop_sequence" if reason == "stop" and stop else STOP_REASONS[reason]
        return {"stop_reason": found, "stop_sequence": stop if found == "stop_sequence" else None}

    def _counted(self, counts: Json) -> Json:
        return self._usage(counts["prompt_tokens_details"]["cached_tokens"], counts["completion_tokens"])

    def _usage(self, cached: int, generated: int) -> Json:
        own = {"input_tokens": self._prompt_tokens - cached, "output_tokens": generated}
        return own | {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}

    def open(self, kind: str, name: str) -> list[bytes]:
        """See Blocks."""
        blocks: dict[str, Json] = {
            REASONING: {"type": "thinking", "thinking": "", "signature": ""},
            CONTENT: {"type": "text", "text": ""},
            ARGUMENTS: {"type": "tool_use", "id": self._form.call_id(), "name": name, "input": {}},
        }
        self._block = blocks[kind]
        return [self._event("content_block_start", {"content_block": self._block})]

    def delta(self, text: str) -> list[bytes]:
        """See Blocks."""
        kind, name = {
            REASONING: ("thinking_delta", "thinking"),
            CONTENT: ("text_delta", "text"),
            ARGUMENTS: ("input_json_delta", "partial_json"),
        }[str(self.kind)]
        return [self._event("content_block_delta", {"delta": {"type": kind, name: text}})]

    def close(self, text: str, last: bool) -> tuple[Json, list[bytes]]:
        """See Blocks."""
        field = {REASONING: "thinking", CONTENT: "text", ARGUMENTS: "input"}[str(self.kind)]
        value: Any = read_object(text) if self.kind == ARGUMENTS else text
        return self._block | {field: value}, [self._event("content_block_stop", {})]

    def _event(self, kind: str, fields: Json) -> bytes:
        return named_event(kind, {"index": len(self.written), **fields})
