"""`kvseek bench --shape NAME --tp_size 1,2` on GPUs. No test asserts how long anything takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvseek.bench.speed import decode, shapes
from kvseek.core.model_config import ModelConfig
from kvseek.engine.parallel.cuda.gpus import SHARE_VARIABLE

pytestmark = pytest.mark.gpu

SHAPE = ModelConfig("llama", 1000, 512, 1024, 4, 8, 2, 64, 1e-5, 1e4, 512)


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> list[dict[str, object]]:
    monkeypatch.setitem(shapes.SHAPES, "tiny", SHAPE)
    output = tmp_path / "results" / "run.json"
    base = "--shape tiny --contexts 4096 --tp_size 1,2 --host_memory 1GiB --steps 6 --block 4"
    assert decode.main([*base.split(), "--output", str(output), *flags]) == 0
    document = json.loads(output.read_text(encoding="utf-8"))
    assert document["errors"] == []
    results: list[dict[str, object]] = document["results"]
    return results


def test_decode_steps_with_rows_in_either_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARE_VARIABLE, "1")
    results = run(tmp_path, monkeypatch, "--methods", "full,pariskv", "--offload", "always,never")
    found = [(entry["method"], entry["offload"], entry["host_layers"], entry["tp_size"]) for entry in results]
    places = [("full", "never", 0), ("pariskv", "always", SHAPE.num_layers), ("pariskv", "never", 0)]
    assert found == [(*place, size) for place in places for size in (1, 2)]
    assert all(bool(entry["sums"]) == (entry["tp_size"] == 2) for entry in results)


@pytest.mark.parametrize("precision", ["none", "int8"])
def test_prompts(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARE_VARIABLE, "1")
    flags = ["--methods", f"full:weight_only_precision={precision}", "--prefill", "--repeats", "2"]
    assert [entry["tp_size"] for entry in run(tmp_path, monkeypatch, *flags)] == [1, 2]


@pytest.mark.multi_gpu
def test_each_rank_has_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARE_VARIABLE, raising=False)
    results = run(tmp_path, monkeypatch, "--methods", "full,pariskv", "--offload", "auto")
    assert [entry["tp_size"] for entry in results] == [1, 2, 1, 2]
