"""Inputs to requests, without a server."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvseek.core.errors import RequestError
from kvseek.core.guide import Guide, GuideType
from kvseek.core.request import SamplingConfig
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
from kvseek.server.triton.tensors import rows_of


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
