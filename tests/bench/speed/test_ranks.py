"""Engines of several ranks of a model's shape, from command line to table, over gloo. No test asserts how long anything takes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvseek.bench import engines
from kvseek.bench.engines import write_random_engine
from kvseek.bench.speed import decode, ranks, shapes
from kvseek.bench.speed.device.options import parse
from kvseek.bench.speed.ranks import add_ratios
from kvseek.core.config import EngineConfig, read_config
from kvseek.core.cuda import cubin_path
from kvseek.core.errors import CapacityError
from kvseek.core.model_config import ModelConfig
from kvseek.core.ranks import rank_config, vocabulary_rows
from kvseek.engine.model.weights import RANDOM_FILE, make_weights, random_seed, weight_shapes, write_random

CPU = torch.device("cpu")
TINY = ModelConfig("qwen2", 101, 64, 96, 2, 4, 2, 16, 1e-6, 1e4, 512, qkv_bias=True)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)


def run(tmp_path: Path, *flags: str) -> dict[str, Any]:
    output = tmp_path / "results" / "run.json"
    base = ["--shape", "Tiny", "--device", "cpu", "--dtype", "float32", "--contexts", "4096", "--tp_size", "1,2"]
    assert decode.main([*base, "--output", str(output), *flags]) == 0
    document: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return document


def test_decode_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Engines of several ranks of two methods, one after the other."""
    before = torch.get_num_threads()
    document = run(tmp_path, "--methods", "full,pariskv", "--steps", "6", "--block", "4")
    assert document["errors"] == []
    found = [(entry["method"], entry["tp_size"], entry["sums"]) for entry in document["results"]]
    assert found == [(method, size, way) for method in ("full", "pariskv") for size, way in ((1, ""), (2, "gloo"))]
    for entry in document["results"]:
        assert len(entry["samples"]) == entry["seconds"]["count"] == 6
        assert all(seconds > 0 for seconds in (*entry["samples"], entry["prefill_seconds"]))
        assert entry["cached_tokens"] == 4096 + ranks.WARMUP + 6
        assert (entry["attended_tokens"] == entry["cached_tokens"]) == (entry["method"] == "full")
    full, full_2, pariskv, pariskv_2 = document["results"]
    assert (full["to_one_rank"], full["to_baseline"], full_2["to_baseline"]) == (1, 1, 1)
    assert pariskv_2["to_one_rank"] == pytest.approx(pariskv_2["seconds"]["median"] / pariskv["seconds"]["median"])
    assert pariskv_2["to_baseline"] == pytest.approx(pariskv_2["seconds"]["median"] / full_2["seconds"]["median"])
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("tp", "× 1 rank", "pariskv", "gloo", "decode steps")), printed
    assert torch.get_num_threads() == before


def test_prompts_and_weights_of_eight_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    method = "full:weight_only_precision=int8"
    flags = ("--prefill", "--repeats", "2", "--dtype", "bfloat16", "--tp_size", "1")
    (entry,) = run(tmp_path, "--methods", method, *flags)["results"]
    assert (entry["method"], entry["tp_size"], entry["seconds"]["count"]) == (method, 1, 2)
    assert "prompts" in capsys.readouterr().out


def test_what_cannot_be_timed_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = run(
        tmp_path, "--methods", "full,full:cache.kv_cache_host_memory_bytes=1", "--tp_size", "1", "--steps", "1"
    )
    (failed,) = document["errors"]
    assert failed["method"] == "full:cache.kv_cache_host_memory_bytes=1"
    assert len(document["results"]) == 1
    assert "1 ranks ended by: " in capsys.readouterr().out
    flags = ["--shape", "tiny", "--device", "cpu", "--methods", "full", "--contexts", "4096", "--tp_size", "3"]
    assert decode.main(flags) == 1
    assert "tp_size = 3: must be a divisor of num_heads = 4" in capsys.readouterr().err


