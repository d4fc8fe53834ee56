"""Inputs of the LLM API layout's model to requests, and outputs back, without a server."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
from google.protobuf import text_format
from tests.conftest import ROOT
from tritonclient.grpc import model_config_pb2

from kvseek.core.config import EngineConfig
from kvseek.core.errors import RequestError
from kvseek.core.request import FinishReason, LogProbs, Request, RequestStatistics, SamplingConfig, Session, StepOutput
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.requests.models import ASKED_FOR, LLMAPI, LlmApiRequest, RequestFactory, ServedRequest
from kvseek.server.requests.translation import LLMAPI_INPUTS, LLMAPI_NEUTRAL

PROMPT = "the quick brown fox"
GREEDY = SamplingConfig()
PREFIX = "sampling_param_"


@pytest.fixture(scope="module")
def factory(config: EngineConfig, tokenizer: Tokenizer) -> RequestFactory:
    return RequestFactory(LLMAPI, config, tokenizer)


def make(factory: RequestFactory, **values: Any) -> ServedRequest:
    """The request of inputs."""
    given = {"text_input": PROMPT} | values
    inputs = {name: value if isinstance(value, list) else [value] for name, value in given.items()}
    return factory.make_one(LlmApiRequest.model, inputs)


def test_what_is_absent_means_what_it_does_in_tensorrt_llm(
    factory: RequestFactory, tokenizer: Tokenizer, config: EngineConfig
) -> None:
    served = make(factory)
    assert served.request == Request(tuple(tokenizer.encode(PROMPT)), 32, GREEDY, config.model.eos_token_ids)
    assert not served.streaming


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"temperature": 0.5}, SamplingConfig(0.5)),
        ({"top_k": 5}, SamplingConfig(1.0, 5)),
        ({"top_k": 0}, SamplingConfig(1.0)),
        ({"top_p": 0.5}, SamplingConfig(1.0, 0, 0.5)),
        ({"temperature": 0.5, "top_k": 5, "top_p": 0.25}, SamplingConfig(0.5, 5, 0.25)),
        ({"temperature": 0.5, "top_k": 1}, GREEDY),
        ({"temperature": 0.0, "top_p": 0.5}, SamplingConfig(0.0, 0, 0.5)),
        ({"temperature": 0.5, "top_p": 0.0}, GREEDY),
        ({"top_k": 5, "top_p": 0.0}, GREEDY),
        ({"seed": 2**64 - 1}, SamplingConfig(seed=2**64 - 1)),
        (
            {"presence_penalty": 0.5, "frequency_penalty": -0.5},
            SamplingConfig(presence_penalty=0.5, frequency_penalty=-0.5),
        ),
    ],
)
def test_sampling(factory: RequestFactory, values: dict[str, Any], expected: SamplingConfig) -> None:
    assert make(factory, **{PREFIX + name: value for name, value in values.items()}).request.sampling == expected


def test_kvseeks_own_inputs(factory: RequestFactory, tokenizer: Tokenizer) -> None:
    own = {
        "end_id": -1,
        "min_tokens": 3,
        "repetition_penalty": 1.5,
        "priority": 200,
        "timeout": 2.5,
        "bad_words": "fox",
        "cache_salt": "salt",
        "session_id": "talk",
        "retention_priority": 90,
        "retention_seconds": 1.5,
    }
    request = make(factory, **own).request
    assert (request.end_ids, request.priority, request.timeout_seconds) == ((), 200, 2.5)
    assert (request.cache_salt, request.session) == ("salt", Session("talk", 90, 1.5))
    assert (request.sampling.min_tokens, request.sampling.repetition_penalty) == (3, 1.5)
    assert request.sampling.bad_words == tokenizer.spellings("fox")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"text_input": [PROMPT, PROMPT]}, "text_input has 2 values: must be 1"),
        ({"sampling_param_top_k": -1, "sampling_param_top_p": 0.0}, r"^sampling_param_top_k = -1: must be in"),
        (
            {"sampling_param_logits_post_processor_name": "json"},
            r"_name = 'json': must be ''; kvseek does not support it",
        ),
        ({"image_url": ["", "http://" + "x" * 99]}, r"^image_url = 'http://x{32}: must be ''"),
        ({"lora_id": 0}, r"^lora_id = 0: must be absent"),
        ({"lora_path": "/tmp"}, r"^lora_path = '/tmp': must be ''"),
    ],
)
def test_what_cannot_be_served_is_refused(factory: RequestFactory, values: dict[str, Any], message: str) -> None:
    """Limits that all models share: test_refusals.py."""
    with pytest.raises(RequestError, match=message):
        make(factory, **values)


def test_neutral_values_pass(factory: RequestFactory) -> None:
    for name, values in LLMAPI_NEUTRAL.items():
        for value in values:
            make(factory, **{name: value})


@functools.cache
def configuration(path: str) -> Any:
    """A model's config.pbtxt."""
    text = (ROOT / "model_repository" / path / "config.pbtxt").read_text(encoding="utf-8")
    return text_format.Parse(re.sub(r"\$\{\w+\}", "1", text), model_config_pb2.ModelConfig())


