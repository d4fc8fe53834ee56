"""A real server: context and generation logits of both Triton models, with TensorRT-LLM's names, types and shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch
import tritonclient.grpc as grpc
from tests.server.whole.conftest import MAX_LOGITS
from tests.support.grpc_inputs import inputs_of, stream_infer
from tests.support.waiting import SECONDS

from kvseek.core.request import Request
from kvseek.engine.engine import Engine
from kvseek.server.launch import RunningServer

pytestmark = pytest.mark.server

PROMPT = "the harbour master wrote the log at dusk"
VOCABULARY = 384
TOKENS = 5
MOST = MAX_LOGITS // VOCABULARY  # tokens whose logits a request may ask for
MAX_DIFFERENCE = 2e-4
BOTH = {"return_context_logits": True, "return_generation_logits": True}


@pytest.fixture(scope="module")
def answer(checkpoint: Path, engine: Engine) -> tuple[list[int], list[int], np.ndarray[Any, Any]]:
    """Token ids of the prompt, those that the engine generates, and transformers' logits at all of them."""
    from transformers import AutoModelForCausalLM

    prompt = engine.tokenizer.encode(PROMPT)
    (generated,) = engine.generate([Request(tuple(prompt), TOKENS)])
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *generated]])).logits[0]
    return prompt, generated, logits.numpy()


def questions(prompt: list[int], tokens: int = TOKENS) -> dict[str, dict[str, Any]]:
    """The same request to each model."""
    return {
        "tensorrt_llm_bls": {"text_input": PROMPT, "max_tokens": tokens, "end_id": -1},
        "tensorrt_llm": {"input_ids": prompt, "request_output_len": tokens, "end_id": -1},
    }


@pytest.mark.parametrize("name", ["tensorrt_llm", "tensorrt_llm_bls"])
def test_shapes_and_values(server: RunningServer, answer: Any, name: str) -> None:
    prompt, _, expected = answer
    with grpc.InferenceServerClient(server.grpc_url) as client:
        result = client.infer(name, inputs_of(questions(prompt)[name] | BOTH))
        plain = client.infer(name, inputs_of(questions(prompt)[name]))
        alone = client.infer(name, inputs_of(questions(prompt)[name] | {"return_generation_logits": True}))
    context, generation = result.as_numpy("context_logits"), result.as_numpy("generation_logits")
    assert (context.dtype, generation.dtype) == (np.float32, np.float32)
    assert context.shape == (1, len(prompt), VOCABULARY)
    assert generation.shape == (1, 1, TOKENS, VOCABULARY), "request, beam, tokens"
    assert np.abs(context[0] - expected[: len(prompt)]).max() <= MAX_DIFFERENCE
    assert np.abs(generation[0, 0] - expected[len(prompt) - 1 : -1]).max() <= MAX_DIFFERENCE
    assert plain.as_numpy("context_logits") is None
    assert plain.as_numpy("generation_logits") is None
    assert alone.as_numpy("context_logits") is None
    assert alone.as_numpy("generation_logits").shape == (1, 1, TOKENS, VOCABULARY)


@pytest.mark.parametrize("name", ["tensorrt_llm", "tensorrt_llm_bls"])
def test_a_stream_has_them_with_the_tokens(server: RunningServer, answer: Any, name: str) -> None:
    prompt, _, expected = answer
    streams = {"stream" if name == "tensorrt_llm_bls" else "streaming": True, "return_prefill_progress": True}
    responses = stream_infer(server.grpc_url, name, inputs_of(questions(prompt)[name] | BOTH | streams))
    progress = [one.as_numpy("generation_logits") is None for one in responses]
    tokens = responses[progress.index(False) :]
    assert all(progress[: progress.index(False)]), "before the first token"
    assert [one.as_numpy("context_logits") is None for one in tokens] == [False, True, True, True, True]
    assert tokens[0].as_numpy("context_logits").shape == (1, len(prompt), VOCABULARY)
    found = np.concatenate([one.as_numpy("generation_logits") for one in tokens], axis=2)
    assert np.abs(found[0, 0] - expected[len(prompt) - 1 : -1]).max() <= MAX_DIFFERENCE


