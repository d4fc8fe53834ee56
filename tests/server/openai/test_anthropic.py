"""Anthropic's Messages API of a real server: messages whole and as events, calls, faults, API keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import requests
from tests.conftest import BuildEngine
from tests.support.door_processes import write_keys
from tests.support.tool_models import ANSWER, ARGUMENTS, NOTE_SCHEMA, written_call
from tests.support.waiting import SECONDS

from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.launch import RunningServer
from kvseek.server.openai.anthropic import read_messages
from kvseek.server.openai.bodies import ChatBody
from kvseek.server.requests.keys import Tenant
from kvseek.server.settings import ServeSettings

pytestmark = pytest.mark.server

KEY = "k" * 32
NOTE = {
    "name": "note",
    "description": "Write a note.",
    "input_schema": NOTE_SCHEMA,
    "cache_control": {"type": "ephemeral"},
}
ASK = {"role": "user", "content": "Is the light lit?"}


@pytest.fixture(scope="module")
def directory(hermes: Path, build_engine: BuildEngine) -> Path:
    return build_engine(hermes, "full", "--max_batch_size", "4", "--max_seq_len", "8000")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ServeSettings:
    keys = write_keys(tmp_path_factory.mktemp("keys") / "keys", KEY)
    return ServeSettings(threads=1, api_key_file=str(keys))


class Asks:
    """Asks for messages in which the model is made to write given texts."""

    def __init__(self, server: RunningServer, tokenizer: Tokenizer) -> None:
        self.url, self.tokenizer = f"{server.openai_url}/messages", tokenizer
        self.headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}
        models = requests.get(f"{server.openai_url}/models", headers=self.headers, timeout=SECONDS)
        self.model = models.json()["data"][0]["id"]

    def post(self, written: str = "", path: str = "", **fields: Any) -> requests.Response:
        body: dict[str, Any] = {"model": self.model, "max_tokens": 400, "messages": [ASK]}
        if written:
            body["forced_tokens"] = [*self.tokenizer.encode(written, False), 1]
        return requests.post(self.url + path, json=body | fields, headers=self.headers, timeout=SECONDS)

    def message(self, written: str, **fields: Any) -> Any:
        reply = self.post(written, **fields)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def events(self, written: str, **fields: Any) -> list[Any]:
        reply = self.post(written, stream=True, **fields)
        assert reply.headers["content-type"].startswith("text/event-stream")
        events = []
        for block in reply.content.decode().strip().split("\n\n"):
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
        return events


@pytest.fixture(scope="module")
def asks(server: RunningServer, tokenizer: Tokenizer) -> Asks:
    return Asks(server, tokenizer)


def gathered(events: list[Any]) -> Any:
    """The message of a stream, as clients gather it."""
    message, pieces = None, dict[int, str]()
    for event in events:
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            (text,) = (value for name, value in event["delta"].items() if name != "type")
            pieces[event["index"]] = pieces.get(event["index"], "") + text
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    for number, block in enumerate(message["content"]):
        name = {"thinking": "thinking", "text": "text", "tool_use": "input"}[block["type"]]
        block[name] = json.loads(pieces[number]) if name == "input" else pieces[number]
    return message


def comparable(message: Any) -> Any:
    """A message without ids and what the cache held."""
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {name: value for name, value in message.items() if name not in ("id", "usage")} | {"content": content}


def test_a_conversation_with_tools(asks: Asks) -> None:
    events = asks.events(ANSWER, tools=[NOTE], system=[{"type": "text", "text": "You keep the log."}])
    kinds = [event["type"] for event in events]
    assert [kind for number, kind in enumerate(kinds) if kinds[number - 1] != kind] == [
        *("message_start", "ping"),
        *("content_block_start", "content_block_delta", "content_block_stop") * 3,
        *("message_delta", "message_stop"),
    ]
    message, streamed = asks.message(ANSWER, tools=[NOTE], system="You keep the log."), gathered(events)
    assert comparable(message) == comparable(streamed)
    thinking, text, call = message["content"]
    assert (thinking["thinking"], text["text"], call["name"], call["input"]) == (
        "I look.",
        "Yes.",
        "note",
        json.loads(ARGUMENTS),
    )
    assert (message["role"], message["stop_reason"], message["stop_sequence"]) == ("assistant", "tool_use", None)
    usage = message["usage"]
    assert usage["output_tokens"] == streamed["usage"]["output_tokens"] == len(asks.tokenizer.encode(ANSWER, False))
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == events[0]["message"]["usage"]["input_tokens"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "noted"}]}
    talk = [
        ASK,
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    call |= {"caller": None, "toolset_name": None}  # as the client's own types write it
    kept = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    last = asks.message("Done.", tools=[NOTE], system="You keep the log.", messages=talk, context_management=kept)
    assert ([block["text"] for block in last["content"]], last["stop_reason"]) == (["Done."], "end_turn")
    counted = asks.post(path="/count_tokens", tools=[NOTE], system="You keep the log.", messages=talk, max_tokens=None)
    assert counted.json() == {"input_tokens": last["usage"]["input_tokens"] + last["usage"]["cache_read_input_tokens"]}


def test_blocks_of_a_kind_become_one_text() -> None:
    thinking, result = {"type": "thinking", "thinking": "t"}, RESULT | {"content": [TEXT, TEXT]}
    talk = [
        {"role": "assistant", "content": [thinking, TEXT, CALL, thinking, TEXT]},
        {"role": "user", "content": [TEXT, result, TEXT, TEXT]},
    ]
    body = json.dumps({"model": "m", "max_tokens": 1, "messages": talk}).encode()
    chat = read_messages(body, Tenant()).body
    assert isinstance(chat, ChatBody)
    assert [(each["role"], each["content"]) for each in json.loads(bytes(chat.messages))] == [
        ("assistant", "xx"),
        ("user", "x"),
        ("tool", "xx"),
        ("user", "xx"),
    ]
    assert json.loads(bytes(chat.messages))[0]["reasoning"] == "tt"


def test_how_messages_end(asks: Asks) -> None:
    stopped = asks.message("One. Two. Three.", stop_sequences=["Two"])
    assert (stopped["content"][0]["text"], stopped["stop_reason"], stopped["stop_sequence"]) == (
        "One. ",
        "stop_sequence",
        "Two",
    )
    tokens = asks.tokenizer.encode(ANSWER, False)[:-12]
    cut = asks.message("", tools=[NOTE], max_tokens=len(tokens), forced_tokens=tokens)
    assert (cut["stop_reason"], [block["type"] for block in cut["content"]]) == ("max_tokens", ["thinking", "text"])


def test_choices_thinking_and_schemas(asks: Asks) -> None:
    off = {"type": "disabled"}
    schema = {"properties": {"kind": {"enum": ["red", "white"]}}, "required": ["kind"], "additionalProperties": False}
    light = {"name": "light", "input_schema": schema, "strict": True}
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "light"}):
        (call,) = asks.message("", tools=[light], tool_choice=choice, thinking=off)["content"]
        assert (call["type"], call["name"], call["input"]["kind"] in ("red", "white")) == ("tool_use", "light", True)
    text = written_call("hermes", "note", ARGUMENTS)
    silent = asks.message(text, tools=[NOTE], tool_choice={"type": "none"}, thinking=off)
    assert silent["content"] == [{"type": "text", "text": text}]
    config = {"format": {"type": "json_schema", "schema": {"enum": ["deep"]}}}
    assert asks.message("", output_config=config, thinking=off)["content"][0]["text"] == '"deep"'
    begun = asks.message("lit.", messages=[ASK, {"role": "assistant", "content": "It is "}], thinking=off)
    assert begun["content"][0]["text"] == "lit.", "the answer goes on"
    opening = asks.tokenizer.added_token("<think>")
    no_end = {str(asks.tokenizer.added_token("</think>")): -100}  # the model would go on thinking
    for fields, most in (
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, 7),
        ({"output_config": {"effort": "minimal"}}, 128),
    ):
        own = {"forced_tokens": [opening], "max_tokens": most + 20, "logit_bias": no_end, **fields}
        content = asks.message("", **own, temperature=0)["content"]
        assert [block["type"] for block in content] == ["thinking", "text"], "its end has come"


TEXT, RESULT = {"type": "text", "text": "x"}, {"type": "tool_result", "tool_use_id": "c"}
CALL = {"type": "tool_use", "id": "c", "name": "note", "input": {}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": 9000}, "max_tokens = 9000: must be <="),
        ({"messages": []}, "messages = []: must be at least one message"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type = 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content = []: must be at least one block"),
        ({"messages": [ASK, {"role": "assistant", "content": [TEXT, CALL | {"input": []}]}]}, "messages[1].content[1].input = "),
        ({"messages": [ASK, {"role": "user", "content": [TEXT, RESULT]}]}, "messages[1].content[1].tool_use_id = 'c'"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type = 'bash_20250124'"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name = 'a b'"),
        ({"tools": [{"name": "a", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tools": [NOTE], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name = 'x'"),
        ({"output_config": {"effort": "much"}}, "output_config.effort = 'much': must be none, minimal, low"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens = -1"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"n": 2}, "n: there is no such field"),
        ({"messages": [{"role": "user", "content": "the light " * 9000}]}, "prompt is too long: messages has"),
    ],
)  # fmt: skip
def test_faults_are_named(asks: Asks, fields: dict[str, Any], message: str) -> None:
    reply = asks.post(**fields)
    assert (reply.status_code, reply.json()["type"], reply.json()["error"]["type"]) == (
        400,
        "error",
        "invalid_request_error",
    )
    assert reply.json()["error"]["message"].startswith(message)


def test_every_error_has_anthropics_form(asks: Asks) -> None:
    assert asks.post(model="other").json()["error"]["type"] == "not_found_error"
    for reply, status, kind in (
        (requests.post(asks.url, json={}, timeout=SECONDS), 401, "authentication_error"),
        (
            requests.post(asks.url, json={}, headers={"x-api-key": "wrong"}, timeout=SECONDS),
            401,
            "authentication_error",
        ),
        (requests.get(asks.url, headers=asks.headers, timeout=SECONDS), 405, "invalid_request_error"),
        (requests.post(asks.url + "/batches", headers=asks.headers, timeout=SECONDS), 404, "not_found_error"),
    ):
        assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)
    bearer = {"authorization": f"Bearer {KEY}"}
    assert requests.get(asks.url.replace("messages", "models"), headers=bearer, timeout=SECONDS).status_code == 200
