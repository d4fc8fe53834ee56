"""Refusals of Triton's models: each names a field that the client has sent, and the value that he has sent."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import BuildEngine, RandomModel

from kvseek.core.config import EngineConfig
from kvseek.core.errors import RequestError, renamed
from kvseek.engine.chat_template import TEMPLATE_FILE
from kvseek.engine.tokenizer import TOKENIZER_FOLDER, Tokenizer
from kvseek.server.requests.models import INFLIGHT_BATCHER_LLM, LLMAPI, RequestFactory

MODELS = {  # of each model: its layout, and a request
    "text": (INFLIGHT_BATCHER_LLM, "tensorrt_llm_bls", {"text_input": "the light", "max_tokens": 5}),
    "tokens": (INFLIGHT_BATCHER_LLM, "tensorrt_llm", {"input_ids": [5, 6], "request_output_len": 5}),
    "llmapi": (LLMAPI, "tensorrt_llm", {"text_input": "the light", "sampling_param_max_tokens": 5}),
}
SHARED: list[dict[str, Any]] = [
    {"min_p": 1.1},
    {"forced_tokens": [100_000]},
    {"repetition_penalty": 200.1},
    {"end_id": 100_000},
    {"priority": 256},
    {"timeout": 700_000.1},
    {"cache_salt": "x" * 300},
    {"session_id": "x" * 300},
    {"retention_priority": 5},
    {"session_id": "talk", "retention_seconds": -0.1},
]
GUIDES = [
    {"guided_decoding_guide_type": "xml"},
    {"guided_decoding_guide_type": "regex", "guided_decoding_guide": ""},
    {"guided_decoding_guide_type": "json", "end_id": -1},
]
FAULTS = {
    "text": [
        *SHARED,
        *GUIDES,
        {"text_input": "light " * 170},
        {"text_input": "light " * 10_000},
        {"text_input": b"half \xf0\x9f"},
        {"text_input": ""},
        {"max_tokens": 0},
        {"max_tokens": 1000},
        {"temperature": -0.1},
        {"top_k": -2},
        {"top_p": 1.1},
        {"presence_penalty": 100.1},
        {"stop_words": ["x"] * 65},
        {"bad_words": ["x" * 1025]},
        {"embedding_bias_words": ["ship"], "embedding_bias_weights": [100.1]},
        {"num_return_sequences": 9},
        {"apply_chat_template": True, "text_input": "refuse"},
    ],
    "tokens": [
        *SHARED,
        *GUIDES,
        {"input_ids": [5] * 200},
        {"input_ids": [100_000]},
        {"input_ids": [5], "input_lengths": 0},
        {"request_output_len": 0},
        {"request_output_len": 1000},
        {"temperature": -0.1},
        {"runtime_top_k": -2},
        {"runtime_top_p": 1.1},
        {"bad_words_list": [[100_000], [1]]},
        {"stop_words_list": [[100_000], [1]]},
    ],
    "llmapi": [
        *SHARED,
        {"text_input": "light " * 170},
        {"sampling_param_max_tokens": 0},
        {"sampling_param_max_tokens": 1000},
        {"sampling_param_temperature": -0.1},
        {"sampling_param_top_k": -2},
        {"sampling_param_top_p": 1.1},
        {"sampling_param_presence_penalty": 100.1},
        {"sampling_param_stop": ["x"] * 65},
        {"sampling_param_best_of": 2},
        {"apply_chat_template": True, "text_input": "refuse"},
    ],
}


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


@pytest.mark.parametrize(("model", "fault"), [(model, fault) for model, faults in FAULTS.items() for fault in faults])
def test_a_refusal_names_a_field_and_a_value_that_the_client_has_sent(
    config: EngineConfig, refusing: Tokenizer, model: str, fault: dict[str, Any]
) -> None:
    layout, name, request = MODELS[model]
    sent = {**request, **fault}
    with pytest.raises(RequestError) as caught:
        RequestFactory(layout, config, refusing).make(name, [{n: values(v) for n, v in sent.items()}])
    message = str(caught.value)
    found = re.match(r"\w+", message)
    assert found
    assert found[0] in fault
    value = re.match(r"\w+(?: of token \d+)? = ([-\d.]+)", message)
    if value is not None:
        numbers = [number for given in fault.values() for number in (given if isinstance(given, list) else [given])]
        assert float(value[1]) in np.ravel([n for n in numbers if not isinstance(n, str)]) or "of token" in message


def test_names_are_replaced_at_the_beginning_alone() -> None:
    names = {"end_id": "stop_token_ids", "bad_words_list": "bad_words"}
    assert renamed("end_id = 5: not end_id", names) == "stop_token_ids = 5: not end_id"
    assert renamed("bad_words_list, end_id: leave no token", names) == "bad_words, stop_token_ids: leave no token"
    assert renamed("7 end_id", names) == "7 end_id"
