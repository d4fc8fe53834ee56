"""LLM.score: log probabilities of given tokens, by the steps that generate; RequestOutput.perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.plugins.cases import CASES, method_flags

from kvseek import LLM, RequestError, SamplingParams
from kvseek.plugins.registry import METHODS

PROMPTS = [[i * 13 % 101 + 3 for i in range(number, 90 + 7 * number)] for number in range(3)]
GIVEN = [[5, 1, 77, 5, 5, 300, 12, 40] * 4, [9], [1, 1, 250]]  # 1 is the model's end token
WINDOW = ("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "32")
LIMITS = ("--max_batch_size", "3", "--max_seq_len", "240", "--max_input_len", "200")


@pytest.fixture(scope="module")
def directory(random_model: RandomModel, build_engine: BuildEngine) -> Callable[[str], Path]:
    def build(method: str) -> Path:
        few = method_flags(method, CASES[method].sparse)
        return build_engine(random_model("llama"), method, *WINDOW, *LIMITS, *few)

    return build


def test_those_of_transformers(random_model: RandomModel, directory: Callable[[str], Path]) -> None:
    """Dense attention, float32; prompts and continuations of different lengths in a batch."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(random_model("llama"), dtype=torch.float32).eval()
    with LLM(directory("full")) as llm:
        outputs = llm.score(PROMPTS, GIVEN, logprobs=3)
    for prompt, given, output in zip(PROMPTS, GIVEN, outputs, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *given]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(dim=1)
        own = expected.gather(1, torch.tensor(given)[:, None])[:, 0]
        assert (list(output.token_ids), output.finish_reason) == (given, "length")
        assert output.logprobs is not None
        assert [one.token for one in output.logprobs] == pytest.approx(own.tolist(), abs=2e-4)
        assert [[token for token, _ in one.top] for one in output.logprobs] == expected.topk(3).indices.tolist()
        assert output.cumulative_logprob == pytest.approx(own.sum().item(), abs=1e-2)
        assert output.perplexity == pytest.approx(math.exp(-own.mean().item()), rel=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_of_what_is_generated_they_are_the_same_bits(method: str, directory: Callable[[str], Path]) -> None:
    """Also behind a prompt that is not read again. Other tokens get others, from steps that select rows as these do."""
    with LLM(directory(method)) as llm:
        params = SamplingParams(max_tokens=30, ignore_eos=True, logprobs=2)
        expected = llm.generate(PROMPTS, params)
        again = llm.generate(PROMPTS, params)  # behind what the first have left
        outputs = llm.score(PROMPTS, [output.token_ids for output in expected], logprobs=2)
        assert [output.reused_tokens for output in outputs] == [output.reused_tokens for output in again]
        assert any(output.reused_tokens for output in outputs)
        for output, own in zip(outputs, again, strict=True):
            assert (output.token_ids, output.logprobs) == (own.token_ids, own.logprobs)
            assert (output.attended_tokens, output.cached_tokens) == (own.attended_tokens, own.cached_tokens)
        (other,) = llm.score(PROMPTS[0], GIVEN[0])
        assert other.attended_tokens <= other.cached_tokens
        assert (other.attended_share < 1) == (method != "full")
        assert other.cumulative_logprob != pytest.approx(outputs[0].cumulative_logprob)


def test_texts(directory: Callable[[str], Path]) -> None:
    """A continuation is tokenised by itself, without the tokens that begin a text; one prompt serves for several."""
    with LLM(directory("nested")) as llm:
        ids = [llm.tokenizer.encode(text, add_special_tokens=False) for text in (" the light", " at dusk")]
        outputs = llm.score("the log", [" the light", " at dusk"])
        assert [list(output.token_ids) for output in outputs] == ids
        assert [output.text for output in outputs] == [" the light", " at dusk"]
        (alone,) = llm.score(list(outputs[0].prompt_token_ids), ids[1])
        assert alone.cumulative_logprob == pytest.approx(outputs[1].cumulative_logprob, abs=1e-5)
        # What follows the given tokens is drawn.
        (longer,) = llm.generate("the log", SamplingParams(max_tokens=9, forced_tokens=ids[0], ignore_eos=True))
        (rest,) = llm.generate([[*outputs[0].prompt_token_ids, *ids[0]]], SamplingParams(max_tokens=9, ignore_eos=True))
        assert longer.token_ids == (*ids[0], *rest.token_ids)[:9]
        assert (longer.cumulative_logprob, longer.perplexity) == (None, None)


def test_end_tokens_end_an_output_unless_ignored(directory: Callable[[str], Path]) -> None:
    with LLM(directory("full")) as llm:
        (output,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=8, forced_tokens=GIVEN[0][:8], logprobs=0))
    assert (output.token_ids, output.finish_reason) == ((5,), "end_id")
    assert len(output.logprobs) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda llm: llm.score("log", ["a", []]),
            r"continuations\[1\] = \[\]: must be at least one token; leave it out",
        ),
        (lambda llm: llm.score("log", ""), r"continuations\[0\] = '': must be at least one token"),
        (lambda llm: llm.score("log", 5), "continuations = 5: must be a text"),
        (lambda llm: llm.score(["a", "b"], ["c"]), "continuations has 1 entries: must be 2, one for each prompt"),
        (lambda llm: llm.score([[5]], [[7, 384]]), r"continuations = 384: must be in \[0, 384\)"),
        (lambda llm: llm.score([[5]], [[7, -1]]), r"continuations = -1: must be in \[0, 384\)"),
        (
            lambda llm: llm.score([PROMPTS[0], PROMPTS[1]], [[7], [7] * 200]),
            r"prompts\[1\]: continuations = '200 tokens': must be <= max_seq_len = 240 together with the prompt of 96 tokens",
        ),
        (lambda llm: llm.score("log", "a", logprobs=21), r"logprobs = 21: must be in \[0, 20\]"),
        (
            lambda llm: llm.generate("log", SamplingParams(max_tokens=2, forced_tokens=[5, 5, 5])),
            "forced_tokens = '3 tokens': must be <= 2, the most tokens to generate; ask for more tokens",
        ),
    ],
)
def test_errors(call: Callable[[LLM], Any], message: str, directory: Callable[[str], Path]) -> None:
    with LLM(directory("full")) as llm, pytest.raises(RequestError, match=f"^{message}"):
        call(llm)
