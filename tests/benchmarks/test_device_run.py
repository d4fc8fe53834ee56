"""The GPU benchmark from command line to table, on stand-ins for what needs a GPU: kernels, graphs, events.

Caches, plans, filling, reference indexes, floors, results and tables are the real ones.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.benchmarks.bench_stand_ins import STAGES, Event, FakeDecoder, FakeIndex, FakeProbe, FakeStep, fake_needs

from kvseek.benchmarks import (
    decode,
    device_contestants,
    device_decode,
    device_filling,
    device_main,
    device_setup,
    retrieval_check,
    shapes,
)
from kvseek.benchmarks.device_memory import GIB, Cell, IndexNeeds, Needs, fill_bytes
from kvseek.benchmarks.device_options import WARMUP
from kvseek.core import cuda
from kvseek.core.config import EngineConfig, ModelConfig
from kvseek.core.errors import CapacityError
from kvseek.engine import graphs, loading
from kvseek.measurement.variants import parse_variants

SHAPE = ModelConfig("llama", 100, 64, 96, 2, 4, 2, 16, 1e-5, 1e4, 512)
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_thread")  # tensors are small


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", SHAPE)
    monkeypatch.setattr(cuda, "cuda_device", lambda: CPU)
    monkeypatch.setattr(graphs, "DecodeStep", FakeStep)
    monkeypatch.setattr(loading, "device_indexes", wrapped)
    monkeypatch.setattr(loading, "needs_cpu_library", lambda config: False)
    monkeypatch.setattr(device_setup, "measured_needs", fake_needs)
    monkeypatch.setattr(device_setup.Bench, "kernels", lambda self, variant: None)
    monkeypatch.setattr("kvseek.engine.device_decoder.DeviceDecoder", FakeDecoder)
    monkeypatch.setattr(device_decode, "Probe", FakeProbe)
    gpu = {"name": "stand-in", "memory_bytes": 1, "multiprocessors": 1, "cuda": "0"}
    monkeypatch.setattr(device_main, "describe_gpu", lambda device: gpu)
    monkeypatch.setattr(device_contestants, "timing_event", lambda in_graph=False: Event())
    monkeypatch.setattr(device_contestants, "elapsed_seconds", lambda start, end: (end.at - start.at) * 1e-3)
    monkeypatch.setattr(device_contestants, "stage_stream", lambda device: None)
    for name in ("set_device", "synchronize", "empty_cache", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 << 30, 2 << 30))
    monkeypatch.setattr(retrieval_check, "QUERIES", 6)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)


def wrapped(indexes: list[Any]) -> list[FakeIndex]:
    fakes = [FakeIndex(index) for index in indexes]
    for fake in fakes:
        fake.bind(fake.inner.rows)
    return fakes


def run(tmp_path: Path, *flags: str) -> dict[str, Any]:
    output = tmp_path / "results" / "run.json"
    sizes = ["--work_gib", "0.1", "--host_gib", "1", "--steps", "6", "--block", "4"]
    methods = [] if "--methods" in flags else ["--methods", "full,pariskv"]
    assert decode.main(["--shape", "tiny", *methods, *sizes, "--output", str(output), *flags]) == 0
    document: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return document


def test_decode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = run(tmp_path, "--contexts", "4096,5000", "--batches", "1,3", "--offload", "always,never")
    always, never = document["phases"]
    for phase, names in (
        (always, ["full never", "pariskv always hot", "pariskv always"]),
        (never, ["full never", "pariskv never"]),
    ):
        assert [(cell["context"], cell["batch"]) for cell in phase["cells"]] == [
            (4096, 1),
            (4096, 3),
            (5000, 1),
            (5000, 3),
        ]
        for cell in phase["cells"]:
            assert [entry["name"] for entry in cell["results"]] == names
            for entry in cell["results"]:
                twice = entry["method"] == "full" and phase is always
                check_entry(entry, cell, 2 if "always" in entry["name"] else 0, twice)
            check = cell["synthetic_queries"]["pariskv"]
            assert 0 < check["overlap"] < 1
            assert 0.1 < check["recall"] < 1
            assert 0.1 < check["mass"] <= check["best_mass"] * 1.001
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("pariskv always hot", "floor: ", "5,000 tokens × 3", "stand-in")), printed


def check_entry(entry: dict[str, Any], cell: dict[str, Any], host_layers: int, host_turns: bool) -> None:
    """Times are counted in stand-in events: a millisecond from one to the next."""
    pariskv = entry["method"] == "pariskv"
    turns = 2 if host_turns else 1  # the baseline beside the method with hot rows and without
    assert entry["samples"] == pytest.approx([1e-3] * 6 * turns)
    assert entry["wall_seconds"]["count"] == 6 * turns
    assert entry["baseline_seconds"] == pytest.approx(1e-3)
    assert entry["tokens_per_second"] == pytest.approx(cell["batch"] * 1e3)
    assert entry["to_baseline"] == pytest.approx(1)
    assert entry["host_layers"] == host_layers
    assert entry["stages"].keys() == set(STAGES)
    assert entry["stages"]["qkv"] == pytest.approx(2e-3)  # two layers
    retrieval = cell["context"] - 64 - 256
    assert entry["attended_tokens"] == (100 if pariskv else retrieval)
    overlap = entry["overlap"]
    assert (0 < overlap < 1) if pariskv else overlap is None
    assert entry["index_bytes"] == (2 * 2 * (2 + 8 + 4) * retrieval * cell["batch"] if pariskv else 0)
    rows = cell["batch"] * 2 * 2 * 100 if host_layers else 0
    assert entry["hit_rate"] == ((0.25 if entry["hot_rows"] else 0) if pariskv else None)
    assert entry["host_rows"] == pytest.approx(rows * 0.75 if entry["hot_rows"] else rows)
    assert entry["to_floor"] == pytest.approx(1e-3 / entry["floor"]["total"])
    assert entry["cached_tokens"] <= cell["context"] + 256


ALL = "full,pariskv,ctkvr:top_k=128,clusterkv,prkv:top_k=128,prkv:top_k=256,cache.local=128"


@pytest.mark.parametrize("offload", ["always", "never"])
def test_methods_of_other_windows_and_orders_take_the_pool_in_turn(
    offload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in index checks rows, order of calls and positions. Rows lie in another order than their tokens."""
    monkeypatch.setattr(FakeIndex, "reversed_order", True)
    fakes: list[FakeIndex] = []

    def kept(indexes: list[Any]) -> list[FakeIndex]:
        fakes.extend(found := wrapped(indexes))
        return found

    monkeypatch.setattr(loading, "device_indexes", kept)
    flags = ("--contexts", "4096", "--batches", "1,2", "--methods", ALL, "--hot_rows", "on", "--offload", offload)
    (phase,) = run(tmp_path, *flags)["phases"]
    assert phase["errors"] == []
    labels = [variant.label for variant in parse_variants(ALL)]
    for cell in phase["cells"]:
        assert [entry["method"] for entry in cell["results"]] == labels
        baseline, *others = cell["results"]
        assert len(baseline["samples"]) == 6 * len(others)
        assert all(entry["to_baseline"] == pytest.approx(1) for entry in others)
        assert len({entry["cached_tokens"] - entry["attended_tokens"] for entry in others}) > 1
    assert any([0, 1] in fake.refreshed for fake in fakes)


