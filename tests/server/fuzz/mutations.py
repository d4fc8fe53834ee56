"""What all fuzzers share: mutations from a seeded Random, faults, and sockets that are read no longer than they may take."""

from __future__ import annotations

import copy
import http.client
import io
import json
import re
import socket
import time
from collections.abc import Iterator
from random import Random
from typing import Any, Protocol

TEXT: dict[str, Any] = {
    "text_input": "the harbour log",
    "max_tokens": 4,
    "end_id": -1,
    "return_num_output_tokens": True,
}
TOKENS: dict[str, Any] = {"input_ids": [5, 6, 7, 8], "request_output_len": 4, "end_id": -1}
OPTIONS: dict[str, Any] = {
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.9,
    "runtime_top_k": 5,
    "runtime_top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "seed": 7,
    "random_seed": 8,
    "stop_words": ["log", "the"],
    "stop_words_list": [5, 6, 1, 2],
    "bad_words": [""],
    "forced_tokens": [5, 6, -1],
    "pad_id": 2,
    "stream": True,
    "streaming": True,
    "stop": True,
    "exclude_input_in_output": True,
    "return_prefill_progress": True,
    "return_num_input_tokens": True,
    "apply_chat_template": True,
    "priority": 200,
    "timeout": 5.0,
    "cache_salt": "salt",
    "session_id": "talk",
    "retention_priority": 50,
    "retention_seconds": 9.0,
    "speculate": False,
    "beam_width": 1,
    "input_lengths": 3,
    "id": "a",
    "parameters": {},
}
CHAT: dict[str, Any] = {
    "model": "model",
    "messages": [{"role": "user", "content": "the harbour log"}],
    "max_completion_tokens": 4,
}
COMPLETION: dict[str, Any] = {"model": "model", "prompt": "the harbour log", "max_tokens": 4}
OPENAI_OPTIONS: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "min_p": 0.1,
    "top_k": 5,
    "n": 2,
    "seed": 7,
    "stop": ["log", "the"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 3,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": -100, "6": 2.5},
    "min_tokens": 2,
    "stop_token_ids": [7],
    "ignore_eos": True,
    "bad_words": ["ship"],
    "forced_tokens": [5, 6],
    "return_selected_rows": {"block": 4, "layers": [0]},
    "add_special_tokens": True,
    "add_generation_prompt": False,
    "continue_final_message": True,
    "chat_template_kwargs": {"tone": ["dry"]},
    "priority": 200,
    "timeout": 5.0,
    "cache_salt": "salt",
    "session_id": "talk",
    "retention_priority": 50,
    "retention_seconds": 9.0,
    "speculate": False,
    "echo": True,
    "response_format": {"type": "json_object"},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "reasoning_effort": "none",
    "thinking_token_budget": 9,
    "return_token_ids": True,
    "user": "me",
    "prompt": [5, 6, 7],
    "messages": [{"role": "system", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": ""}],
}
ONLY_CHAT = {
    *("n", "messages", "max_tokens", "prompt", "echo", "tools", "tool_choice", "response_format", "logprobs"),
    *(
        "stream_options",
        "return_selected_rows",
        "add_special_tokens",
        "add_generation_prompt",
        "continue_final_message",
    ),
    *("return_token_ids", "reasoning_effort"),
}
SHARED_OPTIONS = {name: value for name, value in OPENAI_OPTIONS.items() if name not in ONLY_CHAT}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": ["b", 1]}}}
RESPONSE: dict[str, Any] = {"model": "model", "input": "the harbour log", "max_output_tokens": 4}
RESPONSE_OPTIONS: dict[str, Any] = SHARED_OPTIONS | {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        {"type": "function_call", "call_id": "d", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "e"}]},
    ],
    "instructions": "Be short.",
    "previous_response_id": "resp_0",
    "store": False,
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}, "verbosity": "medium"},
    "reasoning": {"effort": "none", "summary": "auto"},
    "include": ["message.output_text.logprobs"],
    "metadata": {"a": "b"},
    "truncation": "disabled",
    "background": False,
}
MESSAGE: dict[str, Any] = {
    "model": "model",
    "messages": [{"role": "user", "content": "the harbour log"}],
    "max_tokens": 4,
}
MESSAGE_OPTIONS: dict[str, Any] = SHARED_OPTIONS | {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "b", "signature": ""},
                {"type": "tool_use", "id": "d", "name": "f", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "d", "content": "e"}]},
    ],
    "system": [{"type": "text", "text": "a"}],
    "stop_sequences": ["log"],
    "tools": [{"name": "f", "input_schema": SCHEMA, "type": "custom"}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 9},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "metadata": {"user_id": "a"},
}
REQUESTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what is right, and what may be added
    "tensorrt_llm_bls": (TEXT, OPTIONS),
    "tensorrt_llm": (TOKENS, OPTIONS),
    "chat": (CHAT, OPENAI_OPTIONS),
    "completions": (COMPLETION, OPENAI_OPTIONS),
    "responses": (RESPONSE, RESPONSE_OPTIONS),
    "messages": (MESSAGE, MESSAGE_OPTIONS),
}
STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 255, 256, 2**31 - 1, 2**31, -(2**31) - 1, 2**63, 2**64, 10**40, -(10**40)),
    *(0.0, -0.0, 1e-45, 1e38, 1e39, 1e308, -1e308, 0.1, float("nan"), float("inf"), float("-inf")),
    *("", " ", "a", "\0", "\n", "é", "漢字", "🚢", "\u202e", "\ufffd", "\ud800", "<|end|>", "%s%n", "../../etc"),
    "a" * 300,
    *("the " * 400, [], [[]], [None], [1], [1, 2], [1.5], ["a"], [True], [[1], [2]], [{}], {}, {"a": 1}, {"": {}}),
    *([0] * 3000, ["a"] * 2000, [[[[[[[[1]]]]]]]], {"a": {"b": {"c": {}}}}, list(range(400))),
)
SNIPPETS: tuple[bytes, ...] = (
    *(b"\0", b"\xff", b"\xff\xfe", b"\xef\xbb\xbf", b"\r\n", b"\r\n\r\n", b"\n", b"{", b"}", b"[", b"]", b'"'),
    *(b"\\", b","),
    *(b"NaN", b"Infinity", b"1e999", b"-", b"\\u0000", b"\\ud800", b"null", b"[" * 2000, b'{"a":' * 2000, b"9" * 400),
    *(b"A" * 10000, b"%00", b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80", b"\x0a\xff\xff\xff\xff\x0f"),
)


def mutated_fields(random: Random, kind: str) -> dict[str, Any]:
    """Fields of a request of a kind of REQUESTS, most of them right."""
    right, options = REQUESTS[kind]
    fields: dict[str, Any] = copy.deepcopy(right)
    for name in random.sample(sorted(options), random.choice((0, 0, 1, 2, 4))):
        fields[name] = copy.deepcopy(options[name])
    if random.random() < 0.3:
        _bend(random, random.choice(list(_objects(fields))), sorted(options))
    for _ in range(random.choice((0, 1, 1, 2, 3))):
        _bend(random, fields, sorted(options))
    return fields


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """The objects of JSON."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(each)


def _bend(random: Random, fields: dict[str, Any], others: list[str]) -> None:
    """Change one thing about an object; `others` are names that it may have."""
    names = sorted(fields) or ["text_input"]
    name = random.choice(names)
    match random.randrange(8):
        case 0:
            fields.pop(name, None)
        case 1 | 2 | 3:
            fields[name] = random.choice(STRANGE)
        case 4:
            fields[random.choice((name + "x", name.upper(), "", "x" * 300, "é", random.choice(others)))] = 1
        case 5:
            fields[name] = [fields.get(name)] * random.choice((1, 2, 40))
        case 6:
            fields[name] = {"a": fields.get(name)}
        case _:
            fields[name] = _strange_number(random)


def _strange_number(random: Random) -> Any:
    exponent = random.randint(-50, 50)
    return random.choice(
        (random.randint(-(2**33), 2**33), random.uniform(-2, 2) * 10.0**exponent, random.randint(0, 300))
    )


def mutated_json(random: Random, kind: str) -> bytes:
    """The body of a request of a kind of REQUESTS."""
    fields = mutated_fields(random, kind)
    text = json.dumps(fields, ensure_ascii=random.random() < 0.5)
    body = text.encode("utf-8", "surrogatepass")
    if random.random() < 0.1 and body.endswith(b"}") and len(body) > 2:  # a key twice
        body = body[:-1] + b"," + body[1:]
    if random.random() < 0.05:
        body = text.encode(random.choice(("utf-16", "utf-32", "cp037")), "replace")
    return mutated_bytes(random, body) if random.random() < 0.3 else body


def mutated_bytes(random: Random, data: bytes) -> bytes:
    """Some bytes changed, inserted, repeated or cut off."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randint(0, len(changed))
        match random.randrange(6):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << random.randrange(8)
            case 1:
                del changed[at : at + random.choice((1, 4, 100))]
            case 2:
                changed[at:at] = random.choice(SNIPPETS)
            case 3:
                changed[at:at] = random.randbytes(random.choice((1, 8, 64)))
            case 4:
                changed[at:at] = changed[at : at + random.choice((1, 16, 256))]
            case _:
                if random.random() < 0.3:
                    del changed[at:]
    return bytes(changed)


ANSWER_SECONDS = 60.0  # to an answer or the end of the connection; the longest valid request takes a part of it
# What the words of an unexpected exception look like in a message to a client; those that kvseek raises on purpose are not.
OURS = "Request|Capacity|TimeoutExpired|QueueFull|Unavailable"
EXCEPTION = re.compile(rf"Traceback|\b(?!(?:{OURS})Error)[A-Z]\w*(Error|Exception)\b: ")


class FaultError(Exception):
    """A server did what no input may make it do."""


class Fuzzer(Protocol):
    """Sends inputs to one door; one object a thread. `last` has the bytes of the latest input."""

    last: bytes

    def shoot(self, random: Random) -> str:
        """Send one input; returns the kind of answer. Raises FaultError."""
        ...


class _Unclosed(io.BufferedReader):
    """A reader that several responses of one connection are read from."""

    def close(self) -> None:
        """The socket is closed by whoever opened it."""


class _Shared:
    """A socket as http.client wants it."""

    def __init__(self, reader: io.BufferedReader) -> None:
        self._reader = reader

    def makefile(self, _: str) -> io.BufferedReader:
        """The one reader."""
        return self._reader


def read_responses(connection: socket.socket, count: int, method: str = "POST") -> list[tuple[int, bytes]]:
    """Up to `count` HTTP responses, status and body each; fewer if the connection ends before. Raises FaultError."""
    reader, found = _Unclosed(socket.SocketIO(connection, "r")), list[tuple[int, bytes]]()
    try:
        for _ in range(count):
            response = http.client.HTTPResponse(_Shared(reader), method=method)  # type: ignore[arg-type]
            response.begin()
            found.append((response.status, response.read()))
    except TimeoutError:
        if not found:
            raise FaultError(f"no answer for {ANSWER_SECONDS:g} s") from None
    except (OSError, http.client.HTTPException, ValueError):
        pass  # the connection has ended
    return found


def drain(connection: socket.socket, seconds: float = ANSWER_SECONDS) -> bytes:
    """What comes until the connection ends; raises FaultError if it does not end in time."""
    deadline, found = time.monotonic() + seconds, bytearray()
    try:
        while True:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            data = connection.recv(65536)
            if not data:
                return bytes(found)
            found += data[: max(0, 100_000 - len(found))]
    except TimeoutError:
        raise FaultError(f"the connection is open {seconds:g} s after the client's end of it was closed") from None
    except OSError:
        return bytes(found)


def address(url: str) -> tuple[str, int]:
    """host:port in two parts."""
    host, _, port = url.rpartition(":")
    return host, int(port)
