"""Messages and prompts become token ids here, with limits that hold before anything is tokenised."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from kvseek.core.config import EngineConfig
from kvseek.core.errors import RequestError, renamed
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.requests.translation import Encode, PromptTooLongError, encode_prompt, max_text_bytes

from .fields import ABSENT, PARAMS, TOO_LONG, FieldError, decode, field_of, is_absent, require
from .tools import read_calls, text_of

TOOL = "tool"
ROLES = ("system", "user", "assistant", TOOL)
TEXT_PART = "text"
MAX_STRINGS = 16384  # of names and texts in the messages of a conversation
# Possessive, as a search that may go back takes a hundred times the memory of the text, and twenty times as long: under the GIL.
STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
VALUES = re.compile(STRINGS.pattern + b"|,", re.DOTALL)


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message's content. Kinds other than text are known by name alone, to be refused by name.

    `cache_control`, which proxies send, has no effect: kvseek keeps what it has read anyway.
    """

    type: str
    text: str | None = None
    image_url: msgspec.Raw = ABSENT
    input_audio: msgspec.Raw = ABSENT
    audio_url: msgspec.Raw = ABSENT
    video_url: msgspec.Raw = ABSENT
    file: msgspec.Raw = ABSENT
    refusal: msgspec.Raw = ABSENT
    cache_control: msgspec.Raw = ABSENT


PART_FIELDS = ("type", "text", "cache_control")  # of a part that is a text


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation; the fields that are kept as JSON must be empty, but for `tool_calls` of an assistant."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: msgspec.Raw = ABSENT
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # its newer name
    cache_control: msgspec.Raw = ABSENT  # without effect, as what OpenAI's client has read of the content
    parsed: msgspec.Raw = ABSENT
    function_call: msgspec.Raw = ABSENT
    audio: msgspec.Raw = ABSENT
    annotations: msgspec.Raw = ABSENT


_messages = msgspec.json.Decoder(list[Message])


def read_messages(raw: msgspec.Raw) -> list[Message]:
    """Decode the messages; raises FieldError.

    They are counted first, as an empty message takes twelve times as much memory as its JSON.
    """
    if is_absent(raw):
        return []
    # A message, or a part of one, has two names and values at least, whatever its text contains.
    few = count_strings(raw, MAX_STRINGS) <= MAX_STRINGS
    require(few, "messages", "more", f"<= {MAX_STRINGS} names and texts", "join parts, or send fewer messages")
    messages: list[Message] = decode("messages", _messages, raw)
    return messages


def is_empty(raw: msgspec.Raw) -> bool:
    """Whether JSON is absent, null or an empty list."""
    return is_absent(raw) or re.fullmatch(rb"\[\s*\]", memoryview(raw)) is not None


def count_strings(raw: msgspec.Raw, limit: int, wanted: re.Pattern[bytes] = STRINGS) -> int:
    """Count the strings of JSON, names of fields included, or VALUES, without building them; stops after `limit`."""
    return sum(1 for _ in itertools.islice(wanted.finditer(memoryview(raw)), limit + 1))