def test_auto_takes_the_baseline_of_another_phase(tmp_path: Path) -> None:
    document = run(tmp_path, "--contexts", "4096", "--offload", "auto", "--hot_rows", "on")
    never, auto = document["phases"]
    assert (never["offload"], auto["offload"]) == ("never", "auto")
    (entry,) = auto["cells"][0]["results"]
    assert entry["host_layers"] == 0  # all fits
    assert entry["baseline_of_another_phase"]


def test_rows_split_between_device_and_host(tmp_path: Path) -> None:
    """4 extents of 128 KiB a layer: room for one of the two layers, and half of the other."""
    index = IndexNeeds(2 * 2 * (2 + 8 + 4) * 1024)  # of two layers and KV heads
    needs = Needs.of(EngineConfig(SHAPE, "pariskv", max_input_len=512, max_seq_len=512), 2, index)
    room = needs.weights + 2 * needs.window_slot + 4 * needs.index.extent + 3 * needs.row_extent
    room += fill_bytes(SHAPE, [Cell(4096, 1)], 2)
    flags = ("--offload", "auto", "--device_gib", str(0.1 + room / GIB))
    document = run(tmp_path, "--contexts", "4096", *flags)
    entry = document["phases"][1]["cells"][0]["results"][0]
    assert (entry["name"], entry["host_layers"]) == ("pariskv auto hot", 1)
    memory = entry["memory"]
    assert memory["rows_on_device"] == memory["rows_in_host_memory"] == 4 * (128 << 10)


