"""Checks the arguments of the Python API, which Python itself lets be anything; errors name the argument and its value."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from numbers import Integral
from typing import Annotated, Any

import msgspec
import numpy as np

from kvseek.core.errors import ConfigError, RequestError, typed

Prompt = str | Sequence[int]  # text or token ids
Message = Mapping[
    str, Any
]  # with "role" and "content", which are texts, and whatever else the model's chat template reads
Positive = Annotated[int, msgspec.Meta(ge=1)]
BYTES = bytes | bytearray | memoryview
# The engine's names of what requests have, by which its errors begin, and the API's.
NAMES = {
    "input_ids": "prompt",
    "text_input": "prompt",
    "end_id": "stop_token_ids",
    "end_ids": "stop_token_ids",
    "bad_words_list": "bad_words",
    "guided_decoding_guide": "guide",
    "guided_decoding_guide_type": "guide",
    "return_context_logits": "prompt_logprobs",
    "timeout_seconds": "timeout",
    "session_id": "session",
    "apply_chat_template": "messages",
}
PREFIX_NAMES = dict.fromkeys(("prompt", "text_input", "messages", "apply_chat_template"), "beginning") | {
    "session": "prefix"
}
SCORE_NAMES = NAMES | {"max_tokens": "continuations", "forced_tokens": "continuations"}
CHAT_NAMES = NAMES | {"input_ids": "messages", "text_input": "messages"}


def plain(value: Any) -> Any:
    """Return a scalar of NumPy as Python's own number; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def check_path(name: str, path: Any) -> None:
    """Raise ConfigError unless a path is a text or a path of pathlib."""
    if not isinstance(path, str) and not (isinstance(path, os.PathLike) and isinstance(os.fspath(path), str)):
        raise ConfigError(f"{name} = {path!r:.60}: must be a path, as text or of pathlib; convert it")


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Return one text or several as a tuple; None is none. Raises RequestError."""
    if value is None or isinstance(value, str):
        return () if value is None else (value,)
    if not isinstance(value, Iterable) or isinstance(value, BYTES | Mapping):
        raise RequestError(f"{name} = {value!r:.60}: must be a text or a sequence of texts; convert it")
    return typed(name, tuple(value), tuple[str, ...])  # type: ignore[no-any-return]


def token_ids(name: str, value: Any, wanted: str = "a text or a sequence of token ids") -> list[int]:
    """Return token ids, which may be numbers and arrays of NumPy and PyTorch, as Python's integers; raises RequestError."""
    listed = value
    if hasattr(value, "tolist") and not isinstance(value, BYTES):
        listed = value.tolist()
    if isinstance(listed, Sequence) and not isinstance(listed, str | BYTES):
        ids = list(listed)
        if not set(map(type, ids)) <= {int}:
            ids = [plain(number) for number in ids]
        if set(map(type, ids)) <= {int}:
            return ids
    raise RequestError(f"{name} = {value!r:.80}: must be {wanted}; convert it")


def prompt_list(prompts: Any, name: str = "prompts") -> list[Prompt]:
    """Make a list of prompts; a single text or a single sequence of token ids becomes a list of one. Raises RequestError."""
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "tolist") and not isinstance(prompts, BYTES):
        prompts = prompts.tolist()
    if isinstance(prompts, BYTES) or not isinstance(prompts, Sequence | Iterator):
        wanted = "a text, a sequence of token ids, or a sequence of these"
        raise RequestError(f"{name} = {prompts!r:.80}: must be {wanted}; convert it")
    listed = list(prompts)
    return [listed] if listed and isinstance(listed[0], Integral) else listed


def conversation_list(messages: Any) -> list[Sequence[Message]]:
    """Make a list of conversations; a single one becomes a list of one. Raises RequestError that names the message at fault."""
    listed = _sequence("messages", messages)
    if not listed or isinstance(listed[0], Mapping):
        return [check_conversation(listed)] if listed else []
    return [check_conversation(one, f"messages[{number}]") for number, one in enumerate(listed)]


def check_conversation(messages: Any, where: str = "messages") -> Sequence[Message]:
    """Return a conversation; raises RequestError unless it is a sequence of messages."""
    for number, message in enumerate(_sequence(where, messages)):
        place = f"{where}[{number}]"
        if not isinstance(message, Mapping):
            wanted = 'a message, such as {"role": "user", "content": "Hello"}'
            raise RequestError(f"{place} = {message!r:.60}: must be {wanted}; convert it")
        for name in ("role", "content"):
            typed(f"{place}.{name}", message.get(name), str)
        typed(f"{place}.name", message.get("name"), str | None)
    return messages  # type: ignore[no-any-return]


def _sequence(where: str, messages: Any) -> Sequence[Any]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | BYTES | Set):
        wanted = 'messages, such as [{"role": "user", "content": "Hello"}]'
        raise RequestError(f"{where} = {messages!r:.60}: must be a sequence of {wanted}; convert it")
    return messages