def datatype(field: Any) -> str:
    return str(model_config_pb2.DataType.Name(field.data_type)).removeprefix("TYPE_")


def step(token: int, reason: FinishReason | None = None) -> StepOutput:
    statistics = RequestStatistics(4, 1.0, extents=5, prompt_extents=4, reused_extents=3, shared_extents=2)
    return StepOutput(0, token, reason, 1.0, 7, 5.0, statistics, logprobs=LogProbs(-0.5))


def outputs(served: ServedRequest, ids: list[int], reason: FinishReason | None) -> list[dict[str, Any]]:
    """Responses to tokens, the last of which has the reason."""
    steps = [step(token, reason if number == len(ids) else None) for number, token in enumerate(ids, 1)]
    return [chunk for each in steps for chunk in served.push([each])]


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        (FinishReason.END_ID, "stop"),
        *((each, str(each)) for each in FinishReason if each in ("length", "timeout", "cancelled")),
    ],
)
def test_reasons_are_tensorrt_llms(
    factory: RequestFactory, tokenizer: Tokenizer, reason: FinishReason, shown: str
) -> None:
    served = make(factory, return_finish_reason=True, return_stop_reason=True)
    (chunk,) = outputs(served, tokenizer.encode(" over", False), reason)
    assert (chunk["finish_reason"], chunk["stop_reason"]) == (shown, "None")


def test_numbers_that_are_asked_for(factory: RequestFactory, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" over the", False)
    flags = ("return_cumulative_logprob", "return_num_input_tokens", "return_num_output_tokens", *ASKED_FOR.values())
    served = make(factory, sampling_param_return_perf_metrics=True, **dict.fromkeys(flags, True))
    assert served.request.sampling.logprobs == 0
    chunk = outputs(served, ids, FinishReason.LENGTH)[-1]
    assert chunk["cumulative_logprob"] == -0.5 * len(ids)
    assert (chunk["num_input_tokens"], chunk["num_output_tokens"]) == (len(tokenizer.encode(PROMPT)), len(ids))
    assert (chunk["cached_tokens"], chunk["attended_tokens"], chunk["prefill_progress"]) == (7, 5.0, 1.0)
    blocks = {name: value for name, value in chunk.items() if name.startswith("kv_cache")}
    assert blocks == {
        "kv_cache_alloc_new_blocks": 3,
        "kv_cache_alloc_total_blocks": 3,
        "kv_cache_missed_block": 1,
        "kv_cache_reused_block": 3,
        "kv_cache_hit_rate": 0.75,
    }


def test_every_input_of_the_configuration_is_known_and_every_output_comes(
    factory: RequestFactory, tokenizer: Tokenizer
) -> None:
    config = configuration("llmapi/tensorrt_llm")
    inputs = {field.name for field in config.input}
    text_models = {field.name for field in configuration("inflight_batcher_llm/tensorrt_llm_bls").input}
    assert set(LLMAPI_INPUTS.values()) <= text_models
    assert inputs - {*LLMAPI_INPUTS, *LLMAPI_NEUTRAL, *ASKED_FOR.values(), "stop"} <= text_models - set(
        LLMAPI_INPUTS.values()
    )
    served = make(factory, **{name: True for name in inputs if "return_" in name})
    (chunk,) = outputs(served, tokenizer.encode(" over", False), FinishReason.LENGTH)
    assert set(chunk) == {field.name for field in config.output}
