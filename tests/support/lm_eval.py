"""lm_eval, the evaluation harness, as a program on tasks of a few rows."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ROOT

PYTHON = ROOT / ".cache/load/lm_eval/bin/python"
needs_lm_eval = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"{PYTHON.relative_to(ROOT)} is absent: run make lm-eval (570 MB)"
)
GENERATE = """
task: {name}
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
task: {name}
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
READ = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: word_perplexity}}]
"""
Samples = list[dict[str, Any]]


def evaluate(
    folder: Path, tasks: Mapping[str, tuple[str, Sequence[Mapping[str, Any]]]], module: str, *arguments: str
) -> tuple[dict[str, dict[str, float]], dict[str, Samples]]:
    """Scores of tasks, given by name with their YAML and rows, and the samples that lm_eval logs."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (task, rows) in tasks.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(task.format(name=name, data=data))
    command = [str(PYTHON), "-m", module, *arguments, "--tasks", ",".join(tasks), "--include_path", str(folder)]
    command += ["--output_path", str(folder / "results"), "--log_samples"]
    own = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (results,) = (folder / "results").rglob("results_*.json")
    found: dict[str, Samples] = {}
    for name in tasks:
        (samples,) = (folder / "results").rglob(f"samples_{name}_*.jsonl")
        logged = [json.loads(line) for line in samples.read_text().splitlines()]
        found[name] = sorted(logged, key=lambda one: int(one["doc_id"]))
    return json.loads(results.read_text())["results"], found
