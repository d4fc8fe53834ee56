"""bench/speed/studies/long_request.py on the CPU: a request that is longer than its model's positions allow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.conftest import RandomModel

from kvseek.bench.speed.studies import long_request


@pytest.mark.parametrize("method", ["full", "nested"])
def test_a_prompt_beyond_the_models_positions(method: str, random_model: RandomModel, tmp_path: Path) -> None:
    model, file = random_model("qwen3", max_position_embeddings=2048), tmp_path / "result.json"
    flags = ["--model", str(model), "--method", method, "--device", "cpu", "--threads", "1", "--output", str(file)]
    assert long_request.main([*flags, "--tokens", "3000", "--answer", "5"]) == 0
    document = json.loads(file.read_text())
    assert document["generated"] == 5
    assert (
        document["attended_tokens"] == pytest.approx(3004)
        if method == "full"
        else 0 < document["attended_tokens"] < 1000
    )
    assert document["memory"]["host_rows_planned"] > 0


def test_other_checkpoints_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert long_request.main(["--model", str(tmp_path), "--device", "cpu"]) == 1
    assert "has no config.json; name a Hugging Face directory" in capsys.readouterr().err
