"""Refusals of Triton's models: each names a field that the client has sent, and the value that he has sent."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from tests.conftest import BuildEngine, RandomModel
from tests.server.frontend.test_llmapi_request import configuration, datatype

from kvseek.core.config import EngineConfig
from kvseek.core.errors import RequestError, renamed
from kvseek.engine.chat_template import TEMPLATE_FILE
from kvseek.engine.tokenizer import TOKENIZER_FOLDER, Tokenizer
from kvseek.server.requests.models import INFLIGHT_BATCHER_LLM, LLMAPI, RequestFactory

MODELS = {  # of each model: its layout, its configuration, and a request
    "text": (
        INFLIGHT_BATCHER_LLM,
        "inflight_batcher_llm/tensorrt_llm_bls",
        {"text_input": "the light", "max_tokens": 5},
    ),
    "tokens": (
        INFLIGHT_BATCHER_LLM,
        "inflight_batcher_llm/tensorrt_llm",
        {"input_ids": [5, 6], "request_output_len": 5},
    ),
    "llmapi": (LLMAPI, "llmapi/tensorrt_llm", {"text_input": "the light", "sampling_param_max_tokens": 5}),
}
STRANGE: dict[str, list[Any]] = {  # of each datatype: values at whose ends or beyond them most fields are
    "INT32": [-(2**31), -2, -1, 0, 1, 9, 1000, 100_000, 2**31 - 1],
    "UINT64": [0, 256, 2**64 - 1],
    "FP32": [float("nan"), -0.1, 0.0, 0.5, 1.1, 200.1, 700_000.1, float("inf")],
    "BOOL": [False, True],
    "STRING": [b"", b"fox", b"xml", b"refuse", b"half \xf0\x9f", b"x" * 300, b"x" * 1025, b"light " * 170],
}
TOGETHER: list[dict[str, Any]] = [  # what is refused of several fields, or of lists
    {"session_id": "talk", "retention_priority": 101},
    {"session_id": "talk", "retention_seconds": -0.1},
    {"guided_decoding_guide_type": "regex", "guided_decoding_guide": ""},
    {"guided_decoding_guide_type": "json", "end_id": -1},
    {"text_input": "light " * 10_000},
    {"stop_words": ["x"] * 65},
    {"sampling_param_stop": ["x"] * 65},
    {"embedding_bias_words": ["ship"], "embedding_bias_weights": [100.1]},
    {"apply_chat_template": True, "text_input": "refuse"},
    {"input_ids": [5] * 200},
    {"input_ids": [5], "input_lengths": 0},
    {"bad_words_list": [[100_000], [1]]},
    {"stop_words_list": [[100_000], [1]]},
]
ANY_VALUE = re.compile(
    r"return_|exclude_|stream|^stop$|apply_chat|speculate|seed$|^min_(tokens|length)|pad_id|prompt_ignore"
)


@pytest.fixture(scope="module")
def directory(random_model: RandomModel, build_engine: BuildEngine) -> Path:
    return build_engine(random_model("llama"), "full", "--max_batch_size", "1", "--max_seq_len", "160")


@pytest.fixture(scope="module")
def refusing(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Its chat template refuses everything."""
    folder = tmp_path_factory.mktemp("tokenizer")
    shutil.copytree(directory / TOKENIZER_FOLDER, folder / TOKENIZER_FOLDER)
    (folder / TOKENIZER_FOLDER / TEMPLATE_FILE).write_text("{{ 1 // 0 }}")
    return Tokenizer(folder)


def values(value: Any) -> list[Any]:
    return [*np.ravel(value).tolist()] if isinstance(value, list) else [value]


def refusal(config: EngineConfig, tokenizer: Tokenizer, model: str, fault: dict[str, Any]) -> str:
    """The field that a refusal names, which was sent as the value was that it shows; empty if there is none."""
    layout, path, request = MODELS[model]
    sent = {name: values(value) for name, value in {**request, **fault}.items()}
    try:
        RequestFactory(layout, config, tokenizer).make(path.rpartition("/")[2], [sent])
    except RequestError as error:
        message = str(error)
    else:
        return ""
    found = re.match(r"\w+", message)
    assert found, message
    assert found[0] in sent or "is missing" in message or any(name in message for name in fault), message
    value = re.match(r"\w+(?: of token \d+)? = (-?[\d.]+|nan|inf)\b", message)
    numbers = [number for given in sent.values() for number in given if isinstance(number, int | float)]
    assert value is None or "of token" in message or any(str(float(value[1])) == str(float(n)) for n in numbers), (
        message
    )
    return found[0]


@pytest.mark.parametrize("model", MODELS)
def test_a_refusal_names_a_field_and_a_value_that_the_client_has_sent(
    config: EngineConfig, refusing: Tokenizer, model: str
) -> None:
    """Of every input each strange value; of all but ANY_VALUE some are refused by the input's name."""
    inputs = {field.name: datatype(field) for field in configuration(MODELS[model][1]).input}
    for name, kind in inputs.items():
        named = {refusal(config, refusing, model, {name: value}) for value in STRANGE[kind]}
        assert name in named or ANY_VALUE.search(name), name
    for fault in TOGETHER:
        if fault.keys() <= inputs.keys():
            assert refusal(config, refusing, model, fault) in fault, fault


@hypothesis.settings(max_examples=60)
@hypothesis.given(data=st.data())
def test_whatever_is_sent_together_is_served_or_refused(
    config: EngineConfig, refusing: Tokenizer, data: st.DataObject
) -> None:
    model = data.draw(st.sampled_from(sorted(MODELS)))
    inputs = {field.name: field for field in configuration(MODELS[model][1]).input}
    fault = {}
    for name in data.draw(st.sets(st.sampled_from(sorted(inputs)), max_size=6)):
        size = 1 if list(inputs[name].dims) == [1] else data.draw(st.integers(0, 3))
        fault[name] = data.draw(
            st.lists(st.sampled_from(STRANGE[datatype(inputs[name])]), min_size=size, max_size=size)
        )
    refusal(config, refusing, model, fault)


def test_names_are_replaced_at_the_beginning_alone() -> None:
    names = {"end_id": "stop_token_ids", "bad_words_list": "bad_words"}
    assert renamed("end_id = 5: not end_id", names) == "stop_token_ids = 5: not end_id"
    assert renamed("bad_words_list, end_id: leave no token", names) == "bad_words, stop_token_ids: leave no token"
    assert renamed("7 end_id", names) == "7 end_id"
