"""A Hugging Face model with kvseek's selection computes what an engine of kvseek does, with every method."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.engine.model.test_logits import engine_logits
from tests.plugins.cases import CASES, SELECTING, method_flags
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from kvseek.bench.bridges.attention import selecting
from kvseek.bench.bridges.selector import Selector
from kvseek.core.errors import ConfigError
from kvseek.engine.engine import Engine

CACHE = {"sink": 4, "local": 16, "update": 8, "full_threshold": 32}
WINDOW = [word for name, value in CACHE.items() for word in (f"--cache.{name}", str(value))]
PROMPT = torch.arange(230).mul(13).remainder(101).tolist()
FORCED = torch.arange(40).mul(17).remainder(101).tolist()
MAX_DIFFERENCE = 1e-4
SELECTED = 0.5  # least difference that a selection makes here, after each token


@pytest.fixture(scope="module")
def model(random_model: RandomModel) -> Any:
    return AutoModelForCausalLM.from_pretrained(random_model("qwen3"), dtype=torch.float32).eval()


@torch.no_grad()
def logits_of(model: Any, calls: list[list[int]]) -> Tensor:
    """Logits of a prompt's last token and of all tokens of the calls behind it, over one cache."""
    cache = DynamicCache()
    found = [model(torch.tensor([tokens]), past_key_values=cache).logits[0] for tokens in calls]
    return torch.cat([found[0][-1:], *found[1:]])


def selected_logits(model: Any, selector: Selector, calls: list[list[int]]) -> Tensor:
    with selecting(model, selector):
        return logits_of(model, calls)


def check_close(found: Tensor, expected: Tensor) -> None:
    """Logits [tokens, vocabulary] agree; rounding may change the last row of a selection, and with it what follows."""
    differences = (found - expected).abs().amax(dim=1)
    assert differences[0] <= MAX_DIFFERENCE, "a prompt is dense"
    assert differences.median() <= SELECTED / 50


ONE_BY_ONE = [PROMPT, *([token] for token in FORCED[:-1])]


@pytest.mark.parametrize("method", CASES)
def test_logits_are_those_of_an_engine(
    method: str, model: Any, random_model: RandomModel, build_engine: BuildEngine
) -> None:
    sparse = CASES[method].sparse
    flags = (*WINDOW, *method_flags(method, sparse), "--kernels", "reference")
    expected = engine_logits(Engine.load(build_engine(random_model("qwen3"), method, *flags)), PROMPT, FORCED)
    found = selected_logits(model, Selector(method, sparse, CACHE), ONE_BY_ONE)
    check_close(found, expected)
    selected = (found - logits_of(model, ONE_BY_ONE)).abs().amax(dim=1)[1:]
    assert selected.min() >= SELECTED if method in SELECTING else selected.max() <= MAX_DIFFERENCE


@pytest.mark.parametrize("method", SELECTING)
def test_keeping_everything_is_dense(method: str, model: Any) -> None:
    found = selected_logits(model, Selector(method, CASES[method].everything, CACHE), ONE_BY_ONE)
    assert (found - logits_of(model, ONE_BY_ONE)).abs().max() <= MAX_DIFFERENCE


def test_a_question_of_several_tokens_selects_for_each(model: Any) -> None:
    """Tokens leave the window on the way; a sequence goes on in a later context, and the next one begins anew."""
    selector = Selector("nested", CASES["nested"].sparse, CACHE)
    expected = selected_logits(model, selector, ONE_BY_ONE)
    for _ in range(2):
        check_close(selected_logits(model, selector, [PROMPT, FORCED[:25], FORCED[25:-1]]), expected)
    cache = DynamicCache()
    with torch.no_grad():
        for tokens in (PROMPT, FORCED[:-1]):
            with selecting(model, selector):
                found = model(torch.tensor([tokens]), past_key_values=cache).logits[0]
    check_close(torch.cat([expected[:1], found]), expected)


def test_the_model_is_as_before_outside(model: Any) -> None:
    before = logits_of(model, ONE_BY_ONE[:3])
    with pytest.raises(ConfigError), selecting(model, Selector("nested", {"top_k": 1}, CACHE, max_new_tokens=1)):
        logits_of(model, ONE_BY_ONE[:3])
    assert torch.equal(logits_of(model, ONE_BY_ONE[:3]), before)


def test_generation_goes_through_it(model: Any) -> None:
    """transformers' own loop, greedily: tokens of the logits above."""
    selector = Selector("flat", CASES["flat"].sparse, CACHE)
    prompt = torch.tensor([PROMPT])
    asked = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 20, "do_sample": False, "eos_token_id": -1}
    with selecting(model, selector):
        tokens = model.generate(prompt, **asked)
    generated = tokens[0, len(PROMPT) :].tolist()
    assert len(generated) == 20
    logits = selected_logits(model, selector, [PROMPT, *([token] for token in generated[:-1])])
    assert logits.argmax(dim=-1).tolist() == generated


def test_what_cannot_be_selected_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="method = 'nest': unknown; choose one of full"):
        Selector("nest")
    with pytest.raises(ConfigError, match="cache"):
        Selector(cache={"sinks": 4})
    with pytest.raises(ConfigError, match="max_new_tokens = -1: must be >= 0"):
        Selector(max_new_tokens=-1)
    selector = Selector("nested", CASES["nested"].sparse, CACHE, max_new_tokens=2)
    with selecting(model, selector), torch.no_grad():
        with pytest.raises(ConfigError, match="sequences of a batch = 2: must be 1; give them one by one"):
            model(torch.tensor([PROMPT, PROMPT]))
        cache = DynamicCache()
        model(torch.tensor([PROMPT]), past_key_values=cache)
        with pytest.raises(ConfigError, match="keys = 233: must be at most 232, the prompt's and max_new_tokens more"):
            model(torch.tensor([[1, 2, 3]]), past_key_values=cache)
        cache.crop(-33)  # those of the call that was refused, and 30 of the prompt
        with pytest.raises(ConfigError, match="keys = 201: must be 231, those of 230 tokens before and of 1 new ones"):
            model(torch.tensor([[1]]), past_key_values=cache)
    late, cache = Selector("nested", CASES["nested"].sparse, CACHE), DynamicCache()
    with torch.no_grad():
        model(torch.tensor([PROMPT]), past_key_values=cache)
        with (
            selecting(model, late),
            pytest.raises(ConfigError, match="layer = 0: must be one that has begun with a prompt"),
        ):
            model(torch.tensor([[1]]), past_key_values=cache)
