"""Text of requests with a tokenizer of the kind of Llama 2's, by every way that leads to one: prompt and answer are one text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.random_models import save_tokenizer
from tests.support.sentencepiece import save_sentencepiece

from kvseek.core.config import EngineConfig
from kvseek.core.model_config import ModelConfig
from kvseek.core.request import FinishReason, LogProbs, Request, SamplingConfig, StepOutput
from kvseek.engine.tokenizer import TOKENIZER_FOLDER, Tokenizer
from kvseek.generation import Generation
from kvseek.server.openai.choices import Choice
from kvseek.server.requests.models import (
    INFLIGHT_BATCHER_LLM,
    LLMAPI,
    LlmApiRequest,
    RepositoryLayout,
    RequestFactory,
    ServedRequest,
)

PROMPT, ANSWER = "France is", " Paris, the lamp"
MODEL = ModelConfig("llama", 384, 64, 128, 2, 2, 1, 32, 1e-5, 1e4, 512, eos_token_ids=(2,))
CONFIG = EngineConfig(MODEL, "full", max_input_len=100, max_seq_len=400)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("engine")
    save_sentencepiece(directory / TOKENIZER_FOLDER)
    return Tokenizer(directory)


def make(tokenizer: Tokenizer, layout: RepositoryLayout, **values: Any) -> ServedRequest:
    model = next(name for name, kind in layout.models.items() if kind.takes_text)
    inputs = {name: value if isinstance(value, list) else [value] for name, value in values.items()}
    return RequestFactory(layout, CONFIG, tokenizer).make_one(model, inputs)


def tensorrt_llm(tokenizer: Tokenizer, stop: tuple[str, ...], stream: bool) -> Any:
    stops = {"stop_words": [*stop]} if stop else {}
    values = {"text_input": PROMPT, "max_tokens": 40, "stream": stream, "exclude_input_in_output": True} | stops
    return make(tokenizer, INFLIGHT_BATCHER_LLM, **values)


def llmapi(tokenizer: Tokenizer, stop: tuple[str, ...], stream: bool) -> Any:
    values = {"text_input": PROMPT, "sampling_param_max_tokens": 40, "streaming": stream}
    own = {"sampling_param_exclude_input_from_output": True} | ({"sampling_param_stop": [*stop]} if stop else {})
    return make(tokenizer, LLMAPI, **values, **own)


def openai(tokenizer: Tokenizer, stop: tuple[str, ...], stream: bool) -> Any:
    return Choice(Request(tuple(tokenizer.encode(PROMPT)), 40), tokenizer, stop, stream)


def python(tokenizer: Tokenizer, stop: tuple[str, ...], stream: bool) -> Any:
    sequence: Any = SimpleNamespace(request=Request(tuple(tokenizer.encode(PROMPT)), 40))
    return Generation(0, PROMPT, sequence, tokenizer, stop, {})


def text_of(tokenizer: Tokenizer, served: Any, stream: bool) -> str:
    """The text that the client has at the end, when the engine has drawn the answer."""
    ids = tokenizer.encode(PROMPT + ANSWER)[len(tokenizer.encode(PROMPT)) :]
    found: list[str] = []
    for number, token in enumerate(ids):
        out = StepOutput(1, token, FinishReason.LENGTH if number == len(ids) - 1 else None)
        if isinstance(served, Generation):
            piece = served.push(out)
            found += [piece.text] if piece is not None else []
            continue
        for chunk in served.push([out]):
            text = chunk.get("text_output", chunk.get("text"))
            found = [text] if isinstance(served, LlmApiRequest) else [*found, text]
    return "".join(found)


@pytest.mark.parametrize("port", [tensorrt_llm, llmapi, openai, python])
@pytest.mark.parametrize("stream", [False, True])
def test_prompt_and_answer_are_the_text_of_all_tokens(
    tokenizer: Tokenizer, port: Callable[..., Any], stream: bool
) -> None:
    assert text_of(tokenizer, port(tokenizer, (), stream), stream) == ANSWER
    assert text_of(tokenizer, port(tokenizer, (" Paris",), stream), stream) == ""
    assert text_of(tokenizer, port(tokenizer, (" the", ","), stream), stream) == " Paris"


def test_offsets_of_tokens_count_the_space(tokenizer: Tokenizer) -> None:
    request = Request(tuple(tokenizer.encode(PROMPT)), 40, SamplingConfig(logprobs=0))
    choice, ids = Choice(request, tokenizer, (), False), tokenizer.encode("Paris is", add_special_tokens=False)
    outputs = [StepOutput(1, token, logprobs=LogProbs(-1.0, ())) for token in ids]
    outputs[-1] = StepOutput(1, ids[-1], FinishReason.LENGTH, logprobs=LogProbs(-1.0, ()))
    (piece,) = choice.push(outputs)
    assert [offset for _, _, offset in piece["tokens"]] == [0, len(" Paris")]


@pytest.mark.parametrize("kind", ["sentencepiece", "byte-level"])
@pytest.mark.parametrize("word", ["Paris", " Paris", "1931", "the lamp", "in 1931", "(", "\n", "灯"])
def test_a_bias_on_a_word_is_none_on_the_space(tmp_path: Path, kind: str, word: str) -> None:
    (save_sentencepiece if kind == "sentencepiece" else save_tokenizer)(tmp_path / TOKENIZER_FOLDER)
    tokenizer = Tokenizer(tmp_path)
    values: dict[str, Any] = {"text_input": "a", "max_tokens": 1, "embedding_bias_words": word}
    served = make(tokenizer, INFLIGHT_BATCHER_LLM, **values, embedding_bias_weights=2.0)
    biased = dict(served.request.sampling.logit_bias)
    assert biased
    assert set(biased.values()) == {2.0}
    texts = [tokenizer.token_bytes(token) for token in biased]
    assert b" " not in texts
    assert all(text.strip(b" ") in word.encode() for text in texts)


def test_spellings_are_those_inside_of_a_text(tokenizer: Tokenizer) -> None:
    """At the beginning of a text the tokenizer would put a space before the word, and two before one that has its own."""
    behind, at_line_start = tokenizer.encode(".\nParis"), tokenizer.encode(". Paris")
    for spelling in (behind[-1:], at_line_start[-1:]):
        assert tuple(spelling) in tokenizer.spellings("Paris")
    for word in ("Paris", " Paris", "Gent", " Gent"):
        for spelling in tokenizer.spellings(word):
            text = b"".join(map(tokenizer.token_bytes, spelling)).decode()
            assert text in (" " + word.lstrip(), word)
