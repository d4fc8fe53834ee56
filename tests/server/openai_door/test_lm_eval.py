"""lm_eval, the evaluation harness, asks the OpenAI port; it is no dependency: pip install 'lm_eval[api]' 'pyarrow<21'."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from openai import OpenAI
from tests.conftest import BuildEngine, RandomModel

from kvseek.server.launch import running_server
from kvseek.server.settings import ServeSettings

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed"),
]

QUESTIONS = ["the harbour master", "one ship, two ships", "the light was"]
TASK = """
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


def test_a_task_that_generates_text(random_model: RandomModel, build_engine: BuildEngine, tmp_path: Path) -> None:
    limits = ("--max_batch_size", "2", "--max_seq_len", "400")
    directory = build_engine(random_model("llama"), "full", *limits)
    with running_server(directory, settings=ServeSettings(threads=1)) as server:
        client = OpenAI(base_url=server.openai_url, api_key="none")
        model = client.models.list().data[0].id
        answers = [
            client.completions.create(model=model, prompt=question, max_tokens=6, temperature=0).choices[0].text
            for question in QUESTIONS
        ]
        data = tmp_path / "tiny.jsonl"
        # The last answer is wrong on purpose.
        expected = [*answers[:-1], "something else"]
        rows = [{"question": q, "answer": a} for q, a in zip(QUESTIONS, expected, strict=True)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "tiny.yaml").write_text(TASK.format(data=data))
        target = f"model={model},base_url={server.openai_url}/completions"
        command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", "tiny"]
        command += ["--model_args", f"{target},num_concurrent=2,tokenized_requests=False,tokenizer_backend=None"]
        command += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "results"), "--log_samples"]
        own = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
        done = subprocess.run(
            command, env={**os.environ, **own}, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
    (results,) = (tmp_path / "results").rglob("results_*.json")
    scores = json.loads(results.read_text())["results"]["tiny"]
    assert scores["exact_match,none"] == pytest.approx(2 / 3)
