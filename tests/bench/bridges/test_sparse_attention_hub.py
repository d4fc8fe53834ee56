"""A model behind sparse-attention-hub attends to what a method of kvseek selects. `make test-bridges` has the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.bench.bridges.test_attention import (
    CACHE,
    FORCED,
    MAX_DIFFERENCE,
    PROMPT,
    SELECTED,
    check_close,
    logits_of,
    selected_logits,
)
from tests.conftest import RandomModel
from tests.plugins.cases import CASES
from torch import Tensor
from transformers import DynamicCache

from kvseek.bench.bridges.selector import Selector
from kvseek.core.errors import ConfigError

hub = pytest.importorskip("sparse_attention_hub", reason="the hub is not installed, as in CI: make test-bridges")
CALLS = [PROMPT, FORCED[:12], *([token] for token in FORCED[12:])]


@pytest.fixture(scope="module")
def folder(random_model: RandomModel) -> Path:
    return random_model("qwen3")


def adapter_of(folder: Path, method: str, settings: Any) -> Any:
    from sparse_attention_hub.sparse_attention.research_attention import ResearchAttentionConfig

    from kvseek.bench.bridges.sparse_attention_hub import KvseekMaskerConfig

    config = ResearchAttentionConfig(masker_configs=[KvseekMaskerConfig(method, settings, CACHE)])
    return hub.ModelAdapterHF(str(folder), config, model_kwargs={"dtype": torch.float32}, device="cpu")


@torch.no_grad()
def logits_through(adapter: Any, calls: list[list[int]], sparse_prompt: bool = False) -> Tensor:
    """As the hub's own process_request: the first call with dense attention, the others in the sparse mode."""
    cache, state = DynamicCache(), dict[str, Any]()

    def call(tokens: list[int]) -> Tensor:
        logits: Tensor = adapter.model(torch.tensor([tokens]), past_key_values=cache, sparse_meta_data=state).logits[0]
        return logits

    if sparse_prompt:
        with adapter.enable_sparse_mode():
            first = call(calls[0])
    else:
        first = call(calls[0])
    with adapter.enable_sparse_mode():
        return torch.cat([first[-1:], *(call(tokens) for tokens in calls[1:])])


@pytest.mark.parametrize("method", ["nested", "pariskv", "clusterkv", "quest", "streamingllm"])
def test_logits_are_those_of_the_selection(method: str, folder: Path) -> None:
    """Of two sequences with one masker."""
    adapter = adapter_of(folder, method, CASES[method].sparse)
    selector = Selector(method, CASES[method].sparse, CACHE)
    for calls in (CALLS, [PROMPT[30:], *CALLS[1:]]):
        expected = selected_logits(adapter.model, selector, calls)
        check_close(logits_through(adapter, calls), expected)
        assert (logits_of(adapter.model, calls) - expected).abs().amax(dim=1)[1:].min() >= SELECTED


@pytest.mark.parametrize("method", ["nested", "ctkvr"])
def test_a_context_may_be_read_in_the_sparse_mode(method: str, folder: Path) -> None:
    adapter = adapter_of(folder, method, CASES[method].sparse)
    expected = selected_logits(adapter.model, Selector(method, CASES[method].sparse, CACHE), CALLS)
    check_close(logits_through(adapter, CALLS, sparse_prompt=True), expected)


def test_keeping_everything_is_dense(folder: Path) -> None:
    adapter = adapter_of(folder, "nested", CASES["nested"].everything)
    assert (logits_through(adapter, CALLS) - logits_of(adapter.model, CALLS)).abs().max() <= MAX_DIFFERENCE


def test_methods_that_need_the_contexts_queries_are_refused(folder: Path) -> None:
    adapter = adapter_of(folder, "ctkvr", CASES["ctkvr"].sparse)
    with pytest.raises(ConfigError, match="method = 'ctkvr': must be one whose index needs no queries of the context"):
        logits_through(adapter, CALLS)


def test_the_hub_answers_requests_with_it(folder: Path) -> None:
    adapter = adapter_of(folder, "nested", CASES["nested"].sparse)
    request = hub.Request(context="two ships, " * 60, questions=["what was lit?", "who wrote?"], answer_prefix="")
    response = adapter.process_request(request, {"max_new_tokens": 5}, {"max_context_length": 500})
    assert len(response.responses) == 2