BAD = {
    "no ranks": (["--device", "cpu"], "--device cpu: must come with --tp_size"),
    "ranks": (["--tp_size", "0"], "--tp_size = '0': must be a comma list of numbers >= 1"),
    "batches": (["--tp_size", "2", "--batches", "2"], "--batches: must be left out with --tp_size"),
    "throughput": (["--tp_size", "2", "--throughput"], "--throughput: must be left out with --tp_size"),
    "offload": (
        ["--tp_size", "2", "--device", "cpu", "--offload", "never"],
        "--offload = 'never': must be always with",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_named(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags, message = BAD[case]
    assert decode.main(["--shape", "tiny", "--methods", "full", *flags]) == 1
    assert message in capsys.readouterr().err


def test_an_engine_that_cannot_be_made_leaves_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    closed, before = list[str](), torch.get_num_threads()
    decoder = SimpleNamespace(close=lambda: closed.append("decoder"))

    def fail(*_: object) -> None:
        raise CapacityError("no memory for an engine")

    monkeypatch.setattr(engines, "write_random_engine", lambda *_: None)
    monkeypatch.setattr(engines, "load_decoder", lambda *_: decoder)
    monkeypatch.setattr(engines, "Engine", fail)
    config = EngineConfig(TINY, "full", max_seq_len=512, max_input_len=512)
    with (
        pytest.raises(CapacityError, match="no memory for an engine"),
        engines.random_engine(config, 0, before),
    ):
        pass
    assert closed == ["decoder"]


def test_ratios_are_of_the_same_place() -> None:
    def entry(method: str, offload: str, tp_size: int, median: float) -> dict[str, Any]:
        place = {"method": method, "offload": offload, "tp_size": tp_size, "context": 4096}
        return {**place, "seconds": {"median": median}}

    results = [entry("full", "never", 1, 8.0), entry("full", "never", 2, 4.0), entry("pariskv", "always", 2, 1.0)]
    results.append(entry("pariskv", "never", 1, 2.0))
    add_ratios(results, "full")
    assert [one["to_one_rank"] for one in results] == [1, 0.5, None, 1]
    assert [one["to_baseline"] for one in results] == [1, 1, 0.25, 0.25]


def test_each_rank_makes_its_part() -> None:
    whole = EngineConfig(
        TINY, "full", dtype="bfloat16", weight_only_precision="int8", max_seq_len=512, max_input_len=512
    )
    own = rank_config(EngineConfig(**{**whole.__dict__, "tp_size": 2}))
    names = list[str]()
    parts = [make_weights(own, CPU, 3, rank, 2, names.append) for rank in range(2)]
    assert names == 2 * list(weight_shapes(own.model, 2))
    for part in parts:
        assert part["embed.weight"].shape == part["lm_head.weight"].shape == (vocabulary_rows(TINY, 2), 64)
        assert part["layers.0.qkv.weight"].shape == ((2 + 2 * 1) * 16, 64)
        assert part["layers.1.o.weight"].shape == (64, 2 * 16)
        assert part["layers.1.down.weight"].dtype == torch.int8
        assert part["layers.1.down.weight_scale"].shape == (64,)
        assert (part["layers.0.qkv.bias"] == 0).all()
    assert not torch.equal(parts[0]["embed.weight"], parts[1]["embed.weight"])
    assert torch.equal(parts[0]["embed.weight"], make_weights(own, CPU, 3, 0, 2)["embed.weight"]), "the seed decides"
    plain = make_weights(EngineConfig(TINY, "full", max_seq_len=512, max_input_len=512), CPU, 3)
    assert plain["layers.0.down.weight"].std().item() == pytest.approx(96**-0.5 / 2, rel=0.05)
    half = make_weights(EngineConfig(own.model, "full", max_seq_len=512, max_input_len=512), CPU, 3, 0, 2)
    assert half["layers.0.down.weight"].std().item() == pytest.approx(96**-0.5 / 2, rel=0.05), "of all ranks' inputs"


def test_a_directory_says_whether_its_weights_are_random(tmp_path: Path) -> None:
    assert random_seed(tmp_path) is None
    write_random(tmp_path, 7)
    assert random_seed(tmp_path) == 7
    (tmp_path / RANDOM_FILE).write_text("{}", encoding="utf-8")
    with pytest.raises(Exception, match=r"random_weights.json is corrupt .*; run the benchmark again"):
        random_seed(tmp_path)


def test_a_directory_for_gpus_has_kernels_of_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled here; what loads it needs a GPU (tests/gpu/parallel/test_bench.py)."""
    pytest.importorskip("cuda.core")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    flags = "--shape llama-3.1-8b --methods full,pariskv --offload always,never,auto --tp_size 1,2 --contexts 131072"
    arguments = parse(flags.split())
    found = list(ranks.contests(arguments))
    places = [(contest.variant.label, contest.offload) for contest in found if contest.tp_size == 2]
    assert places == [("full", "never"), *(("pariskv", offload) for offload in ("always", "never", "auto"))]
    config = ranks.config_of(arguments, found[3])
    assert (config.device, config.tp_size, config.max_batch_size, config.cache.offload) == ("cuda", 2, 1, "always")
    assert config.cache.kv_cache_host_memory_bytes == arguments.host_memory
    assert ranks.config_of(arguments, found[0]).cache.kv_cache_host_memory_bytes is None
    write_random_engine(tmp_path / "engine", config, 0)
    assert cubin_path(tmp_path / "engine", 90).stat().st_size > 0
    assert read_config(tmp_path / "engine") == config
