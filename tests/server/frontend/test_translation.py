"""JSON bodies and tensors to inputs, and inputs to requests, without a server; everything else is refused by name."""

from __future__ import annotations

import asyncio
import itertools
import json
import tracemalloc
from array import array
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvseek.core.errors import RequestError
from kvseek.core.guide import Guide, GuideType
from kvseek.core.request import SamplingConfig
from kvseek.server.http.content import body_limit
from kvseek.server.kserve.generate import LOGITS_AT_A_TIME, chunk_to_json, logits_to_json
from kvseek.server.kserve.inputs import ModelSchema
from kvseek.server.requests.models import INFLIGHT_BATCHER_LLM, Logits, TextRequest, TokenRequest
from kvseek.server.requests.translation import (
    NEUTRAL,
    Parameters,
    engine_request,
    read_parameters,
    sampling_params,
    scalar,
    sequences_of,
    text,
    texts,
    word_list,
)
from kvseek.server.triton.model import rows_of


def inputs(**values: Any) -> dict[str, list[Any]]:
    """Inputs of a minimal request, with `values` in addition."""
    base: dict[str, Any] = {"input_ids": [5, 6, 7], "request_output_len": 9}
    return {name: value if isinstance(value, list) else [value] for name, value in {**base, **values}.items()}


def test_a_minimal_request_is_greedy_with_the_models_end_ids() -> None:
    request = engine_request(inputs(), (2, 3))
    assert request.prompt_ids == (5, 6, 7)
    assert (request.max_tokens, request.end_ids, request.stop_words) == (9, (2, 3), ())
    assert request.sampling == SamplingConfig()


@pytest.mark.parametrize(("end_id", "expected"), [(7, (7,)), (-1, ())])
def test_end_id_replaces_the_models(end_id: int, expected: tuple[int, ...]) -> None:
    assert engine_request(inputs(end_id=end_id), (2,)).end_ids == expected


def test_input_lengths_cut_padding() -> None:
    assert engine_request(inputs(input_lengths=2), ()).prompt_ids == (5, 6)
    with pytest.raises(RequestError, match=r"input_lengths = 4: must be in \[0, 3\]"):
        engine_request(inputs(input_lengths=4), ())


def test_sampling_fields() -> None:
    params = sampling_params(
        inputs(temperature=0.5, runtime_top_k=4, runtime_top_p=0.75, seed=9, repetition_penalty=1.5)
    )
    assert params == SamplingConfig(0.5, 4, 0.75, 1.5, 9)
    assert sampling_params(inputs(random_seed=3)).seed == 3
    more = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "prompt_ignore_length": 2, "min_length": 3}
    assert sampling_params(inputs(**more, return_log_probs=True)) == SamplingConfig(
        presence_penalty=0.5, frequency_penalty=-0.5, prompt_ignore_length=2, min_tokens=3, logprobs=0
    )
    assert sampling_params(inputs(min_tokens=4, min_length=-1)).min_tokens == 4
    guide = {"guided_decoding_guide_type": b"regex", "guided_decoding_guide": "a+"}
    assert sampling_params(inputs(**guide)).guide == Guide(GuideType.REGEX, "a+")
    assert sampling_params(inputs(**dict.fromkeys(guide, b""))).guide is None
    assert sampling_params(inputs(forced_tokens=[5, 9, -1, -1])).forced_tokens == (5, 9)
    assert engine_request(inputs(bad_words_list=[7, 8, 9, 2, 3, -1]), ()).sampling.bad_words == ((7, 8), (9,))


@pytest.mark.parametrize(
    ("fields", "temperature", "top_k", "top_p"),
    [
        ({"temperature": 0.7}, 0.0, 0, 1.0),
        ({"temperature": 1.0, "runtime_top_k": 0, "runtime_top_p": 0.0}, 0.0, 0, 1.0),
        ({"runtime_top_k": 1, "runtime_top_p": 0.0}, 0.0, 0, 1.0),
        ({"runtime_top_k": 5, "runtime_top_p": 0.0}, 1.0, 5, 1.0),
        ({"runtime_top_p": 0.5}, 1.0, 0, 0.5),
        ({"min_p": 0.5}, 1.0, 0, 1.0),
        ({"min_p": 0.0}, 0.0, 0, 1.0),
        ({"temperature": 0.7, "runtime_top_p": 1.0}, 0.7, 0, 1.0),
    ],
)
def test_numbers_that_turn_something_off(fields: dict[str, Any], temperature: float, top_k: int, top_p: float) -> None:
    """As in TensorRT-LLM: 0 turns top_k and top_p off, and without both the likeliest token is drawn."""
    found = sampling_params(inputs(**fields))
    assert (found.temperature, found.top_k, found.top_p) == (temperature, top_k, top_p)


def test_sequences_draw_with_seeds_of_their_own() -> None:
    request = engine_request(inputs(seed=2**64 - 1), ())
    for asked, seeds in ({}, [2**64 - 1]), ({"num_return_sequences": 2}, [2**64 - 1, 0]):
        assert [one.sampling.seed for one in sequences_of(inputs(**asked), request)] == seeds
    assert len(sequences_of(inputs(num_return_sequences=8), request)) == 8
    for count in (0, 9):
        with pytest.raises(RequestError, match=f"num_return_sequences = {count}: must be in"):
            sequences_of(inputs(num_return_sequences=count), request)


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4), max_size=5), st.integers(0, 3))
def test_word_lists_round_trip(words: list[list[int]], padding: int) -> None:
    flat = [token for word in words for token in word]
    ends = [*itertools.accumulate(len(word) for word in words)]
    width = max(len(flat), len(ends)) + padding
    given = flat + [0] * (width - len(flat)) + ends + [-1] * (width - len(ends))
    assert word_list({"stop_words_list": given}, "stop_words_list") == tuple(map(tuple, words))


