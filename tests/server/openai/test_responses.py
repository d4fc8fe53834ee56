"""The Responses API of a real server: OpenAI's client, streams, calls over several responses, what is kept, and faults."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import openai
import pytest
import requests
from openai import OpenAI
from pydantic import BaseModel
from tests.conftest import BuildEngine
from tests.server.fuzz.mutations import mutated_json
from tests.support.tool_models import ANSWER, ARGUMENTS, NOTE_SCHEMA
from tests.support.waiting import SECONDS

from kvseek.core.config import EngineConfig
from kvseek.core.errors import CodedError, ErrorCode, KvseekError, QueueFullError, RequestError
from kvseek.core.request import FinishReason, LogProbs, Request, SamplingConfig, StepOutput
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.http.errors import HttpError
from kvseek.server.launch import RunningServer
from kvseek.server.openai.answers import AnswerForm, AnswerForms
from kvseek.server.openai.anthropic import MESSAGES_FORMAT, read_messages
from kvseek.server.openai.choices import Choice, make_choices, usage
from kvseek.server.openai.fields import FieldError, openai_error
from kvseek.server.openai.kept_responses import OWN_BYTES, KeptResponses
from kvseek.server.openai.responses import Responses, read_items
from kvseek.server.requests.keys import Tenant

pytestmark = pytest.mark.server

NOTE: dict[str, Any] = {
    "type": "function",
    "name": "note",
    "strict": True,
    "parameters": NOTE_SCHEMA,
}


@pytest.fixture(scope="module")
def directory(hermes: Path, build_engine: BuildEngine) -> Path:
    return build_engine(hermes, "full", "--max_batch_size", "4", "--max_seq_len", "8000")


class Script:
    """Asks for responses in which the model is made to write given texts."""

    def __init__(self, client: OpenAI, model: str, tokenizer: Tokenizer) -> None:
        self.client, self.model, self.tokenizer = client, model, tokenizer

    def fields(self, written: str, **fields: Any) -> dict[str, Any]:
        tokens = [*self.tokenizer.encode(written, False), 1]
        return {"model": self.model, "input": "Is the light lit?", "extra_body": {"forced_tokens": tokens}} | fields

    def create(self, written: str, **fields: Any) -> Any:
        return self.client.responses.create(**self.fields(written, **fields))

    def stream(self, written: str, **fields: Any) -> tuple[list[Any], Any]:
        with self.client.responses.stream(**self.fields(written, **fields)) as stream:
            events = list(stream)
            final = [event.response for event in events if event.type in ("response.completed", "response.incomplete")]
            return events, final[0]


@pytest.fixture(scope="module")
def script(client: OpenAI, model: str, tokenizer: Tokenizer) -> Script:
    return Script(client, model, tokenizer)


def said(response: Any) -> list[tuple[str, Any]]:
    """What a response consists of."""
    told = {"reasoning": lambda item: item.content[0].text, "message": lambda item: item.content[0].text}
    told["function_call"] = lambda item: (item.name, item.arguments)
    return [(item.type, told[item.type](item)) for item in response.output]


WHOLE = [("reasoning", "I look."), ("message", "Yes."), ("function_call", ("note", ARGUMENTS))]


@pytest.mark.parametrize("streams", [True, False])
def test_calls_over_several_responses(script: Script, streams: bool) -> None:
    def ask(text: str, **fields: Any) -> Any:
        return script.stream(text, **fields)[1] if streams else script.create(text, **fields)

    first = ask(ANSWER, tools=[NOTE], instructions="You keep the log.", metadata={"watch": "dog"})
    assert said(first) == WHOLE
    assert (first.status, first.instructions, first.metadata) == ("completed", "You keep the log.", {"watch": "dog"})
    assert first.usage.output_tokens == len(script.tokenizer.encode(ANSWER, False))
    assert first.usage.output_tokens_details.reasoning_tokens == len(script.tokenizer.encode("\nI look.\n", False))
    output = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "noted"}
    second = ask("Done.", tools=[NOTE], input=[output], previous_response_id=first.id)
    assert (second.output_text, second.previous_response_id) == ("Done.", first.id)
    assert second.usage.input_tokens > first.usage.total_tokens - 20, (
        "with what was said before, but for the instructions"
    )
    # The same without what the server keeps.
    items = [
        {"role": "user", "content": "Is the light lit?"},
        *(item.model_dump(exclude_unset=True) for item in first.output),
    ]
    items[-1] |= {"namespace": None, "caller": None}
    summary: Any = {"summary": "detailed"}
    alone = ask("Done.", tools=[NOTE], input=[*items, output | {"name": "note"}], store=False, reasoning=summary)
    assert alone.usage.input_tokens == second.usage.input_tokens
    third = ask("Yes.", input="Sure?", previous_response_id=second.id)
    assert third.usage.input_tokens > second.usage.input_tokens - 200
    fork = ask("Yes.", input="Sure?", tools=[NOTE], previous_response_id=second.id)
    assert fork.output_text == "Yes."


def without_parsed(item: Any) -> Any:
    """What the server has sent of an item."""
    own = {name: value for name, value in item.items() if name != "parsed_arguments"}
    if own.get("content"):
        own["content"] = [{name: value for name, value in part.items() if name != "parsed"} for part in own["content"]]
    return own


def test_events_come_in_order_and_make_the_response(script: Script) -> None:
    events, final = script.stream(ANSWER, tools=[NOTE])
    assert [event.sequence_number for event in events] == sorted({event.sequence_number for event in events})
    kinds = [event.type.removeprefix("response.") for event in events]
    short = [kind for number, kind in enumerate(kinds) if kinds[number - 1] != kind]
    block = [
        "output_item.added",
        "content_part.added",
        "TEXT.delta",
        "TEXT.done",
        "content_part.done",
        "output_item.done",
    ]
    assert short == [
        *("created", "in_progress"),
        *(kind.replace("TEXT", "reasoning_text") for kind in block),
        *(kind.replace("TEXT", "output_text") for kind in block),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    done = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
    assert done == [without_parsed(item.to_dict()) for item in final.output]
    assert said(final) == WHOLE
    for number, item in enumerate(final.output):
        deltas = [event.delta for event in events if event.type.endswith(".delta") and event.output_index == number]
        assert "".join(deltas) in (WHOLE[number][1], WHOLE[number][1][1])
        assert {
            event.item_id
            for event in events
            if getattr(event, "output_index", None) == number and hasattr(event, "item_id")
        } == {item.id}


class Port(BaseModel):
    """A structured answer."""

    open: bool
    kind: str


def test_structured_answers(script: Script) -> None:
    text = '<think>\nI {look}.\n</think>\n\n{"open": true, "kind": "deep"}'
    parsed = script.client.responses.parse(**script.fields(text, text_format=Port))
    assert parsed.output_parsed == Port(open=True, kind="deep")
    with script.client.responses.stream(**script.fields(text, text_format=Port)) as stream:
        assert stream.get_final_response().output_parsed == Port(open=True, kind="deep")
    plain: dict[str, Any] = {"model": script.model, "input": "x", "reasoning": {"effort": "none"}}
    schema: Any = {"type": "json_schema", "name": "port", "schema": {"enum": ["deep"]}}
    assert script.client.responses.create(text={"format": schema}, **plain).output_text == '"deep"'
    either = script.client.responses.create(text={"format": {"type": "json_object"}}, max_output_tokens=9, **plain)
    assert either.output_text.lstrip().startswith("{")


@pytest.mark.parametrize("streams", [True, False])
def test_an_answer_that_is_cut_off_is_incomplete(script: Script, streams: bool) -> None:
    tokens = script.tokenizer.encode(ANSWER, False)[:-12]
    fields: dict[str, Any] = {
        "tools": [NOTE],
        "max_output_tokens": len(tokens),
        "extra_body": {"forced_tokens": tokens},
    }
    response = script.stream("", **fields)[1] if streams else script.create("", **fields)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in response.output] == ["completed", "completed", "incomplete"]
    assert ARGUMENTS.startswith(response.output[2].arguments)
    assert script.create("Yes.", previous_response_id=response.id).output_text == "Yes.", "without the broken call"
    fields = {"tools": [NOTE], "extra_body": {"forced_tokens": script.tokenizer.encode(ANSWER, False), "stop": ["lit"]}}
    stopped = script.stream("", **fields)[1] if streams else script.create("", **fields)
    assert (stopped.status, stopped.output[2].status) == ("incomplete", "incomplete"), "within a call"
    assert stopped.incomplete_details.reason == "stop"
    assert script.create("Yes.", previous_response_id=stopped.id).output_text == "Yes."
    for written in ("<think>", "<think>\n"):  # nothing has been said yet
        begun = script.tokenizer.encode(written, False)
        few: dict[str, Any] = {"max_output_tokens": len(begun), "extra_body": {"forced_tokens": begun}}
        empty = script.stream("", **few)[1] if streams else script.create("", **few)
        assert (empty.status, empty.output) == ("incomplete", [])
        assert script.create("Yes.", previous_response_id=empty.id).output_text == "Yes."


@pytest.mark.parametrize("streams", [True, False])
def test_log_probabilities_are_those_of_the_text(script: Script, streams: bool) -> None:
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    text = "<think>\nI look.\n</think>\n\nYes."
    response = script.stream(text, **fields)[1] if streams else script.create(text, **fields)
    found = response.output[1].content[0].logprobs
    assert "".join(each.token for each in found).strip() == "Yes."
    assert {len(each.top_logprobs) for each in found} == {2}
    long = script.create("Yes. " * 300, top_logprobs=20)
    assert len(long.output[0].content[0].logprobs) > 300, "kept, however many values it has"
    assert script.client.responses.retrieve(long.id).output_text == long.output_text


def test_responses_are_kept_shown_and_forgotten(script: Script, server: RunningServer) -> None:
    kept, gone = script.create("Yes."), script.create("Yes.", store=False)
    shown = script.client.responses.retrieve(kept.id)
    assert shown.to_dict() == kept.to_dict()
    for absent in (gone.id, "resp_never"):
        with pytest.raises(openai.NotFoundError, match=f"Response with id '{absent}' not found"):
            script.client.responses.retrieve(absent)
        with pytest.raises(openai.BadRequestError, match=f"Previous response with id '{absent}' not found") as caught:
            script.create("Yes.", previous_response_id=absent)
        assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")
    with pytest.raises(openai.BadRequestError, match="there is no such parameter"):
        script.client.responses.retrieve(kept.id, include=["message.output_text.logprobs"])
    script.client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        script.client.responses.retrieve(kept.id)


@pytest.mark.parametrize("streams", [True, False])
def test_items_of_kept_responses_are_input_by_their_ids(script: Script, streams: bool) -> None:
    first = script.stream(ANSWER, tools=[NOTE])[1] if streams else script.create(ANSWER, tools=[NOTE])
    asked = {"role": "user", "content": "Is the light lit?"}
    output = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "noted"}
    items = [item.model_dump(exclude_unset=True) for item in first.output]
    whole = script.create("Done.", tools=[NOTE], input=[asked, *items, output])
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    short = script.create("Done.", tools=[NOTE], input=[asked, *references, output])
    assert short.usage.input_tokens == whole.usage.input_tokens
    long = script.create("Yes. " * 300, top_logprobs=20)
    again = script.create("Yes.", input=[asked, {"type": "item_reference", "id": long.output[0].id}, asked])
    assert again.usage.input_tokens > 300, "however many log probabilities it has"
    with pytest.raises(openai.BadRequestError, match="must be another one than before") as twice:
        script.create("Yes.", input=[references[1], references[1]])
    assert twice.value.param == "input[1].id"
    gone = script.create("Yes.", store=False).output[0].id
    for absent in (gone, "msg_1", "x", f"{first.output[1].id}0"):
        with pytest.raises(openai.NotFoundError, match=f"Item with id '{absent}' not found") as caught:
            script.create("Yes.", input=[asked, {"type": "item_reference", "id": absent}])
        assert (caught.value.param, caught.value.code) == ("input[1].id", "item_not_found")


def test_what_is_kept_is_bounded_and_goes_by_use() -> None:
    one, other = Tenant(b"1", "one"), Tenant(b"2", "other")
    kept = KeptResponses(most_bytes=4 * OWN_BYTES - 1)
    kept.add("a", b"A", [b"1"], None, one)
    kept.add("b", b"B", [b"2", b"3"], "a", one)
    kept.add("c", b"C", [b"4"], None, one)
    assert kept.messages("b", one) == [b"1", b"2", b"3"]
    with pytest.raises(HttpError, match="'b' not found"):
        kept.messages("b", other)
    kept.add("d", b"D", [], None, one)
    for lost in ("c",):  # used before the others
        with pytest.raises(HttpError, match="not found"):
            kept.get(lost, one)
    kept.add("e", b"E", [], "d", one)
    kept.add("f", b"F", [], "e", one)
    with pytest.raises(HttpError, match="not found"):
        kept.get("a", one)
    assert kept.messages("f", one) == []
    kept.delete("d", one)
    assert kept.get("f", one) == b"F"
    with pytest.raises(HttpError, match="Previous response with id 'f' not found"):
        kept.messages("f", one)


def test_an_owner_makes_room_with_its_own_responses() -> None:
    one, other = Tenant(b"1", "one"), Tenant(b"2", "other")
    kept = KeptResponses(most_bytes=6 * OWN_BYTES)
    kept.add("a", b"A", [], None, one)
    for number in range(9):
        kept.add(f"{number}", b"B" * OWN_BYTES, [], None, other)
    kept.add("large", b"B" * 6 * OWN_BYTES, [], None, other)
    assert kept.get("a", one) == b"A"
    for lost in ("0", "8", "large"):
        with pytest.raises(HttpError, match="not found"):
            kept.get(lost, other)
    kept.add("small", b"C" * 3 * OWN_BYTES, [], None, other)
    assert (kept.get("a", one), len(kept.get("small", other))) == (b"A", 3 * OWN_BYTES), "its bytes are counted off"


def test_streams_hold_bytes_of_their_owners_responses_and_the_largest_of_them_ends() -> None:
    one, other = Tenant(b"1", "one"), Tenant(b"2", "other")
    kept = KeptResponses(most_bytes=6 * OWN_BYTES)
    kept.add("a", b"A", [], None, one)
    kept.add("b", b"B", [], None, other)
    small, large = kept.unfinished(other), kept.unfinished(other)
    small.add(OWN_BYTES)
    large.add(2 * OWN_BYTES)
    large.add(OWN_BYTES)
    assert kept.find("b", other) is None, "it made room for a stream of its owner"
    assert kept.find("a", one) == b"A"
    small.add(OWN_BYTES)
    assert large.ended, "streams alone are too much"
    with pytest.raises(QueueFullError, match="bytes of the response are held until it ends"):
        large.add(0)
    own = kept.unfinished(one)
    own.add(2 * OWN_BYTES)
    assert kept.find("a", one) == b"A", "the bytes of a stream that has ended are counted off"
    small.close()
    small.close()
    kept.add("large", b"L" * 2 * OWN_BYTES, [], None, one)
    own.close()
    kept.add("c", b"C" * OWN_BYTES, [], None, other)
    assert None not in (kept.find("large", one), kept.find("c", other))


def test_a_stream_ends_when_there_is_no_room_for_what_it_holds(tokenizer: Tokenizer) -> None:
    kept = KeptResponses(most_bytes=20_000)
    asked = Responses(tokenizer, kept).read(b'{"model": "m", "input": "x", "top_logprobs": 5}', Tenant())
    answer = asked.answer(AnswerForm(), 1)
    choice = Choice(Request((5,), 900, SamplingConfig(logprobs=5)), tokenizer, (), True)
    answer.begin(1)
    token = tokenizer.encode("light", False)[-1]
    output = StepOutput(1, token, logprobs=LogProbs(-0.5, ((token, -0.5), *((each, -9.0) for each in range(4)))))

    def write() -> None:
        for _ in range(100):
            for piece in choice.push([output]):
                answer.pieces(0, piece)

    with pytest.raises(QueueFullError) as caught:
        write()
    event = json.loads(answer.failed(caught.value)[1].split(b"data: ")[1])
    assert event["response"]["error"]["code"] == "rate_limit_exceeded"
    answer.release()
    kept.add("a", b"A" * 15_000, [], None, Tenant())
    assert kept.find("a", Tenant()) is not None, "nothing is counted of it any more"


def test_a_time_limit_is_told_from_too_few_tokens(tokenizer: Tokenizer) -> None:
    for reason, told in ((FinishReason.TIMEOUT, "timeout"), (FinishReason.LENGTH, "max_output_tokens")):
        answer = (
            Responses(tokenizer, KeptResponses())
            .read(b'{"model": "m", "input": "x"}', Tenant())
            .answer(AnswerForm(), 1)
        )
        (piece,) = Choice(Request((5,), 9), tokenizer, (), False).push([StepOutput(1, 7, reason)])
        response = json.loads(answer.whole([piece], usage(1, 1, 0)))
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": told})
        assert response["output"][0]["status"] == "incomplete"


CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RETURNED = {"type": "function_call_output", "call_id": "c", "output": "x"}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": None}, "input", "input is missing"),
        ({"input": []}, "input", "at least one item"),
        ({"input": 5}, "input", "Expected `array`"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type", "'web_search_call': must be \"message\""),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "text alone"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "must be user or assistant"),
        ({"input": [{"role": "user"}]}, "input[0].content", "is missing"),
        ({"input": [{"role": "user", "content": "x", "y": 1}]}, "input[0]", "input[0].y: there is no such field"),
        ({"input": [CALLED | {"arguments": "{"}]}, "input", "input[0].arguments: is no JSON"),
        ({"input": [CALLED, RETURNED | {"call_id": "d"}]}, "input[1].call_id", "the id of a call"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0].type", "text alone"),
        ({"input": [{"type": "item_reference"}]}, "input[0]", "missing required field `id`"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content", "cannot decrypt"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "no tools of its own"),
        ({"tools": [NOTE | {"name": "a b"}]}, "tools[0].name", "1 to 128 letters"),
        ({"tools": [NOTE], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.type", '"function"'),
        ({"tools": [NOTE], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name", "one of the tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "an object"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", "text.format.type: Invalid enum value"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "text.verbosity = 'low': must be \"medium\""),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", "must be none, minimal, low"),
        ({"reasoning": {"summary": "long"}}, "reasoning", "reasoning.summary: Invalid enum value"),
        ({"include": ["file_search_call.results"]}, "include[0]", "'file_search_call.results': must be message"),
        ({"metadata": {"a": "x" * 513}}, "metadata", "of length <= 512"),
        ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
        ({"max_output_tokens": 9000}, "max_output_tokens", "max_seq_len"),
        ({"top_logprobs": 21}, "top_logprobs", "[0, 20]"),
        ({"top_logprobs": 2, "tools": [NOTE]}, "top_logprobs", "without tools"),
        ({"background": True}, "background", "kvseek does not support it"),
        ({"conversation": "conv_1"}, "conversation", "kvseek does not support it"),
        ({"truncation": "auto"}, "truncation", "kvseek does not support it"),
        ({"messages": []}, "messages", "there is no such field"),
        ({"model": "other"}, "model", "not served here"),
    ],
)  # fmt: skip
def test_faults_are_named(server: RunningServer, model: str, fields: dict[str, Any], param: str, message: str) -> None:
    body = {"model": model, "input": "x"} | fields
    reply = requests.post(f"{server.openai_url}/responses", json=body, timeout=SECONDS)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (404 if param == "model" else 400, param)
    assert message in error["message"]


def test_a_prompt_that_is_too_long_has_openais_code(server: RunningServer, model: str) -> None:
    body = {"model": model, "input": "the light " * 9000}
    error = requests.post(f"{server.openai_url}/responses", json=body, timeout=SECONDS).json()["error"]
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")


def test_what_answers_need_of_a_body_is_counted_and_no_more_is_held(tokenizer: Tokenizer) -> None:
    fields = {"input": "x" * 5000, "instructions": "y" * 3000, "tools": [NOTE], "text": {"format": {"type": "text"}}}
    for store, held in ((True, 8000), (False, 3000)):
        body = bytearray(json.dumps({"model": "m", "store": store} | fields).encode())
        answer = Responses(tokenizer, KeptResponses()).read(body, Tenant()).answer(AnswerForm(), 1)
        body.clear()  # fails while anything refers to it
        assert held < answer.held_bytes < held + 1500
        assert b"yyy" in answer.begin(1)[0]


def test_a_stream_that_fails_ends_with_response_failed(tokenizer: Tokenizer) -> None:
    asked = Responses(tokenizer, KeptResponses()).read(b'{"model": "m", "input": "x"}', Tenant())
    answer = asked.answer(AnswerForm(), 1)
    first, _ = answer.begin(1)
    for error, status, code in (
        (CodedError(ErrorCode.UNAVAILABLE, "shutting down"), 503, "server_error"),
        (RequestError("seed: cannot be followed"), 400, "invalid_prompt"),
    ):
        found, event = answer.failed(error)
        name, data = event.decode().strip().split("\n")
        last = json.loads(data.removeprefix("data: "))
        assert (found, name, last["type"]) == (status, "event: response.failed", "response.failed")
        assert last["response"]["error"] == {"code": code, "message": str(error)}
        assert last["response"]["id"] == json.loads(first.decode().split("data: ")[1])["response"]["id"]


@pytest.mark.parametrize("item", [b"{}", b"1", b'{"role":"user","content":""}', b'{"role":"user","content":[1,1,1]}'])
def test_too_many_items_are_refused_before_they_are_built(item: bytes) -> None:
    raw = b"[%b]" % b",".join([item] * 40_000)
    for read in (
        lambda: read_items(msgspec.Raw(raw), 0),
        lambda: MESSAGES_FORMAT.read(b'{"messages":%b}' % raw).asked(),
        lambda: MESSAGES_FORMAT.read(b'{"system":%b}' % raw).asked(),
    ):
        tracemalloc.start()
        try:
            with pytest.raises(
                FieldError, match=r"(input|messages|system) = 'more': must be <= 32768 texts and commas"
            ):
                read()
            assert tracemalloc.get_traced_memory()[1] < 100_000 + 2 * len(raw)
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("kind", ["responses", "messages"])
def test_hostile_bodies_are_refused_by_name(kind: str, tokenizer: Tokenizer, config: EngineConfig) -> None:
    """What a client may do wrong ends with an error that is kvseek's own, mostly of a field."""
    read = Responses(tokenizer, KeptResponses()).read if kind == "responses" else read_messages
    random, forms, served, named = Random(5), AnswerForms(tokenizer), 0, 0
    for _ in range(3000):
        body = mutated_json(random, kind)
        try:
            asked = read(body, Tenant())
            choices, count = make_choices(asked.body, Tenant(), tokenizer, config, forms)
            served += len(asked.answer(choices[0].form, count).begin(1)) > 0
        except KvseekError as error:
            status, data = openai_error(error)
            assert status in (400, 404), body
            named += json.loads(data)["error"]["param"] is not None
    assert served > 100
    assert named > 1500