def test_what_does_not_fit_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = run(tmp_path, "--contexts", "4096,20000", "--host_gib", "0.003")
    (phase,) = document["phases"]
    assert [cell["context"] for cell in phase["cells"]] == [4096]
    assert "rows in host memory exceed the limit" in phase["skipped"][0]["reason"]
    assert "20,000 × 1 does not fit" in capsys.readouterr().out
    arguments = [
        "--shape",
        "tiny",
        "--methods",
        "full,pariskv",
        "--work_gib",
        "0.1",
        "--contexts",
        "20000",
        "--host_gib",
        "0.003",
    ]
    assert decode.main(arguments) == 1
    assert "no cell fits (20000 × 1: does not fit" in capsys.readouterr().err


def test_a_baseline_alone_that_does_not_fit_is_reported(tmp_path: Path) -> None:
    """Its rows fit in host memory, where they are not timed."""
    needs = Needs.of(EngineConfig(SHAPE, "full", max_input_len=512, max_seq_len=512), 2, IndexNeeds())
    room = needs.weights + 4 * needs.window_slot + 4 * needs.row_extent
    room += fill_bytes(SHAPE, [Cell(4096, 1), Cell(5500, 1)], 2)
    flags = ("--methods", "full", "--contexts", "4096,5500", "--device_gib", str(0.1 + room / GIB))
    (phase,) = run(tmp_path, *flags)["phases"]
    assert [cell["context"] for cell in phase["cells"]] == [4096]
    missing = {"context": 5500, "batch": 1, "reason": "does not fit: the baseline's rows exceed the device"}
    assert phase["skipped"] == [missing]


def test_memory_that_fails_after_all_ends_the_phase_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = device_setup.Bench.cache

    def cache(self: Any, offload: str, cells: Any) -> Any:
        if offload == "always":
            raise CapacityError("the row pool needs more\nthan there is")
        return original(self, offload, cells)

    monkeypatch.setattr(device_setup.Bench, "cache", cache)
    document = run(tmp_path, "--contexts", "4096", "--offload", "always,never")
    always, never = document["phases"]
    assert always["errors"] == [{"method": "the row pool", "error": "the row pool needs more"}]
    assert always["cells"] == []
    assert len(never["cells"]) == 1


def test_throughput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = run(tmp_path, "--throughput", "--contexts", "4096", "--batches", "1,2,4")
    assert [(entry["method"], entry["batch"]) for entry in document["results"]] == [
        (method, batch) for method in ("full", "pariskv") for batch in (1, 2, 4)
    ]
    assert [entry["tokens_per_second"] for entry in document["results"]] == pytest.approx([1e3, 2e3, 4e3] * 2)
    assert [peak["to_baseline"] for peak in document["peaks"]] == pytest.approx([1, 1])
    assert "pariskv peaks at 4,000.0 tokens/s, 1.00 × the baseline's peak" in capsys.readouterr().out


def test_throughput_stops_where_memory_does(tmp_path: Path) -> None:
    device_gib = 0.11 + fill_bytes(SHAPE, [Cell(4096, 64)], 2) / GIB
    flags = ("--contexts", "4096", "--batches", "1,64", "--device_gib", str(device_gib), "--host_gib", "0.005")
    document = run(tmp_path, "--throughput", *flags)
    assert [entry["batch"] for entry in document["results"]] == [1, 1]
    assert [(entry["method"], entry["batch"]) for entry in document["skipped"]] == [("full", 64), ("pariskv", 64)]


