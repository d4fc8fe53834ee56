"""JSON bodies to inputs: what Triton's generate extension takes, and that everything else is refused by name."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from kvseek.core.errors import RequestError
from kvseek.server.http.content import body_limit
from kvseek.server.kserve.generate import LOGITS_AT_A_TIME, chunk_to_json, logits_to_json
from kvseek.server.kserve.inputs import ModelSchema
from kvseek.server.requests.models import INFLIGHT_BATCHER_LLM, Logits, TextRequest, TokenRequest

CONFIG: Any = SimpleNamespace(max_input_len=800, max_batch_size=2)
TEXT = {"text_input": "the sea", "max_tokens": 4}
TOKENS = {"input_ids": [5, 6, 7], "request_output_len": 3}


@pytest.fixture(scope="module")
def text() -> ModelSchema:
    return ModelSchema(INFLIGHT_BATCHER_LLM.name, TextRequest, CONFIG)


@pytest.fixture(scope="module")
def tokens() -> ModelSchema:
    return ModelSchema(INFLIGHT_BATCHER_LLM.name, TokenRequest, CONFIG)


def with_raw(name: str, raw: str) -> bytes:
    """TEXT with one more field, or another value of one, given as JSON."""
    fields = {key: json.dumps(value) for key, value in TEXT.items()} | {name: raw}
    return ("{" + ",".join(f'"{key}":{value}' for key, value in fields.items()) + "}").encode()


@pytest.mark.parametrize(
    ("name", "raw", "values"),
    [
        ("text_input", '"caf\\u00e9"', ["café"]),
        ("text_input", '["the sea"]', ["the sea"]),
        ("max_tokens", "[ 7 ]", [7]),
        ("temperature", "1", [1.0]),
        ("timeout", "2.5", [2.5]),
        ("priority", "200", [200]),
        ("seed", "18446744073709551615", [2**64 - 1]),
        ("stream", "true", [True]),
        ("stop_words", "[]", []),
        ("stop_words", '["a", "b"]', ["a", "b"]),
        ("end_id", "-1", [-1]),
    ],
)
def test_fields_become_values(text: ModelSchema, name: str, raw: str, values: list[Any]) -> None:
    found = text.read(with_raw(name, raw)).inputs[name]
    assert (found, [*map(type, found)]) == (values, [*map(type, values)])


def test_token_ids_and_flat_word_lists(tokens: ModelSchema) -> None:
    body = tokens.read(json.dumps(TOKENS | {"stop_words_list": [7, 8, 1, 2], "id": "mine"}).encode())
    assert body.request_id == "mine"
    assert body.inputs["input_ids"] == [5, 6, 7]
    assert body.inputs["stop_words_list"] == [7, 8, 1, 2]
    assert tokens.read(json.dumps(TOKENS | {"input_ids": 5}).encode()).inputs["input_ids"] == [5]


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("max_tokens", "1099511627776", r"max_tokens = 1099511627776: must be in \[-2147483648, 2147483647\]"),
        ("max_tokens", "2.0", "max_tokens = 2.0: must be an integer"),
        ("max_tokens", "true", "max_tokens = true: must be an integer"),
        ("max_tokens", "null", "max_tokens = null: must be an integer"),
        ("max_tokens", '"4"', 'max_tokens = "4": must be an integer'),
        ("max_tokens", "[true]", r"max_tokens\[0\] is of kind bool: must be an integer"),
        ("max_tokens", "NaN", r"not JSON \(in or after the field max_tokens\)"),
        ("temperature", "Infinity", r"not JSON \(in or after the field temperature\)"),
        ("temperature", "1e400", "temperature = 1e400: must be in .*range of FP32"),
        ("temperature", "1e39", "temperature = 1e.39: must be in .*range of FP32"),
        ("seed", "-1", r"seed = -1: must be in \[0, 18446744073709551615\]"),
        ("seed", "18446744073709551616", "seed = 18446744073709551616: must be in"),
        ("seed", "1" * 100_000, "seed = 1{40}…: must be in"),
        ("top_k", "{}", "top_k = an object: must be an integer"),
        ("top_k", "[[1]]", r"top_k\[0\] is of kind array: must be an integer; send one flat list"),
        ("top_k", "[" + "1," * 5000 + "1]", "top_k has more than 1024 values"),
        ("stream", "1", "stream = 1: must be true or false"),
        ("stop_words", '["a", 1]', r"stop_words\[1\] is of kind int: must be a string"),
        ("stop_words", json.dumps("x" * 2**20), "stop_words has 1048578 bytes of JSON: must be <= 1048576"),
        ("text_input", "5", "text_input = 5: must be a string"),
        ("text_input", '["a", "b"]', "text_input is a list of several texts: must be one"),
        ("text_input", '"\\ud800"', r"^text_input: \\ud800 at byte \d+ of the body is half of a surrogate pair"),
        ("temprature", "1", "temprature: tensorrt_llm_bls has no such input"),
        ("x" * 1000, "1", "^x{40}…: tensorrt_llm_bls has no such input"),
        ("id", "5", "id = 5: must be a string"),
        ("id", json.dumps("x" * 257), "id has 257 characters: must be <= 256"),
        ("parameters", '{"foo": 1}', "foo: tensorrt_llm_bls has no such parameter"),
        ("parameters", "[]", "parameters = a list: must be an object"),
    ],
)
def test_wrong_fields_are_named(text: ModelSchema, name: str, raw: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        text.read(with_raw(name, raw))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not JSON"),
        (b"[]", "the body is not a JSON object"),
        (b'{"text_input": "a"', r"not JSON \(in or after the field text_input\)"),
        (b'{"text_input": "a"} x', "trailing characters"),
        (b'{"text_input": "\xff", "max_tokens": 1}', "text_input: not UTF-8"),
        (b'{"max_tokens": 1}', "text_input is missing"),
        (b'{"text_input": ' + b"[" * 1_000_000, "the body nests too deeply"),
        (b'{"text_input": ' + b'{"a":' * 1_000_000, "the body nests too deeply"),
    ],
)
def test_wrong_bodies_are_refused(text: ModelSchema, body: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        text.read(body)


def test_wrong_shapes_are_refused(tokens: ModelSchema) -> None:
    for field, value, message in (
        ("stop_words_list", [7, 8, 1], "has 3 values: must be a multiple of 2"),
        ("request_output_len", [3, 4], "has 2 values: must be 1"),
        ("input_ids", [1] * 801, "input_ids has more than 800 values"),
    ):
        with pytest.raises(RequestError, match=message):
            tokens.read(json.dumps(TOKENS | {field: value}).encode())


def test_the_largest_prompt_fits_into_a_body_and_no_more() -> None:
    tokenizer: Any = SimpleNamespace(longest_token_bytes=16)
    worst = json.dumps({"text_input": "\x00" * (800 * 16), "max_tokens": 1}).encode()
    limit = body_limit(True, CONFIG, tokenizer)
    assert len(worst) < limit < len(worst) + 2**20
    ids = json.dumps(TOKENS | {"input_ids": [2**31 - 1] * 800}).encode()
    assert len(ids) < body_limit(False, CONFIG, tokenizer) < len(ids) + 2**20


def test_chunks_have_scalars_where_there_is_one_value() -> None:
    chunk = {"output_ids": [7], "sequence_length": 1, "finish_reason": ""}
    own = {"model_name": TokenRequest.model, "model_version": "1"}
    assert json.loads(chunk_to_json(TokenRequest.model, "", chunk)) == own | chunk | {"output_ids": 7}
    assert json.loads(chunk_to_json(TokenRequest.model, "mine", {"output_ids": [7, 8]})) == own | {
        "id": "mine",
        "output_ids": [7, 8],
    }


@pytest.mark.parametrize("count", [0, 1, LOGITS_AT_A_TIME, 3 * LOGITS_AT_A_TIME + 1])
def test_other_streams_go_on_while_logits_are_written(count: int) -> None:
    numbers, sizes = array("f", (number / 7 for number in range(count))), list[int]()

    async def run() -> tuple[Any, int]:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        stream = asyncio.create_task(other())
        found = await logits_to_json(Logits(numbers.tobytes(), (1, count)), asyncio.Lock(), sizes.append)
        stream.cancel()
        return json.loads(chunk_to_json("model", "", {"context_logits": found}))["context_logits"], turns

    found, turns = asyncio.run(run())
    assert array("f", found) == numbers
    assert turns >= len(sizes) == -(-count // LOGITS_AT_A_TIME)


@pytest.mark.parametrize("raw", ["[1e999]", "1e999", "[-1e999]"])
def test_a_number_beyond_all_ranges_in_the_place_of_a_text(text: ModelSchema, raw: str) -> None:
    with pytest.raises(RequestError, match=r"stop_words.* must be a string"):
        text.read(with_raw("stop_words", raw))


def test_fields_without_number_are_refused_at_the_first(text: ModelSchema) -> None:
    """Nothing is built from a million fields: it would hold up the process."""
    body = b'{"text_input":"x",' + b",".join(b'"k%d":1' % i for i in range(200_000)) + b"}"
    tracemalloc.start()
    with pytest.raises(RequestError, match="k0: tensorrt_llm_bls has no such input"):
        text.read(body)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    parameters = b'{"text_input":"x","max_tokens":1,"parameters":{' + body[18:-1] + b"}}"
    with pytest.raises(RequestError, match=r"parameters has \d+ bytes of JSON: must be <= 1048576"):
        text.read(parameters)
