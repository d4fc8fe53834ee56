"""lm_eval, the evaluation harness, asks the OpenAI port."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from tests.conftest import BuildEngine, RandomModel
from tests.support import lm_eval

from kvseek.server.launch import RunningServer

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    lm_eval.needs_lm_eval,
]

QUESTIONS = ["the harbour master", "one ship, two ships", "the light was"]


@pytest.fixture(scope="module")
def model_folder(random_model: RandomModel) -> Path:
    return random_model("llama")


@pytest.fixture(scope="module")
def directory(model_folder: Path, build_engine: BuildEngine) -> Path:
    return build_engine(model_folder, "full", "--max_batch_size", "2", "--max_seq_len", "400")


def evaluate(
    server: RunningServer, folder: Path, task: str, rows: list[dict[str, Any]], *arguments: str
) -> tuple[dict[str, float], lm_eval.Samples]:
    """Scores of a task with these rows, and the samples that lm_eval logs."""
    model = OpenAI(base_url=server.openai_url, api_key="none").models.list().data[0].id
    target = ",".join((f"model={model},base_url={server.openai_url}/completions,num_concurrent=2", *arguments))
    flags = ("--model", "local-completions", "--model_args", target, "--batch_size", "2")
    scores, samples = lm_eval.evaluate(folder, {"tiny": (task, rows)}, "lm_eval", *flags)
    return scores["tiny"], samples["tiny"]


def test_a_task_that_generates_text(server: RunningServer, tmp_path: Path) -> None:
    client = OpenAI(base_url=server.openai_url, api_key="none")
    model = client.models.list().data[0].id
    answers = [
        client.completions.create(model=model, prompt=question, max_tokens=6, temperature=0).choices[0].text
        for question in QUESTIONS
    ]
    expected = [*answers[:-1], "something else"]  # the last answer is wrong on purpose
    rows = [{"question": q, "answer": a} for q, a in zip(QUESTIONS, expected, strict=True)]
    scores, _ = evaluate(server, tmp_path, lm_eval.GENERATE, rows, "tokenized_requests=False", "tokenizer_backend=None")
    assert scores["exact_match,none"] == pytest.approx(2 / 3)


def test_a_multiple_choice_task(server: RunningServer, model_folder: Path, tmp_path: Path) -> None:
    """Log likelihoods of the choices are those of transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    choices = ["wrote the log", "two ships", "lit at dusk"]

    def likelihood(question: str, choice: str) -> float:
        context = tokenizer(question, add_special_tokens=False).input_ids
        ids = tokenizer(f"{question} {choice}", add_special_tokens=False).input_ids
        with torch.inference_mode():
            values = reference(torch.tensor([ids])).logits[0].log_softmax(dim=1)
        return sum(float(values[at - 1, ids[at]]) for at in range(len(context), len(ids)))

    expected = [[likelihood(question, choice) for choice in choices] for question in QUESTIONS]
    best = [values.index(max(values)) for values in expected]
    answers = [*best[:-1], (best[-1] + 1) % 3]  # the last one is wrong on purpose
    rows = [{"question": q, "choices": choices, "answer": a} for q, a in zip(QUESTIONS, answers, strict=True)]
    scores, samples = evaluate(server, tmp_path, lm_eval.CHOOSE, rows, f"tokenizer={model_folder}")
    assert scores["acc,none"] == pytest.approx(2 / 3)
    found = [[float(one[0]) for one in sample["filtered_resps"]] for sample in samples]
    for own, wanted in zip(found, expected, strict=True):
        assert own == pytest.approx(wanted, abs=1e-3)