def test_over_http_they_are_flat_lists(server: RunningServer, answer: Any) -> None:
    prompt, _, expected = answer
    url = f"http://{server.http_url}/v2/models/tensorrt_llm/generate"
    reply = requests.post(url, json=questions(prompt)["tensorrt_llm"] | BOTH, timeout=SECONDS).json()
    context, generation = np.array(reply["context_logits"]), np.array(reply["generation_logits"])
    assert np.abs(context.reshape(-1, VOCABULARY) - expected[: len(prompt)]).max() <= MAX_DIFFERENCE
    assert np.abs(generation.reshape(-1, VOCABULARY) - expected[len(prompt) - 1 : -1]).max() <= MAX_DIFFERENCE


@pytest.mark.parametrize("name", ["tensorrt_llm", "tensorrt_llm_bls"])
def test_log_probabilities_of_given_tokens(server: RunningServer, answer: Any, name: str) -> None:
    """Whatever would be drawn at such a temperature; over gRPC padded, as in a batch of different lengths."""
    prompt, given, expected = answer
    logits = torch.from_numpy(expected[len(prompt) - 1 : -1])
    wanted = logits.log_softmax(dim=1).gather(1, torch.tensor(given)[:, None])[:, 0].tolist()
    asked = questions(prompt)[name] | {"temperature": 90.0, "min_p": 0.001, "return_log_probs": True}
    url = f"http://{server.http_url}/v2/models/{name}/generate"
    reply = requests.post(url, json=asked | {"forced_tokens": given}, timeout=SECONDS).json()
    assert reply["output_log_probs"] == pytest.approx(wanted, abs=MAX_DIFFERENCE)
    with grpc.InferenceServerClient(server.grpc_url) as client:
        result = client.infer(name, inputs_of(asked | {"forced_tokens": [*given, -1]}))
    assert result.as_numpy("cum_log_probs")[0] == pytest.approx(sum(wanted), abs=TOKENS * MAX_DIFFERENCE)
    long = requests.post(url, json=asked | {"forced_tokens": [*given, 5]}, timeout=SECONDS).json()
    assert "forced_tokens = '6 tokens': must be <= 5, the most tokens to generate" in long["error"]


def test_only_the_prompt(server: RunningServer, answer: Any) -> None:
    """max_tokens 0, which is refused otherwise."""
    prompt, _, expected = answer
    with grpc.InferenceServerClient(server.grpc_url) as client:
        asked = questions(prompt, 0)["tensorrt_llm"] | {"return_context_logits": True, "exclude_input_in_output": True}
        result = client.infer("tensorrt_llm", inputs_of(asked))
        with pytest.raises(grpc.InferenceServerException, match=r"^.*request_output_len = 0: must be >= 1"):
            client.infer("tensorrt_llm", inputs_of(questions(prompt, 0)["tensorrt_llm"]))
    assert result.as_numpy("output_ids").shape == (1, 1, 0)
    assert np.abs(result.as_numpy("context_logits")[0] - expected[: len(prompt)]).max() <= MAX_DIFFERENCE


def test_too_many_logits_are_refused(server: RunningServer, answer: Any) -> None:
    limit = f"return_context_logits.*: .* must be <= --max_logits = {MOST * VOCABULARY:,}"
    with grpc.InferenceServerClient(server.grpc_url) as client:

        def ask(tokens: int, **asked: bool) -> Any:
            made = {"input_ids": [5] * tokens, "request_output_len": 3, "end_id": -1} | asked
            return client.infer("tensorrt_llm", inputs_of(made))

        assert ask(MOST, return_context_logits=True).as_numpy("context_logits").shape == (1, MOST, VOCABULARY)
        assert ask(MOST - 3, **BOTH).as_numpy("generation_logits").shape == (1, 1, 3, VOCABULARY)
        for tokens, asked in ((MOST + 1, {"return_context_logits": True}), (MOST - 2, BOTH)):
            with pytest.raises(grpc.InferenceServerException, match=limit):
                ask(tokens, **asked)
        assert ask(MOST + 1).as_numpy("output_ids").shape == (1, 1, MOST + 4)
