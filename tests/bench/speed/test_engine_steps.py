"""bench/speed/studies/engine_steps.py on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvseek.bench.speed import shapes
from kvseek.bench.speed.studies import engine_steps
from kvseek.core.model_config import ModelConfig

TINY = ModelConfig("llama", 3000, 64, 96, 2, 4, 2, 16, 1e-6, 1e4, 512)


def test_each_batch_is_timed_for_each_kind_of_drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)
    output = tmp_path / "result.json"
    where = ["--shape", "tiny", "--layers", "1", "--device", "cpu", "--dtype", "float32"]
    what = ["--drawn", "2x60", "--mixed", "200+2x60", "--steps", "1", "--row_memory", "64MiB"]
    assert engine_steps.main([*where, *what, "--output", str(output)]) == 0
    results = json.loads(output.read_text(encoding="utf-8"))["results"]
    assert [one["kind"] for one in results if one["batch"] == "2x60"] == list(engine_steps.KINDS)
    assert results[-1]["batch"] == "200+2x60"
    assert all(one["seconds"] > 0 for one in results)


@pytest.mark.parametrize("text", ["0x4", "4096+", "x4", "4k"])
def test_a_batch_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_steps.main(["--shape", "smollm2-135m", "--mixed", text]) == 1
    assert f"--mixed {text!r}: must be such as 262144+7x4096" in capsys.readouterr().err


def test_lengths_of_a_batch() -> None:
    assert engine_steps.lengths("9+2x3") == [9, 3, 3]
