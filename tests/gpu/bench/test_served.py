"""The benchmark of the server on a GPU in its short form: what it measures, tests/bench/test_served.py tests on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.conftest import ROOT

from kvseek.bench.load import served
from kvseek.bench.speed import shapes
from kvseek.core.model_config import ModelConfig

pytestmark = [pytest.mark.gpu, pytest.mark.server]

SHAPE = ModelConfig("llama", 1000, 512, 1024, 4, 8, 2, 64, 1e-5, 1e4, 512)
FLAGS = [
    *("--shape", "tiny", "--methods", "full,nested", "--text", str(ROOT / "examples/harbour_log.txt")),
    *("--scale", "0.1", "--row_memory", "1GiB", "--max_batch_size", "4", "--requests", "3", "--concurrency", "2"),
    *("--bare", "2", "--rates", "8", "--arrival_seconds", "0.5", "--streams", "2", "--window", "1"),
]


def test_every_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", SHAPE)
    output = tmp_path / "served.json"
    assert served.main([*FLAGS, "--output", str(output)]) == 0
    document = json.loads(output.read_text(encoding="utf-8"))
    assert document["left_out"] == []
    for method in ("full", "nested"):
        assert sum(one["method"] == method for one in document["results"]) == 5
        assert sum(one["method"] == method for one in document["beside"]) == 6
    assert "name" in document["gpu"]
