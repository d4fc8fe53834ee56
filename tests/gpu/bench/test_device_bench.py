"""`kvseek bench --device cuda` and what is beside it, from command line to table, on a tiny shape. No test asserts how long."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.support.random_models import save_random_model

from kvseek.bench import evaluate
from kvseek.bench.speed import decode, shapes
from kvseek.bench.speed.studies import cached_prompts, evictions, peers
from kvseek.core.model_config import ModelConfig

pytestmark = pytest.mark.gpu

SHAPE = ModelConfig("llama", 1000, 512, 1024, 4, 8, 2, 64, 1e-5, 1e4, 512)
WINDOW = 64 + 256  # sink and local window, which no method selects from
PARTS = {"begin", "norm", "qkv", "rope", "select", "attend", "o", "mlp_norm", "gate_up", "down", "head"}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", SHAPE)


def run(tmp_path: Path, *flags: str) -> dict[str, Any]:
    output = tmp_path / "results" / "run.json"
    sizes = ["--host_memory", "1GiB", "--steps", "6", "--block", "4", "--methods", "full,pariskv"]
    assert decode.main(["--shape", "tiny", *sizes, "--output", str(output), *flags]) == 0
    document: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return document


def test_decode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = run(tmp_path, "--contexts", "4096,5000", "--batches", "1,2", "--offload", "always,never", "--details")
    always, never = document["phases"]
    names = (["full never", "pariskv always hot", "pariskv always"], ["full never", "pariskv never"])
    for phase, expected in zip((always, never), names, strict=True):
        assert phase["errors"] == phase["skipped"] == []
        sizes = [(cell["context"], cell["batch"]) for cell in phase["cells"]]
        assert sizes == [(4096, 1), (4096, 2), (5000, 1), (5000, 2)]
        for cell in phase["cells"]:
            assert [entry["name"] for entry in cell["results"]] == expected
            for entry in cell["results"]:
                check_entry(entry, cell)
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("pariskv always hot", "floor: ", "5,000 tokens × 2")), printed


def check_entry(entry: dict[str, Any], cell: dict[str, Any]) -> None:
    selects, on_host = entry["method"] == "pariskv", "always" in entry["name"]
    assert entry["wall_seconds"]["count"] >= 6
    assert len(entry["samples"]) >= 2, "turns of four steps and of two"
    assert 0 < entry["upkeep_seconds"] < entry["step_seconds"]["median"]
    assert all(seconds > 0 for seconds in entry["samples"])
    assert entry["tokens_per_second"] == pytest.approx(cell["batch"] / entry["step_seconds"]["median"])
    assert entry["to_baseline"] == pytest.approx(entry["step_seconds"]["median"] / entry["baseline_seconds"])
    assert entry["to_floor"] == pytest.approx(entry["step_seconds"]["median"] / entry["floor"]["total"])
    assert entry["host_layers"] == (SHAPE.num_layers if on_host else 0)
    assert entry["stages"].keys() == PARTS
    selected = 100 if selects else (cell["context"] - 1 - WINDOW) // 256 * 256
    assert WINDOW < entry["attended_tokens"] - selected <= WINDOW + 256, "window and what was generated"
    assert (entry["index_bytes"] > 0) == selects
    if selects:
        assert 0 <= entry["hit_rate"] < 1
        assert entry["hot_rows"] or entry["hit_rate"] == 0
    assert cell["context"] - 256 < entry["cached_tokens"] <= cell["context"] + 256, "no timed step evicts"


def test_what_does_not_fit_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (phase,) = run(tmp_path, "--contexts", "4096,20000", "--host_memory", "0.02GiB")["phases"]
    assert [cell["context"] for cell in phase["cells"]] == [4096]
    assert "rows in host memory exceed the limit" in phase["skipped"][0]["reason"]
    assert "20,000 × 1 does not fit" in capsys.readouterr().out
    flags = ["--shape", "tiny", "--methods", "full,pariskv", "--contexts", "20000", "--host_memory", "0.02GiB"]
    assert decode.main(flags) == 1
    assert "no cell fits (20000 × 1: does not fit" in capsys.readouterr().err


def test_auto_takes_the_baseline_of_another_phase(tmp_path: Path) -> None:
    document = run(tmp_path, "--contexts", "4096", "--offload", "auto", "--hot_rows", "on")
    never, auto = document["phases"]
    assert (never["offload"], auto["offload"]) == ("never", "auto")
    (entry,) = auto["cells"][0]["results"]
    assert entry["host_layers"] == 0, "all fits"
    assert entry["baseline_of_another_phase"]


def test_throughput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights of one method lie on the device at a time."""
    narrow = "pariskv:weight_only_precision=int8"
    flags = ("--throughput", "--contexts", "4096", "--batches", "1,2", "--methods", f"full,pariskv,{narrow}")
    document = run(tmp_path, *flags)
    found = [(entry["method"], entry["batch"]) for entry in document["results"]]
    assert found == [(method, batch) for method in ("full", "pariskv", narrow) for batch in (1, 2)]
    for entry in document["results"]:
        assert entry["tokens_per_second"] == pytest.approx(entry["batch"] / entry["step_seconds"]["median"])
    assert [peak["method"] for peak in document["peaks"]] == ["full", "pariskv", narrow]
    assert "the baseline's peak" in capsys.readouterr().out


