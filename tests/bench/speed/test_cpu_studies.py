"""Studies of engines on the CPU: what they compare and write. No test here asserts how long anything takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.conftest import BuildEngine, RandomModel

from kvseek.bench.speed.studies import prompt_forms, sampled_steps

LIMITS = ("--max_batch_size", "2", "--max_seq_len", "400", "--max_input_len", "400")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The dredger lay at the quay, and nobody went ashore before dusk. " * 20, encoding="utf-8")
    return path


def test_prompts_in_several_forms(
    random_model: RandomModel, build_engine: BuildEngine, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = random_model("llama"), tmp_path / "result.json"
    precisions = ("float32",), ("bfloat16", "--weight_only_precision", "int8")
    engines = [str(build_engine(model, "full", *LIMITS, "--dtype", *one)) for one in precisions]
    flags = ["--text", str(text), "--tokens", "100", "--scored", "50", "--rounds", "2", "--threads", "1"]
    assert prompt_forms.main(["--engine_dirs", *engines, *flags, "--output", str(file)]) == 0
    first, second = json.loads(file.read_text())["results"]
    assert (first["engine"], second["engine"]) == ("float32", "bfloat16, int8")
    assert first["to_first"] == 1
    assert first["seconds"]["count"] == 2
    assert [one["perplexity_ratio"] for one in first["texts"]] == [1]
    assert [one["tokens"] for one in second["texts"]] == [50]
    assert all(one["same"] > 0.5 and abs(one["perplexity_ratio"] - 1) < 0.1 for one in second["texts"])
    assert "bfloat16, int8" in capsys.readouterr().out


def test_sampled_steps_beside_greedy_ones(
    random_model: RandomModel, build_engine: BuildEngine, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, file = build_engine(random_model("llama"), "full", *LIMITS), tmp_path / "result.json"
    flags = ["--engine_dir", str(engine), "--text", str(text), "--threads", "1", "--prompt", "20"]
    sizes = ["--requests", "1,2", "--steps", "2", "--rounds", "2", "--output", str(file)]
    assert sampled_steps.main([*flags, *sizes]) == 0
    results = json.loads(file.read_text())["results"]
    kinds = list(sampled_steps.KINDS)
    assert [(entry["requests"], entry["kind"]) for entry in results] == [(n, kind) for n in (1, 2) for kind in kinds]
    assert [entry["added_share"] for entry in results[:: len(kinds)]] == [0, 0]
    assert all(entry["samples"]["whole"]["count"] == 4 for entry in results)
    assert all(0 < entry["beside_seconds"] < entry["seconds"] for entry in results)
    capsys.readouterr()
    assert sampled_steps.main([*flags, "--requests", "100"]) == 1
    assert "must have 100 prompts of 20; lower --prompt" in capsys.readouterr().err
