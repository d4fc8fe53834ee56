"""Guided decoding over a real server: OpenAI's client, and both of Triton's models over HTTP."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
from openai import OpenAI
from tests.support.waiting import SECONDS

from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.launch import RunningServer

pytestmark = pytest.mark.server
TALK: Any = [{"role": "user", "content": "one ship"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "ship": {"enum": ["Ark", "Œdipus"]},
        "year": {"type": "integer", "minimum": 1900, "maximum": 1931},
        "log": {"type": "array", "items": {"type": "string", "pattern": "^[a-c]{2}$"}, "maxItems": 2},
    },
    "required": ["ship", "year", "log"],
    "additionalProperties": False,
}
SLOW = {"type": "integer", "multipleOf": 999_999_937}  # takes as long to compile as it may, and is refused then


def form(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "ship", "schema": schema, "strict": True}}


def check(text: str | None) -> None:
    """Judge an answer by SCHEMA."""
    value = json.loads(text or "")
    assert list(value) == ["ship", "year", "log"]
    assert value["ship"] in ("Ark", "Œdipus")
    assert type(value["year"]) is int
    assert 1900 <= value["year"] <= 1931
    assert len(value["log"]) <= 2
    assert all(len(text) == 2 and set(text) <= set("abc") for text in value["log"])


def generate(server: RunningServer, model: str, **fields: Any) -> requests.Response:
    url = f"http://{server.http_url}/v2/models/{model}/generate"
    return requests.post(url, json=fields, timeout=SECONDS)


def test_answers_follow_their_schema(client: OpenAI, model: str) -> None:
    """Several choices, in company of a request without a schema, at temperature 1 and in a stream."""

    def ask(seed: int, **fields: Any) -> Any:
        return client.chat.completions.create(model=model, messages=TALK, seed=seed, max_tokens=600, **fields)

    with ThreadPoolExecutor(5) as pool:
        free = pool.submit(ask, 0, temperature=0)
        guided = [pool.submit(ask, seed, n=2, response_format=form(SCHEMA)) for seed in (0, 2)]
        for answer in guided:
            for choice in answer.result().choices:
                check(choice.message.content)
                assert choice.finish_reason == "stop"
        assert free.result().choices[0].message.content == ask(0, temperature=0).choices[0].message.content
    whole = ask(0, response_format=form(SCHEMA)).choices[0].message.content
    assert whole == guided[0].result().choices[0].message.content, "the same seed gives the same answer"
    events = list(ask(0, response_format=form(SCHEMA), stream=True))
    assert "".join(event.choices[0].delta.content or "" for event in events) == whole
    reply = client.completions.create(
        model=model, prompt="one ship", max_tokens=600, extra_body={"response_format": form(SCHEMA)}
    )
    check(reply.choices[0].text)


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_followed_is_refused_by_name(client: OpenAI, model: str, stream: bool) -> None:
    for schema, message in (
        ({"type": "strin"}, "response_format: cannot be followed: Invalid type: strin"),
        ({"type": "string", "not": {"const": "a"}}, 'Unimplemented keys: \\["not"\\]'),
    ):
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            client.chat.completions.create(model=model, messages=TALK, response_format=form(schema), stream=stream)
        assert caught.value.param == "response_format"


def test_guides_that_compile_slowly_are_refused(client: OpenAI, model: str) -> None:
    """Beside a stream, one after the other; a client that leaves meanwhile is forgotten, and the next guide is followed."""
    with ThreadPoolExecutor(2) as pool:
        slow = [
            pool.submit(
                client.with_options(timeout=0.01 if number == 0 else SECONDS).chat.completions.create,
                model=model,
                messages=TALK,
                response_format=form(SLOW),
            )
            for number in range(2)
        ]
        body: Any = {"temperature": 0, "max_tokens": 40, "extra_body": {"ignore_eos": True}}
        events = list(client.chat.completions.create(model=model, messages=TALK, stream=True, **body))
        assert events[-1].choices[0].finish_reason == "length"
        for number, call in enumerate(slow):
            # One may have left, unless the machine is quicker than its client.
            kinds = (openai.APITimeoutError, openai.BadRequestError) if number == 0 else openai.BadRequestError
            with pytest.raises(kinds, match=None if number == 0 else "fuel"):
                call.result()
    check(
        client.chat.completions.create(model=model, messages=TALK, response_format=form(SCHEMA))
        .choices[0]
        .message.content
    )


def test_tensorrt_llms_inputs(server: RunningServer, directory: Path) -> None:
    """Other guides, and those that are refused: tests/engine/test_guides.py, tests/server/frontend/test_refusals.py."""
    guides = {
        "json_schema": json.dumps(SCHEMA),
        "regex": "(yes|no), [0-9]{2}",
        "ebnf_grammar": 'root ::= ("yes" | "no") ", " [0-9]{2}',
    }
    tokenizer = Tokenizer(directory)
    prompt = tokenizer.encode("one ship")
    for kind, guide in guides.items():
        fields = {"guided_decoding_guide_type": kind, "guided_decoding_guide": guide, "top_p": 1.0}
        reply = generate(
            server, "ensemble", text_input="one ship", max_tokens=600, exclude_input_in_output=True, **fields
        )
        assert reply.status_code == 200, reply.text
        fields["runtime_top_p"] = fields.pop("top_p")
        ids = generate(
            server, "tensorrt_llm", input_ids=prompt, request_output_len=600, exclude_input_in_output=True, **fields
        ).json()["output_ids"]
        for text in (reply.json()["text_output"], tokenizer.decode(ids)):
            if kind == "json_schema":
                check(text)
            else:
                assert text[-4:-2] == ", "
                assert text[:-4] in ("yes", "no")
                assert text[-2:].isdigit()