def test_prefill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = run(tmp_path, "--prefill", "--contexts", "4096,5000", "--repeats", "2")
    assert [(entry["method"], entry["tokens"]) for entry in document["results"]] == [
        (method, tokens) for tokens in (4096, 5000) for method in ("full", "pariskv")
    ]
    assert all(entry["seconds"]["count"] >= 2 and math.isfinite(entry["to_baseline"]) for entry in document["results"])
    printed = capsys.readouterr().out
    assert all(
        text in printed for text in ("prefill", "attention by cuDNN and flash attention", "a large product on this GPU")
    )
    for entry in (document["results"][0], document["results"][2]):
        assert all(seconds > 0 for seconds in entry["part_seconds"].values())
        assert sum(entry["part_seconds"].values()) < 2 * entry["seconds"]["max"]
    assert document["best_product_rate"] > 0


def test_questions_about_a_kept_document(tmp_path: Path) -> None:
    """It was not read but left in the cache."""
    file = tmp_path / "cached.json"
    flags = ["--shape", "tiny", "--methods", "full,pariskv", "--offload", "always,never", "--context", "5000"]
    flags += ["--rounds", "1", "--max_batch_size", "4", "--questions", "20", "--output", str(file)]
    assert cached_prompts.main(flags) == 0
    questions = json.loads(file.read_text(encoding="utf-8"))["results"]
    forms = [(entry["method"], entry["form"]) for entry in questions if entry["offload"] == "never"]
    assert forms == [("full", "dense"), ("pariskv", "dense"), ("pariskv", "sparse")]
    assert all(entry["questions"]["20"]["seconds"] > 0 for entry in questions)


def test_steps_beside_an_eviction(tmp_path: Path) -> None:
    output = tmp_path / "evictions.json"
    flags = ["--shape", "tiny", "--methods", "full,nested", "--contexts", "4096,5000", "--offload", "always,never"]
    assert evictions.main([*flags, "--output", str(output)]) == 0
    results = json.loads(output.read_text(encoding="utf-8"))["results"]
    cells = [(context, offload) for context in (4096, 5000) for offload in ("always", "never")]
    assert [(entry["context"], entry["offload"]) for entry in results] == cells * 2
    measured = ("step_seconds", "longest_seconds", "shown_seconds")
    assert all(entry[name] > 0 for entry in results for name in measured)


def test_layers_beside_what_is_not_there(tmp_path: Path) -> None:
    output = tmp_path / "peers.json"
    flags = ["--shape", "smollm2-135m", "--methods", "nested,pariskv", "--contexts", "8192", "--batches", "1,2"]
    assert peers.main([*flags, "--output", str(output)]) == 0
    document = json.loads(output.read_text(encoding="utf-8"))
    own = {(one["part"], one["name"], one["batch"]) for one in document["results"] if "kvseek" in one["name"]}
    decoded = {("decode", "kvseek full", 1), ("decode", "kvseek full", 2)}
    selected = {("selection", f"kvseek {method}", 1) for method in ("nested", "pariskv")}
    assert own == decoded | selected | {("prompt", "kvseek, in chunks", 1)}
    assert all(one["seconds"]["min"] > 0 for one in document["results"])
    assert "no checkout of its code" in document["skipped"]["ParisKV's code, selection at 8,192 x 1"]


CACHE = "cache.sink=4,cache.local=32,cache.update=64,cache.full_threshold=40"


def test_each_budget_has_its_kernels(tmp_path: Path) -> None:
    model, text, output = tmp_path / "model", tmp_path / "log.txt", tmp_path / "result.json"
    save_random_model(model, "llama", head_dim=64)
    text.write_text(
        "the harbour master wrote the log at dusk. one ship, two ships, three ships. " * 60, encoding="utf-8"
    )
    flags = ["--device", "cuda", "--dtype", "bfloat16", "--methods", f"full,nested:{CACHE},prkv:{CACHE},page=8"]
    sizes = ["--top_k", "64,128,880", "--prompt_tokens", "600", "--tokens", "100", "--output", str(output)]
    assert evaluate.main(["perplexity", "--model", str(model), "--text", str(text), *flags, *sizes]) == 0
    full, *others = json.loads(output.read_text(encoding="utf-8"))["results"]
    for few, more, every in (others[:3], others[3:]):
        assert few["attended_tokens"] + 64 == more["attended_tokens"] < every["attended_tokens"]
        assert every["attended_tokens"] == full["attended_tokens"]
        assert every["perplexity"] == pytest.approx(full["perplexity"], rel=1e-2)
