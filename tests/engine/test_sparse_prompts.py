"""Engines whose prompts attend sparsely: real and random models on the CPU, against engines with dense prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.support.long_prompts import DOCUMENT, SHAPE, WINDOW, ask_logits
from tests.support.prefill import run_prefill, run_to_end
from torch import Tensor

from kvseek.core.config import BlockSparseConfig, EngineConfig, read_config
from kvseek.core.request import Request, SamplingConfig
from kvseek.engine.engine import Engine
from kvseek.engine.leading.leader import load_decoder
from kvseek.engine.loading.prefixes import digest
from kvseek.engine.model.activation_memory import prefill_bytes

pytestmark = pytest.mark.usefixtures("forked_ranks")

LIMITS = ("--max_batch_size", "3", "--max_seq_len", "3200", "--prefill_chunk_tokens", "600")
QUESTION = (5,) * 40
TAIL = 100


@pytest.fixture(scope="module")
def model(random_model: RandomModel) -> Path:
    return random_model("llama", num_attention_heads=4, num_key_value_heads=2, head_dim=32, **SHAPE)


@pytest.fixture(scope="module")
def directory(model: Path, build_engine: BuildEngine) -> Callable[..., Path]:
    def make(method: str = "full", *flags: str) -> Path:
        return build_engine(model, method, *WINDOW, *LIMITS, *flags)

    return make


def changed(
    directory: Path, budget: int | None, dense_tail: int = TAIL, chunk: int = 600, dense_layers: int = 0
) -> EngineConfig:
    """Configuration of an engine directory, sparse unless the budget is None: prompts need no files of their own."""
    config = dataclasses.replace(read_config(directory), prefill_chunk_tokens=chunk)
    settings = (
        BlockSparseConfig()
        if budget is None
        else BlockSparseConfig(budget, dense_tail=dense_tail, dense_layers=dense_layers)
    )
    kind = "dense" if budget is None else "block_sparse"
    return dataclasses.replace(config, prefill_attention=kind, block_sparse=settings)


def load(
    directory: Path, budget: int | None, *, dense_tail: int = TAIL, chunk: int = 600, dense_layers: int = 0
) -> Engine:
    config = changed(directory, budget, dense_tail, chunk, dense_layers)
    return Engine(config, load_decoder(directory, config), Engine.load(directory).tokenizer)


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_only_a_budget_that_covers_the_prompt_is_dense_attention(kernels: str, directory: Callable[..., Path]) -> None:
    path = directory("full", "--kernels", kernels)
    dense, _, _ = ask_logits(load(path, None), DOCUMENT)
    assert torch.equal(ask_logits(load(path, 2304), DOCUMENT)[0], dense)
    assert torch.equal(ask_logits(load(path, 512, dense_tail=2300), DOCUMENT)[0], dense)
    assert torch.equal(ask_logits(load(path, 512, dense_layers=2), DOCUMENT)[0], dense)
    differences = [(ask_logits(load(path, budget), DOCUMENT)[0] - dense).abs().max() for budget in (1536, 512)]
    assert 1e-4 < differences[0] < differences[1] < 1


def test_kernels_choose_as_the_reference_does(directory: Callable[..., Path]) -> None:
    found, expected = (
        ask_logits(load(directory("full", "--kernels", name), 512), DOCUMENT)[0] for name in ("native", "reference")
    )
    assert (found - expected).abs().max() < 1e-4


def test_the_index_gets_the_queries_and_keys_of_the_whole_prompt(directory: Callable[..., Path]) -> None:
    """Those of the first layer do not depend on attention; those of the next do."""
    path, stored = directory(), list[list[tuple[Tensor, ...]]]()
    for budget in (None, 512):
        decoder = load_decoder(path, changed(path, budget))
        layers, store = list[tuple[Tensor, ...]](), decoder.retrieval.store_layer

        def keep(layer: int, slot: int, *rows: Tensor, store: Any = store, layers: Any = layers) -> None:
            layers.append(tuple(part.clone() for part in rows))
            store(layer, slot, *rows)

        decoder.retrieval.store_layer = keep  # type: ignore[assignment,method-assign]
        run_prefill(decoder, 0, list(DOCUMENT), 4)
        stored.append(layers)
    dense, sparse = stored
    assert [part.shape for part in dense[1]] == [(2, 2300, 32), (2, 2300, 32), (4, 2048, 32)]
    assert all(torch.equal(one, other) for one, other in zip(dense[0], sparse[0], strict=True))
    assert all((one - other).abs().max() > 0 for one, other in zip(dense[1], sparse[1], strict=True))


def test_a_reused_beginning_is_continued_sparsely(directory: Callable[..., Path]) -> None:
    """The rest of a prompt is cut into chunks of its own, and so may choose other blocks: near, and not equal."""
    engine, dense = load(directory(), 1024), load(directory(), None)
    ask_logits(engine, DOCUMENT[:1500])
    prompt = DOCUMENT + QUESTION
    logits, _, reused = ask_logits(engine, prompt)
    assert reused == 1500
    cold, _, nothing = ask_logits(load(directory(), 1024), prompt)
    assert nothing == 0
    exact = ask_logits(dense, prompt)[0]
    assert (logits - cold).abs().max() < 2 * (cold - exact).abs().max()
    assert (logits - exact).abs().max() > 1e-5, "it is sparse"
    again, _, reused = ask_logits(engine, prompt)
    assert reused == len(prompt) - 1
    assert (again - logits).abs().max() < 1e-4


def test_prompts_in_company_are_read_as_alone(directory: Callable[..., Path]) -> None:
    """Short prompts in a pack and long ones, with log probabilities of a prompt."""
    prompts = [DOCUMENT, DOCUMENT[::-1][:1700], DOCUMENT[:90]]
    alone = [ask_logits(load(directory("full", "--cache.reuse", "false"), 512), prompt, 5)[1] for prompt in prompts]
    engine = load(directory("full", "--cache.reuse", "false"), 512)
    numbers = [engine.submit(Request(prompt, 5, SamplingConfig(prompt_logprobs=1))) for prompt in prompts]
    outputs = run_to_end(engine)
    tokens = {n: [one.token_id for one in outputs if one.request_id == n and one.token_id is not None] for n in numbers}
    assert [tokens[number] for number in numbers] == alone
    told = [sum(len(one.prompt_logprobs) for one in outputs if one.request_id == n) for n in numbers]
    assert told == [len(prompt) - 1 for prompt in prompts]


def test_ranks_choose_for_their_own_heads(directory: Callable[..., Path]) -> None:
    sparse = (
        "--prefill_attention",
        "block_sparse",
        "--block_sparse.budget",
        "512",
        "--block_sparse.dense_tail",
        str(TAIL),
    )
    answers = []
    for flags in ((), ("--tp_size", "2")):
        engine = Engine.load(directory("full", *sparse, *flags))
        try:
            answers.append(ask_logits(engine, DOCUMENT, 5))
        finally:
            engine.close()
    assert (answers[0][0] - answers[1][0]).abs().max() < 1e-4
    assert answers[0][1] == answers[1][1]


@pytest.mark.slow
def test_a_real_model_answers_from_a_long_prompt(smollm2_gguf: Path, build_engine: BuildEngine, document: str) -> None:
    """As with dense prompts, with half of the budget that would cover the past; what is asked for is far from the question."""
    path = build_engine(smollm2_gguf, "full", "--max_batch_size", "1", "--max_seq_len", "4096", "--no-check")
    tokenizer = Engine.load(path).tokenizer
    question = "How many passengers did the Lady Trelawny land?"
    place = document.index("Lady Trelawny, landed")
    text = document[max(0, place - 5000) : place + 4000]
    messages = [{"role": "user", "content": f"{text}\n\n{question}"}]
    prompt = tuple(tokenizer.encode(tokenizer.apply_chat_template(messages)))
    assert 2000 < len(prompt) < 4000
    answers = [ask_logits(load(path, budget, dense_tail=512, chunk=512), prompt, 12) for budget in (None, 1024)]
    assert answers[0][1] == answers[1][1]
    assert tokenizer.decode(answers[1][1]).startswith("The Lady Trelawny landed")
    assert not torch.equal(answers[0][0], answers[1][0])


def test_rows_on_disk_are_those_of_the_same_attention(directory: Callable[..., Path]) -> None:
    path = directory()
    digests = {digest(path, changed(path, *settings)) for settings in ((None,), (512,), (1024,), (512, 0))}
    assert len(digests) == 4
    assert digest(path, read_config(path)) in digests


def test_the_work_space_of_sparse_prompts_is_counted(directory: Callable[..., Path]) -> None:
    path = directory()
    dense, covered, sparse = (prefill_bytes(changed(path, budget), torch.float32, 2300) for budget in (None, 4096, 512))
    rows = 2 * 2 * (512 + 64 + 600) * 32 * 4
    assert dense == covered
    assert sparse - dense > rows
