"""Agents ask a real server: OpenAI's client, and programs of others, with tools, thinking and conversations that grow.

The tiny model is made to write an answer by `forced_tokens`, which the guide of the answer has to allow, token by token.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
from openai import OpenAI
from pydantic import BaseModel
from tests.conftest import ROOT, BuildEngine
from tests.support.tool_models import ANSWER, ARGUMENTS, written_call, written_calls
from tests.support.waiting import SECONDS

from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.launch import RunningServer

pytestmark = pytest.mark.server

AGENTS = ROOT / ".cache/agents/bin/python"
NOTE = {
    "type": "function",
    "function": {
        "name": "note",
        "description": "Write a note.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
            "required": ["text"],
            "additionalProperties": False,
        },
    },
}
LIGHT = {
    "type": "function",
    "function": {
        "name": "light",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}, "kind": {"enum": ["red", "white"]}},
            "required": ["on", "kind"],
            "additionalProperties": False,
        },
    },
}
TALK: list[Any] = [{"role": "user", "content": "Is the light lit?"}]


@pytest.fixture(scope="module")
def directory(hermes: Path, build_engine: BuildEngine) -> Path:
    return build_engine(hermes, "full", "--max_batch_size", "4", "--max_seq_len", "8000")


def ids(tokenizer: Tokenizer, text: str, ends: bool = True) -> list[int]:
    """Tokens that the model is made to write, and its end."""
    return [*tokenizer.encode(text, False), *([1] if ends else [])]


@pytest.mark.parametrize("streams", [True, False])
def test_a_conversation_with_tools(client: OpenAI, model: str, tokenizer: Tokenizer, streams: bool) -> None:
    ask: dict[str, Any] = {
        "model": model,
        "tools": [NOTE, LIGHT],
        "extra_body": {"forced_tokens": ids(tokenizer, ANSWER)},
    }
    if streams:
        options: Any = {"include_usage": True}
        with client.chat.completions.stream(messages=TALK, stream_options=options, **ask) as events:
            done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
            answer: Any = events.get_final_completion()
        assert [(event.name, event.arguments) for event in done] == [("note", ARGUMENTS)]
    else:
        answer = client.chat.completions.create(messages=TALK, **ask)
    message, usage = answer.choices[0].message, answer.usage
    assert (answer.choices[0].finish_reason, message.content) == ("tool_calls", "Yes.")
    assert message.reasoning_content == message.reasoning == "I look."
    (call,) = message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "note", ARGUMENTS)
    assert call.id.startswith("call_")
    assert usage.completion_tokens_details.reasoning_tokens == len(tokenizer.encode("\nI look.\n", False))
    talk = [*TALK, message, {"role": "tool", "tool_call_id": call.id, "content": "noted"}]
    again = client.chat.completions.create(
        model=model,
        messages=talk,
        tools=[NOTE, LIGHT],
        extra_body={"forced_tokens": ids(tokenizer, "Done.")},  # type: ignore[list-item]
    )
    assert (again.choices[0].message.content, again.choices[0].finish_reason) == ("Done.", "stop")
    assert again.choices[0].message.tool_calls is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "light"}}])
def test_a_model_that_would_not_call_has_to(client: OpenAI, model: str, choice: Any) -> None:
    """A random model writes a call whose arguments follow the schema."""
    for seed in range(4):
        answer = client.chat.completions.create(
            model=model, messages=TALK, tools=[LIGHT], tool_choice=choice, parallel_tool_calls=False, seed=seed, max_tokens=400,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )  # fmt: skip
        message = answer.choices[0].message
        assert (answer.choices[0].finish_reason, message.content) == ("tool_calls", None)
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert isinstance(call, openai.types.chat.ChatCompletionMessageFunctionToolCall)
        arguments = json.loads(call.function.arguments)
        assert set(arguments) == {"on", "kind"}
        assert (type(arguments["on"]), arguments["kind"] in ("red", "white")) == (bool, True)


def test_what_the_guide_forbids_ends_the_request(client: OpenAI, model: str, tokenizer: Tokenizer) -> None:
    """In `auto` a call that has begun follows the schema, and its function is one of the tools."""
    for text in (written_call("hermes", "note", '{"text": 5}'), written_call("hermes", "other", "{}")):
        with pytest.raises(openai.APIStatusError, match="cannot be followed") as caught:
            client.chat.completions.create(
                model=model, messages=TALK, tools=[NOTE], extra_body={"forced_tokens": ids(tokenizer, text)}
            )  # type: ignore[list-item]
        assert caught.value.status_code == 400


def test_without_tools_a_call_is_text(client: OpenAI, model: str, tokenizer: Tokenizer) -> None:
    text = written_call("hermes", "note", '{"text": 5}')
    for fields in ({}, {"tools": [NOTE], "tool_choice": "none"}):
        body = {"forced_tokens": ids(tokenizer, text)}
        answer = client.chat.completions.create(model=model, messages=TALK, extra_body=body, **fields)  # type: ignore[call-overload]
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "stop")


def test_an_answer_that_is_cut_off_has_the_arguments_so_far(client: OpenAI, model: str, tokenizer: Tokenizer) -> None:
    tokens = ids(tokenizer, ANSWER, ends=False)[:-12]
    answer = client.chat.completions.create(
        model=model, messages=TALK, tools=[NOTE], max_tokens=len(tokens), extra_body={"forced_tokens": tokens}
    )  # type: ignore[call-overload]
    assert answer.choices[0].finish_reason == "length"
    (call,) = answer.choices[0].message.tool_calls
    assert ARGUMENTS.startswith(call.function.arguments)
    assert len(call.function.arguments) > 10


class Port(BaseModel):
    """A structured answer."""

    open: bool
    kind: str


def test_a_structured_answer_begins_after_thinking(client: OpenAI, model: str, tokenizer: Tokenizer) -> None:
    text = '<think>\nI {look}.\n</think>\n\n{"open": true, "kind": "deep"}'
    parsed = client.chat.completions.parse(
        model=model, messages=TALK, response_format=Port, extra_body={"forced_tokens": ids(tokenizer, text)}
    )
    assert parsed.choices[0].message.parsed == Port(open=True, kind="deep")
    assert parsed.choices[0].message.model_extra is not None
    assert parsed.choices[0].message.model_extra["reasoning"] == "I {look}."


@pytest.mark.parametrize(
    ("fields", "budget"),
    [({"thinking_token_budget": 0}, 0), ({"thinking_token_budget": 7}, 7), ({"reasoning_effort": "minimal"}, 128)],
)
def test_a_budget_of_thinking(
    client: OpenAI, model: str, tokenizer: Tokenizer, fields: dict[str, Any], budget: int
) -> None:
    opening, closing = map(tokenizer.added_token, ("<think>", "</think>"))
    body = {
        "forced_tokens": [opening],
        **fields,
        "return_token_ids": True,
        "min_p": 0.0,
        "logit_bias": {str(closing): -100},  # the model would go on thinking
    }
    answer = client.chat.completions.create(model=model, messages=TALK, max_tokens=budget + 20, extra_body=body)
    tokens: list[int] = answer.choices[0].token_ids  # type: ignore[attr-defined]
    assert tokens.index(closing) == budget + 1  # type: ignore[arg-type]
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == budget


def test_thinking_is_switched_off(client: OpenAI, model: str, tokenizer: Tokenizer) -> None:
    text = "<think>x</think>"
    for fields in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        body = {"forced_tokens": ids(tokenizer, text), **fields}
        message = client.chat.completions.create(model=model, messages=TALK, extra_body=body).choices[0].message
        assert message.content == text, "nothing is taken for thinking that the template has ended"
        assert "reasoning" not in (message.model_extra or {})


@pytest.mark.parametrize("streams", [True, False])
def test_token_ids(server: RunningServer, model: str, tokenizer: Tokenizer, streams: bool) -> None:
    forced = ids(tokenizer, "A harbour ⚓.")
    for path, prompt in (("chat/completions", {"messages": TALK}), ("completions", {"prompt": [5, 6, 7]})):
        body = {
            "model": model,
            "forced_tokens": forced,
            "return_token_ids": True,
            "stream": streams,
            "max_tokens": 99,
            **prompt,
        }
        reply = requests.post(f"{server.openai_url}/{path}", json=body, timeout=SECONDS)
        lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
        events = list(map(json.loads, lines)) if streams else [reply.json()]
        choices = [event["choices"][0] for event in events]
        assert [token for choice in choices for token in choice.get("token_ids", ())] == forced[:-1]
        holders = events if path == "chat/completions" else choices
        (told,) = [holder["prompt_token_ids"] for holder in holders if "prompt_token_ids" in holder]
        assert told == [5, 6, 7] or path == "chat/completions"
        assert len(told) > 2


def test_texts_and_conversations_are_tokenised(server: RunningServer, model: str, tokenizer: Tokenizer) -> None:
    def post(path: str, **body: Any) -> Any:
        reply = requests.post(f"{server.openai_url.removesuffix('/v1')}/{path}", json=body, timeout=SECONDS)
        return reply.json() if reply.ok else (reply.status_code, reply.json()["error"]["param"])

    text = "A <think> ⚓"
    told = post("tokenize", model=model, prompt=text, return_token_strs=True)
    assert told["tokens"] == tokenizer.encode(text)
    assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 8000)
    assert "".join(told["token_strs"][:3]).startswith("A <think>")
    assert post("detokenize", tokens=told["tokens"])["prompt"] == text
    talk = post("tokenize", messages=TALK, tools=[NOTE], chat_template_kwargs={"enable_thinking": False})
    body = {
        "model": model,
        "messages": TALK,
        "tools": [NOTE],
        "max_tokens": 1,
        "return_token_ids": True,
        "reasoning_effort": "none",
    }
    asked = requests.post(f"{server.openai_url}/chat/completions", json=body, timeout=SECONDS).json()
    assert talk["tokens"] == asked["prompt_token_ids"]
    assert talk["token_strs"] is None
    assert post("tokenize", prompt="x", messages=TALK) == (400, "prompt")
    assert post("tokenize") == (400, "prompt")
    assert post("detokenize") == (400, "tokens")
    assert post("detokenize", tokens=[400]) == (400, "tokens")
    assert post("tokenize", model="other", prompt="x") == (404, "model")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [NOTE] * 2}, "tools[1].function.name", "must be another name than before"),
        ({"tools": [LIGHT | {"type": "web_search"}]}, "tools[0].type", 'must be "function"'),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "1 to 128 letters"),
        ({"tools": [{"type": "function", "function": {"name": "a", "x": 1}}]}, "tools", "there is no such field"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters.type",
            'must be "object"',
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"properties": []}}}]},
            "tools[0].function.parameters.properties",
            "must be an object",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": [1]}}]},
            "tools[0].function.parameters",
            "a JSON schema",
        ),
        ({"tools": [LIGHT] * 129}, "tools", "must be <= 128 tools"),
        ({"tool_choice": "required"}, "tool_choice", "without tools"),
        ({"tools": [NOTE], "tool_choice": "any"}, "tool_choice", '"none", "auto", "required"'),
        (
            {"tools": [NOTE], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
            "one of the tools",
        ),
        ({"thinking_token_budget": -1}, "thinking_token_budget", "must be in"),
        ({"reasoning_effort": "much"}, "reasoning_effort", "must be none, minimal, low, medium, high, xhigh, max"),
        ({"messages": [*TALK, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id", "the id of a call"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}]}]},
            "messages",
            "is no JSON",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "[]"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
            "must be a JSON object",
        ),
        ({"messages": [{"role": "user", "content": "x", "reasoning": "y"}]}, "messages[0].reasoning", "must be null"),
    ],
)  # fmt: skip
def test_faults_are_named(server: RunningServer, model: str, fields: dict[str, Any], param: str, message: str) -> None:
    body = {"model": model, "messages": TALK} | fields
    reply = requests.post(f"{server.openai_url}/chat/completions", json=body, timeout=SECONDS)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert message in error["message"]


def test_a_strict_schema_that_cannot_be_followed_is_refused_and_another_followed_in_part(
    client: OpenAI, model: str, tokenizer: Tokenizer
) -> None:
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "not": {"required": ["x"]}}
    tool: Any = {"type": "function", "function": {"name": "light", "parameters": schema, "strict": True}}
    with pytest.raises(
        openai.BadRequestError, match=r"cannot be followed: .*Unimplemented keys: \[\"not\"\]"
    ) as caught:
        client.chat.completions.create(model=model, messages=TALK, tools=[tool], tool_choice="required")
    assert caught.value.param == "tools"
    tool["function"]["strict"] = False
    body = {"forced_tokens": ids(tokenizer, written_call("hermes", "light", '{"on": true}'))}
    answer = client.chat.completions.create(model=model, messages=TALK, tools=[tool], extra_body=body)
    assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.skipif(not AGENTS.exists(), reason="the programs are not installed: run make test-agents")
@pytest.mark.parametrize("program", ["litellm", "langchain", "pydantic_ai", "pydantic_ai_responses", "anthropic"])
def test_programs_of_others_call_tools(server: RunningServer, model: str, tokenizer: Tokenizer, program: str) -> None:
    answers = json.dumps([ids(tokenizer, ANSWER), ids(tokenizer, "It is noted.")])
    command = [str(AGENTS), str(ROOT / "tests/support/agent_programs.py"), program, server.openai_url, model]
    own = {**os.environ, "PYTHONPATH": "", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(command, input=answers, env=own, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(told["call"]) == json.loads(ARGUMENTS)
    assert (told["said"], told["last"], told["turns"]) == ("Yes.", "It is noted.", 2)
    assert told.get("end", "tool_calls") == "tool_calls"
    assert told.get("thought", "I look.") == "I look."
    assert told.get("too_long", True), "the error is the one by which programs shorten a conversation"


def test_several_calls_in_one_answer(client: OpenAI, model: str, tokenizer: Tokenizer) -> None:
    text = written_calls(
        "hermes",
        [written_call("hermes", "note", ARGUMENTS), written_call("hermes", "light", '{"on": true, "kind": "red"}')],
    )
    answer = client.chat.completions.create(
        model=model, messages=TALK, tools=[NOTE, LIGHT], extra_body={"forced_tokens": ids(tokenizer, text)}
    )  # type: ignore[list-item]
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert [call.function.name for call in calls] == ["note", "light"]  # type: ignore[union-attr]
    assert len({call.id for call in calls}) == 2