def message_texts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them; raises FieldError.

    They have "role", "content" and "name"; an assistant's "tool_calls" and "reasoning_content"; a tool's "tool_call_id".
    """
    require(bool(messages), "messages", [], "at least one message", "send one with the role user")
    texts, called = [], dict[str, str]()  # the functions of calls so far, by the calls' ids
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        own: dict[str, Any] = {"role": _role(place, message), "content": ""}
        if not is_empty(message.tool_calls):
            own["tool_calls"] = read_calls(place, message.tool_calls)
            called |= {call["id"]: call["function"]["name"] for call in own["tool_calls"]}
        thoughts = message.reasoning if message.reasoning_content is None else message.reasoning_content
        if thoughts:
            own["reasoning_content"] = thoughts
        if message.content is not None or not (thoughts or "tool_calls" in own):
            own["content"] = _content(place, message)
        name = message.name
        if own["role"] == TOOL:
            call_id = message.tool_call_id
            known = call_id in called
            limit = "the id of a call in tool_calls of an earlier message"
            require(known, f"{place}.tool_call_id", call_id, limit, "send that message too")
            own["tool_call_id"] = call_id
            name = name or called[str(call_id)]
        texts.append(own if name is None else own | {"name": name})
    return texts


def chat_text(
    messages: Sequence[dict[str, Any]],
    tokenizer: Tokenizer,
    config: EngineConfig,
    template: Mapping[str, Any] | None = None,
) -> str:
    """Write messages with the model's chat template, which writes special tokens itself.

    `template` has the arguments that Tokenizer.apply_chat_template has besides.
    """
    arguments = template or {}
    _check_bytes("messages", text_of([*messages, *arguments.get("tools", ())]), tokenizer, config)
    try:
        return tokenizer.apply_chat_template(messages, **arguments)
    except RequestError as error:
        message = renamed(str(error), PARAMS)
        raise FieldError(field_of(message) or "messages", message) from None


def text_ids(prompt: str, add_special_tokens: bool, tokenizer: Tokenizer, config: EngineConfig) -> list[int]:
    """Tokenise a prompt; `add_special_tokens` puts the tokens before it with which the model expects a text to begin."""
    _check_bytes("prompt", (prompt,), tokenizer, config)
    require(bool(prompt), "prompt", prompt, "at least one character", "send a prompt")
    return encode(
        "prompt", prompt, partial(tokenizer.encode, add_special_tokens=add_special_tokens), config.max_input_len
    )


def encode(field: str, text: str, tokenise: Encode, max_tokens: int) -> list[int]:
    """Tokenise a text; raises FieldError."""
    try:
        ids = encode_prompt(tokenise, text, max_tokens, field)
    except PromptTooLongError as error:
        raise FieldError(field, str(error), TOO_LONG) from None
    except RequestError as error:
        raise FieldError(field, renamed(str(error), {"text_input": field})) from None
    return check_length(field, ids, max_tokens)


def check_length(field: str, ids: list[int], max_tokens: int) -> list[int]:
    """Return the token ids of a prompt; raises FieldError if there are too many or none."""
    if len(ids) > max_tokens:
        raise FieldError(field, f"{field} has {len(ids)} tokens: {_limit(max_tokens)}", TOO_LONG)
    require(bool(ids), field, [], "at least one token", "send a prompt")
    return ids


def _limit(max_tokens: int) -> str:
    return f"must be <= max_input_len = {max_tokens}; shorten it or build with a larger max_input_len"


def _check_bytes(field: str, texts: Iterable[str], tokenizer: Tokenizer, config: EngineConfig) -> None:
    """Refuse texts by their bytes, as tokenising a text that cannot fit would take minutes and gigabytes."""
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    limit = max_text_bytes(config, tokenizer)
    if size > limit:
        what = f"<= {limit}, max_input_len tokens of the tokenizer's longest"
        raise FieldError(field, f"{field} has {size} bytes of text: must be {what}; shorten it", TOO_LONG)


def _role(where: str, message: Message) -> str:
    role = "system" if message.role == "developer" else message.role  # OpenAI's newer name for it
    require(role in ROLES, f"{where}.role", role, "system, user, assistant or tool", "kvseek knows no others")
    own = {"assistant": ("tool_calls", "reasoning_content", "reasoning"), TOOL: ("tool_call_id",)}.get(role, ())
    for name in ("tool_calls", "tool_call_id", "reasoning_content", "reasoning"):
        value = getattr(message, name)
        fits = name in own or (is_empty(value) if isinstance(value, msgspec.Raw) else value is None)
        require(fits, f"{where}.{name}", "set", f"null for the role {role}", "leave it out")
    for name in ("refusal", "function_call", "audio", "annotations"):
        value = getattr(message, name)
        empty = is_empty(value) if isinstance(value, msgspec.Raw) else value is None
        require(empty, f"{where}.{name}", "set", "null", "kvseek does not support it, leave it out")
    return role


def _content(where: str, message: Message) -> str:
    content = message.content
    if content is None:
        raise FieldError("messages", f"{where}.content is missing: must be a text; add it")
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        place = f"{where}.content[{number}]"
        require(part.type == TEXT_PART, f"{place}.type", part.type, '"text"', "kvseek reads text alone")
        for name in part.__struct_fields__:
            require(
                name in PART_FIELDS or is_absent(getattr(part, name)),
                f"{place}.{name}",
                "set",
                "absent in a part of type text",
                "leave it out",
            )
        if part.text is None:
            raise FieldError("messages", f"{place}.text is missing: must be a text; add it")
        texts.append(part.text)
    return "".join(texts)
