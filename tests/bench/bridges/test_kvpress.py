"""kvpress's pipeline answers with what a method of kvseek selects. `make test-bridges` has kvpress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.bench.bridges.test_attention import CACHE, FORCED, PROMPT, logits_of, selected_logits
from tests.conftest import RandomModel
from tests.plugins.cases import CASES
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvseek.bench.bridges.selector import Selector

kvpress = pytest.importorskip("kvpress", reason="kvpress is not installed, as in CI: make test-bridges")
CONTEXT = "one ship, two ships, the harbour master wrote the log at dusk. " * 8
QUESTION = "What was lit at dusk, and who wrote the log of the three ships in 1931?"
TOKENS = 20


@pytest.fixture(scope="module")
def folder(random_model: RandomModel) -> Path:
    return random_model("llama")


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = -1
    return kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=AutoTokenizer.from_pretrained(folder))


def press(method: str, settings: Any) -> Any:
    from kvseek.bench.bridges.kvpress import KvseekPress

    return KvseekPress(Selector(method, settings, CACHE))


def answer(pipeline: Any, used: Any) -> str:
    found: str = pipeline(CONTEXT, question=QUESTION, press=used, max_new_tokens=TOKENS)["answer"]
    return found


@pytest.mark.parametrize("method", ["nested", "ctkvr", "quest"])
def test_keeping_everything_answers_as_without_a_press(method: str, pipeline: Any) -> None:
    assert answer(pipeline, press(method, CASES[method].everything)) == answer(pipeline, None)


@pytest.mark.parametrize("method", ["nested", "prkv", "snapkv"])
def test_the_answer_is_that_of_the_selection(method: str, pipeline: Any) -> None:
    """Its tokens are those of the logits that the selector alone gives, twice with one press."""
    used, selector = press(method, CASES[method].sparse), Selector(method, CASES[method].sparse, CACHE)
    found, model = answer(pipeline, used), pipeline.model
    parts = pipeline.preprocess(CONTEXT, [QUESTION], "", 10_000)
    context, question = parts["context_ids"][0].tolist(), parts["questions_ids"][0][0].tolist()
    assert len(context) > 2 * (CACHE["local"] + CACHE["update"])
    tokens: list[int] = []
    while len(tokens) < TOKENS:
        calls = [context, question, *([token] for token in tokens)]
        tokens.append(int(selected_logits(model, selector, calls)[-1].argmax()))
    assert found == pipeline.tokenizer.decode(tokens, skip_special_tokens=True)
    assert found != answer(pipeline, None)
    assert answer(pipeline, used) == found


def test_the_mask_of_kvpress_would_overwrite_keys(pipeline: Any) -> None:
    """Why the press does not use it: a key that is masked in one step is lost to all later ones."""
    model, layer = pipeline.model, pipeline.model.model.layers[0].self_attn
    whole = logits_of(model, [PROMPT, FORCED[:1], FORCED[1:2]])
    head = torch.zeros(1, dtype=torch.int64)

    def masked_once(module: Any, inputs: Any, kwargs: Any) -> None:
        step = kwargs["past_key_values"].get_seq_length(0)
        module.masked_key_indices = (head, head, head + 50) if step == len(PROMPT) else None

    hook = layer.register_forward_pre_hook(masked_once, with_kwargs=True)
    try:
        found = logits_of(model, [PROMPT, FORCED[:1], FORCED[1:2]])
    finally:
        hook.remove()
    assert torch.equal(found[0], whole[0])
    assert not torch.allclose(found[2], whole[2], atol=1e-3), "no key is masked in the last step"