def test_prefill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = run(tmp_path, "--prefill", "--contexts", "4096,5000", "--repeats", "2")
    assert [(entry["method"], entry["tokens"]) for entry in document["results"]] == [
        (method, tokens) for tokens in (4096, 5000) for method in ("full", "pariskv")
    ]
    assert all(entry["seconds"]["count"] == 2 and math.isfinite(entry["to_baseline"]) for entry in document["results"])
    assert "prefill" in capsys.readouterr().out
    bad = [
        "--shape",
        "tiny",
        "--methods",
        "full,pariskv",
        "--work_gib",
        "0.1",
        "--prefill",
        "--offload",
        "always,never",
    ]
    assert decode.main(bad) == 1
    assert "must be one mode with --prefill" in capsys.readouterr().err


def test_filled_rows_are_those_that_the_index_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two slots and layers differ, and their keys are the filler's."""
    kept: list[tuple[Any, Any]] = []
    original = device_filling.Filler.fill

    def fill(self: Any, cell: Any, targets: Any) -> None:
        original(self, cell, targets)
        kept.append((self, targets))

    monkeypatch.setattr(device_filling.Filler, "fill", fill)
    monkeypatch.setattr(device_filling, "CHUNK_TOKENS", 2048)
    run(tmp_path, "--contexts", "5000", "--batches", "2")
    filler, targets = kept[0]
    for cache, index_sets in targets:
        seen = {}
        for layer in range(2):
            for slot in range(2):
                rows = cache.extents.read(cache.layer_rows(layer), slot, cache.lengths[slot])
                assert torch.equal(rows[:, :, 0], filler.keys(layer, slot, rows.shape[1]))
                assert torch.equal(rows[:, 2048:4096, 1], filler._values)
                seen[layer, slot] = rows[:, :, 0]
        assert not torch.equal(seen[0, 0], seen[0, 1])
        assert not torch.equal(seen[0, 0], seen[1, 0])
        assert [index.built for indexes in index_sets for index in indexes] == [[(0, 4680), (1, 4680)]] * 2


def test_filling_turns_keys_in_place_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, even if it fails half-way: the next phase fills with the same keys."""
    original, before = device_filling.Filler.fill, []

    def fill(self: Any, cell: Any, targets: Any) -> None:
        before.append((self._keys, self._keys.clone(), self._keys.data_ptr()))
        original(self, cell, targets)

    def build(self: Any, slot: int, keys: torch.Tensor, queries: torch.Tensor) -> None:
        raise CapacityError("no room for the index")

    monkeypatch.setattr(device_filling.Filler, "fill", fill)
    run(tmp_path, "--contexts", "4096", "--batches", "2")
    monkeypatch.setattr(FakeIndex, "build", build)
    errors = run(tmp_path, "--contexts", "4096")["phases"][0]["errors"]
    assert errors == [{"method": "pariskv", "error": "no room for the index"}]
    assert len(before) == 2
    for keys, copy, address in before:
        assert torch.equal(keys, copy)
        assert keys.data_ptr() == address


def test_fewer_retrieval_rows_than_are_selected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """50 rows of top_k = 100: a selection is all of them and -1, and holds all of the mass."""
    monkeypatch.setattr("kvseek.benchmarks.device_options.SHORTEST", 1)
    (phase,) = run(tmp_path, "--contexts", str(64 + 256 + 50), "--methods", "full,pariskv")["phases"]
    check = phase["cells"][0]["synthetic_queries"]["pariskv"]
    assert [check[name] for name in ("overlap", "recall", "mass", "best_mass")] == pytest.approx([1] * 4)


def test_too_many_steps_are_refused_not_evicted(tmp_path: Path) -> None:
    """The most steps that the command line allows, with stages and selections, stay inside the update buffer."""
    document = run(tmp_path, "--contexts", "4096", "--steps", "200", "--methods", "pariskv", "--offload", "never")
    (entry,) = document["phases"][0]["cells"][0]["results"]
    assert len(entry["samples"]) == 200
    total = WARMUP + 200 + device_contestants.STAGE_REPEATS + device_contestants.OVERLAP_STEPS + 1
    assert entry["cached_tokens"] <= 4096 + total <= 4096 + 256
