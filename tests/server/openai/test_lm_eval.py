"""lm_eval, the evaluation harness, asks the OpenAI port; it is no dependency: pip install 'lm_eval[api]' 'pyarrow<21'."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from tests.conftest import BuildEngine, RandomModel

from kvseek.server.launch import RunningServer

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed"),
]

QUESTIONS = ["the harbour master", "one ship, two ships", "the light was"]
GENERATE = """
task: tiny
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["never there"], max_gen_toks: 6, temperature: 0, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
CHOOSE = """
task: tiny
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def model_folder(random_model: RandomModel) -> Path:
    return random_model("llama")


@pytest.fixture(scope="module")
def directory(model_folder: Path, build_engine: BuildEngine) -> Path:
    return build_engine(model_folder, "full", "--max_batch_size", "2", "--max_seq_len", "400")


def evaluate(
    server: RunningServer, folder: Path, task: str, rows: list[dict[str, Any]], *arguments: str
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Scores of a task with these rows, and the samples that lm_eval logs."""
    data = folder / "tiny.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tiny.yaml").write_text(task.format(data=data))
    model = OpenAI(base_url=server.openai_url, api_key="none").models.list().data[0].id
    target = ",".join((f"model={model},base_url={server.openai_url}/completions,num_concurrent=2", *arguments))
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", "tiny"]
    command += [
        "--model_args",
        target,
        "--batch_size",
        "2",
        "--include_path",
        str(folder),
        "--output_path",
        str(folder / "results"),
    ]
    own = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        [*command, "--log_samples"], env={**os.environ, **own}, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (results,) = (folder / "results").rglob("results_*.json")
    (samples,) = (folder / "results").rglob("samples_*.jsonl")
    logged = [json.loads(line) for line in samples.read_text().splitlines()]
    return json.loads(results.read_text())["results"]["tiny"], sorted(logged, key=lambda one: int(one["doc_id"]))


def test_a_task_that_generates_text(server: RunningServer, tmp_path: Path) -> None:
    client = OpenAI(base_url=server.openai_url, api_key="none")
    model = client.models.list().data[0].id
    answers = [
        client.completions.create(model=model, prompt=question, max_tokens=6, temperature=0).choices[0].text
        for question in QUESTIONS
    ]
    expected = [*answers[:-1], "something else"]  # the last answer is wrong on purpose
    rows = [{"question": q, "answer": a} for q, a in zip(QUESTIONS, expected, strict=True)]
    scores, _ = evaluate(server, tmp_path, GENERATE, rows, "tokenized_requests=False", "tokenizer_backend=None")
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
    scores, samples = evaluate(server, tmp_path, CHOOSE, rows, f"tokenizer={model_folder}")
    assert scores["acc,none"] == pytest.approx(2 / 3)
    found = [[float(one[0]) for one in sample["filtered_resps"]] for sample in samples]
    for own, wanted in zip(found, expected, strict=True):
        assert own == pytest.approx(wanted, abs=1e-3)