def test_bad_word_lists_are_named() -> None:
    with pytest.raises(RequestError, match="stop_words_list: end 9 must be between 0 and 2"):
        word_list({"stop_words_list": [1, 2, 9, -1]}, "stop_words_list")


def test_stop_words_of_tokens_are_as_many_as_those_of_text() -> None:
    def words(count: int) -> list[int]:
        return [7] * count + list(range(1, count + 1))

    assert engine_request(inputs(stop_words_list=words(64)), ()).stop_words == ((7,),) * 64
    with pytest.raises(RequestError, match="stop_words_list has 65 words: must be <= 64; send fewer"):
        engine_request(inputs(stop_words_list=words(65)), ())


@pytest.mark.parametrize("name", NEUTRAL)
def test_unsupported_inputs_are_refused_unless_neutral(name: str) -> None:
    for neutral in NEUTRAL[name]:
        engine_request(inputs(**{name: neutral}), ())
    with pytest.raises(RequestError, match=f"{name} = .*kvseek does not support it"):
        engine_request(inputs(**{name: 3}), ())


def test_logits_are_asked_for_by_tensorrt_llms_names() -> None:
    request = engine_request(inputs(return_context_logits=True, return_generation_logits=True), ())
    assert request.sampling == SamplingConfig(return_context_logits=True, return_generation_logits=True)
    assert request.logits(100) == (3 + 9) * 100
    assert engine_request(inputs(return_context_logits=True), ()).logits(100) == 300
    assert engine_request(inputs(return_context_logits=False), ()).logits(100) == 0


def test_parameters_are_refused_by_name() -> None:
    assert read_parameters("{}", "tensorrt_llm") == read_parameters("", "tensorrt_llm") == Parameters()
    assert read_parameters('{"Authorization": "Bearer x"}', "tensorrt_llm") == Parameters(authorization="Bearer x")
    assert read_parameters('{"traceparent": "00-ab"}', "tensorrt_llm") == Parameters(traceparent="00-ab")
    with pytest.raises(RequestError, match="traceparent = 5: must be a str"):
        read_parameters('{"traceparent": 5}', "tensorrt_llm")
    with pytest.raises(RequestError, match="top_q: tensorrt_llm has no such input"):
        read_parameters('{"top_q": 1}', "tensorrt_llm")


def test_several_values_of_one_prompt_are_refused() -> None:
    with pytest.raises(RequestError, match="temperature has 2 values"):
        scalar(inputs(temperature=[1.0, 2.0]), "temperature")


def test_text_must_be_utf8() -> None:
    assert text("größer".encode(), "text_input") == "größer"
    with pytest.raises(RequestError, match=r"text_input: byte 2 \(0xff\) is not UTF-8"):
        text(b"ab\xff", "text_input")


def test_empty_strings_are_left_out() -> None:
    assert texts({"stop_words": [b"", b"stop"]}, "stop_words") == ("stop",)


def test_tensors_become_the_inputs_of_each_prompt() -> None:
    tensors = {
        "temperature": np.array([[0.1], [0.7]], np.float32),
        "input_ids": np.array([[5, 6], [7, 8]], np.int32),
        "stop_words_list": np.array([[[1, 2], [2, -1]]] * 2, np.int32),
        "text_input": np.array([[b"a"], [b"b"]], object),
        "stream": np.array([[True], [False]]),
        "cache_salt": np.array([b"one", b"two"], object),  # of Triton, without a second dimension
    }
    first, second = rows_of(tensors)
    assert first == {
        "temperature": [0.1],
        "input_ids": [5, 6],
        "stop_words_list": [1, 2, 2, -1],
        "text_input": [b"a"],
        "stream": [True],
        "cache_salt": [b"one"],
    }
    assert (second["temperature"], second["stream"]) == ([0.7], [False])
    with pytest.raises(RequestError, match="seed has 1 rows: must be 2, one for each prompt"):
        rows_of(tensors | {"seed": np.array([[1]])})


CONFIG: Any = SimpleNamespace(max_input_len=800, max_batch_size=2)
TEXT = {"text_input": "the sea", "max_tokens": 4}
TOKENS = {"input_ids": [5, 6, 7], "request_output_len": 3}


@pytest.fixture(scope="module")
def text_model() -> ModelSchema:
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
def test_fields_become_values(text_model: ModelSchema, name: str, raw: str, values: list[Any]) -> None:
    found = text_model.read(with_raw(name, raw)).inputs[name]
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
def test_wrong_fields_are_named(text_model: ModelSchema, name: str, raw: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        text_model.read(with_raw(name, raw))


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
def test_wrong_bodies_are_refused(text_model: ModelSchema, body: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        text_model.read(body)


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
def test_a_number_beyond_all_ranges_in_the_place_of_a_text(text_model: ModelSchema, raw: str) -> None:
    with pytest.raises(RequestError, match=r"stop_words.* must be a string"):
        text_model.read(with_raw("stop_words", raw))


def test_fields_without_number_are_refused_at_the_first(text_model: ModelSchema) -> None:
    """Nothing is built from a million fields: it would hold up the process."""
    body = b'{"text_input":"x",' + b",".join(b'"k%d":1' % i for i in range(200_000)) + b"}"
    tracemalloc.start()
    with pytest.raises(RequestError, match="k0: tensorrt_llm_bls has no such input"):
        text_model.read(body)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    parameters = b'{"text_input":"x","max_tokens":1,"parameters":{' + body[18:-1] + b"}}"
    with pytest.raises(RequestError, match=r"parameters has \d+ bytes of JSON: must be <= 1048576"):
        text_model.read(parameters)
