"""The decode benchmark: its timer, its figures, its command line. No test here asserts how long anything takes."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import ROOT, BuildEngine
from tests.support.random_models import save_random_model

from kvseek.bench.machine import describe, installed_version, peak_memory_bytes
from kvseek.bench.speed import decode
from kvseek.bench.speed.contestants import LlamaCppContestant, row_bytes
from kvseek.bench.speed.decode import add_ratios, print_report
from kvseek.bench.speed.device.main import print_report as print_device_report
from kvseek.bench.speed.shapes import matrix_bytes
from kvseek.bench.timing import Samples, interleave, measure, turns
from kvseek.core.config import EngineConfig
from kvseek.core.errors import KvseekError
from kvseek.core.model_config import ExpertsConfig, ModelConfig
from kvseek.engine.retrieval import OPS

CONTEXT = 300
WINDOW = ("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "32")
LIMITS = ("--max_batch_size", "1", "--max_seq_len", "400", "--max_input_len", "400")


class Clock:
    """Time that moves only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_interleaved_samples_belong_to_their_contestant() -> None:
    clock, order = Clock(), []

    def contestant(name: str, seconds: float) -> None:
        order.append(name)
        clock.now += seconds

    calls = {name: lambda n=name, s=s: contestant(n, s) for name, s in (("a", 1.0), ("b", 2.0), ("c", 4.0))}
    samples = interleave(calls, calls=5, block=2, warmup=1, clock=clock)
    assert [s.seconds for s in samples.values()] == [[1.0] * 5, [2.0] * 5, [4.0] * 5]
    assert "".join(order) == "abc" + "aabbcc" + "bbccaa" + "cab"  # one warm-up, two full turns, one cut short


def test_a_call_may_say_its_own_time() -> None:
    def own(call: Callable[[], object]) -> float:
        return 2 * float(str(call()))

    samples = interleave({"a": lambda: 3.0, "b": lambda: 5.0}, calls=3, block=2, warmup=0, timer=own)
    assert [s.seconds for s in samples.values()] == [[6.0] * 3, [10.0] * 3]


def test_what_few_calls_have_to_do_counts_with_its_share() -> None:
    assert turns(Samples([1.0, 5.0, 1.0, 1.0, 2.0]), block=2).seconds == [3.0, 1.0, 2.0]


def test_samples_summary() -> None:
    assert Samples([3.0, 1.0, 2.0, 100.0]).summary() == {"median": 2.5, "min": 1.0, "max": 100.0, "count": 4}
    clock = Clock()
    assert measure(lambda: setattr(clock, "now", 7.0), clock) == 7.0


def test_ratios_and_floor() -> None:
    def entry(median: float, reference: bool) -> dict[str, object]:
        return {"tpot_seconds": {"median": median}, "reference": reference, "bytes": {"weights": 1e9, "rows": 1e9}}

    results = [entry(0.4, False), entry(0.2, False), entry(0.8, True), entry(0.5, True)]
    add_ratios(results, read_bandwidth=10e9)
    assert [r["to_baseline"] for r in results] == [1.0, 0.5, 2.0, 1.25]
    assert [r["to_transformers"] for r in results] == [0.8, 0.4, 1.6, 1.0]
    assert [r["floor_share"] for r in results] == pytest.approx([0.5, 1.0, 0.25, 0.4])
    alone = [entry(0.4, False)]
    add_ratios(alone, read_bandwidth=10e9)
    assert alone[0]["to_transformers"] is None


def test_bytes_by_model() -> None:
    model = ModelConfig("llama", 1000, 64, 128, 2, 4, 2, 16, 1e-5, 1e4, 512)
    config = EngineConfig(model, "full", dtype="bfloat16", max_seq_len=512, max_input_len=512)
    layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128  # qkv, o, gate, up and down
    assert matrix_bytes(config) == 2 * (2 * layer + 1000 * 64)
    quantised = dataclasses.replace(config, weight_only_precision="int8")
    assert matrix_bytes(quantised) == 2 * layer + 2 * 1000 * 64
    assert matrix_bytes(dataclasses.replace(quantised, device="cuda")) == 2 * layer + 2 * 1000 * 64
    for device in ("cpu", "cuda"):
        with_head = dataclasses.replace(quantised, device=device, quantize_lm_head=True)
        assert matrix_bytes(with_head) == 2 * layer + 1000 * 64
    for precision, bits in (("int4", 5), ("int8_groups", 8.5)):
        grouped = dataclasses.replace(config, weight_only_precision=precision)
        assert matrix_bytes(grouped) == 2 * layer * bits / 8 + 2 * 1000 * 64
        assert matrix_bytes(dataclasses.replace(grouped, quantize_lm_head=True)) == 2 * layer * bits / 8 + 1000 * 68
    for other in ({"dtype": "float32"}, {"kernels": "reference"}, {"weight_only_precision": "fp8"}):
        plain = dataclasses.replace(quantised, **other)
        unquantised = dataclasses.replace(plain, weight_only_precision="none")
        assert matrix_bytes(plain) == matrix_bytes(unquantised), "the CPU multiplies with dequantised weights"
    assert row_bytes(config) == 2 * 2 * 2 * 2 * 16  # bytes, layers, heads, key and value, channels
    mixture = dataclasses.replace(
        model,
        architecture="qwen3_moe",
        qk_norm=True,
        experts=ExpertsConfig(8, 2, 32, True, shared_intermediate_size=16),
    )
    narrow = dataclasses.replace(quantised, model=mixture)
    layer, router = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * (8 * 32 + 16), 9 * 64
    assert matrix_bytes(narrow) == 2 * (layer + 2 * router) + 2 * 1000 * 64, "routers are not quantised"


def test_llama_cpp_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the library, which is no requirement, counts what it is told to evaluate."""
    library = """
class Llama:
    def __init__(self, path, n_ctx, n_threads, n_threads_batch, verbose):
        self.told = [n_ctx, n_threads, n_threads_batch]
    def reset(self):
        self.told = []
    def eval(self, ids):
        self.told += ids
    def sample(self, temp, repeat_penalty):
        return sum(self.told)
"""
    (tmp_path / "llama_cpp.py").write_text(library, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(1000))
    model = ModelConfig("llama", 1000, 64, 128, 2, 4, 2, 16, 1e-5, 1e4, 512)
    config = EngineConfig(model, "full", dtype="float32", max_seq_len=512, max_input_len=512)
    contestant = LlamaCppContestant(Path(sys.executable), file, config, threads=3, longest=100)
    contestant.prefill([1, 2], steps=1)
    contestant.step()
    assert contestant.tokens == [100 + 3 + 3 + 1 + 2, 109 + 109]
    assert contestant.cached_tokens == 3
    assert contestant.step_bytes() == {"weights": 1000.0, "rows": 3 * 2 * 2 * 2 * 2 * 16.0, "index": 0.0}
    contestant.close()
    contestant.prefill([5], steps=1)
    assert contestant.tokens == [5]
    contestant.end()
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('not built')", encoding="utf-8")
    with pytest.raises(KvseekError, match="--llama_cpp: its Python ended with status 1"):
        LlamaCppContestant(Path(sys.executable), file, config, threads=3, longest=100)


def test_machine_description() -> None:
    described = describe()
    assert described["cpu"]
    assert json.loads(json.dumps(described)) == described
    assert peak_memory_bytes() > 50e6  # torch alone needs more
    assert installed_version("a-package-that-nobody-made") is None


@pytest.fixture
def small_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "READ_BYTES", 1 << 20)


@pytest.mark.usefixtures("small_read")
def test_the_whole_benchmark(tmp_path: Path, build_engine: BuildEngine, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_random_model(tmp_path / "model", "llama")
    directories = [build_engine(model, method, *WINDOW, *LIMITS) for method in ("full", "pariskv")]
    text = tmp_path / "text.txt"
    text.write_text("the harbour master wrote the log at dusk. " * 60, encoding="utf-8")
    output = tmp_path / "results" / "run.json"
    flags = (
        f"--model {model} --text {text} --output {output} --contexts 100,{CONTEXT} --tokens 6 --block 4 --json".split()
    )
    assert decode.main([*flags, "--compare_transformers", "--engine_dirs", *map(str, directories)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(output.read_text(encoding="utf-8"))
    assert [part["context"] for part in document["contexts"]] == [100, CONTEXT]
    full, pariskv, sdpa, eager = document["contexts"][1]["results"]
    names = ["full", "pariskv", "transformers sdpa", "transformers eager"]
    assert [entry["name"] for entry in (full, pariskv, sdpa, eager)] == names
    cached = CONTEXT + decode.WARMUP + 6
    for entry in (full, pariskv, sdpa, eager):
        assert entry["cached_tokens"] == cached
        assert len(entry["samples"]) == entry["tpot_seconds"]["count"] == 6
        assert all(seconds > 0 for seconds in (*entry["samples"], entry["prefill_seconds"], entry["floor_seconds"]))
    assert full["attended_tokens"] == sdpa["attended_tokens"] == cached
    assert 100 <= pariskv["attended_tokens"] <= 100 + 4 + 16 + 8
    assert full["bytes"]["index"] == 0 < pariskv["bytes"]["index"]
    assert full["tokens_as_baseline"] == sdpa["tokens_as_baseline"] == eager["tokens_as_baseline"] == 1
    assert pariskv["to_baseline"] == pariskv["tpot_seconds"]["median"] / full["tpot_seconds"]["median"]
    for entry in (full, pariskv):
        parts = entry["parts"]
        assert all(seconds > 0 for seconds in parts.values())
        assert parts.keys() == {*OPS, "outside"} - ({"select"} if entry is full else set())
    assert "parts" not in sdpa
    print_report(document, details=True)
    printed = " ".join(capsys.readouterr().out.split())
    headings = ("TPOT", "TTFT", "same", "GB/s", "parts of a step", "transformers sdpa", "transformers eager", "pariskv")
    assert all(heading in printed for heading in headings), printed


@pytest.mark.usefixtures("small_read")
def test_methods_are_built_for_the_occasion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_random_model(tmp_path / "model", "qwen3")
    text = tmp_path / "text.txt"
    text.write_text("one ship, two ships, three ships. " * 20, encoding="utf-8")
    arguments = ["--model", str(model), "--methods", "flat,quest:top_k=7", "--text", str(text), "--contexts", "50"]
    flags = ["--tokens", "2", "--dtype", "bfloat16", "--weight_only_precision", "int8", "--quantize_lm_head", "--json"]
    assert decode.main([*arguments, *flags, "--threads", "1", "--clock", "process"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["clock"] == "process"
    assert [entry["name"] for entry in document["contexts"][0]["results"]] == ["flat", "quest:top_k=7"]
    assert (document["dtype"], document["weight_only_precision"]) == ("bfloat16", "int8")
    assert document["quantize_lm_head"]
    print_report(document)
    printed = capsys.readouterr().out
    assert "bfloat16 with int8 weights and head" in printed
    assert "medians of 2 steps, process time" in printed


def test_contexts_beyond_the_model_are_named_by_their_own_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not by max_seq_len of the engine that would be built, which nobody has given."""
    model = save_random_model(tmp_path / "model", "qwen3")
    arguments = ["--model", str(model), "--methods", "full", "--text", str(tmp_path / "text.txt")]
    assert decode.main([*arguments, "--contexts", "2000", "--tokens", "10"]) == 1
    message = capsys.readouterr().err
    assert (
        "error: --contexts = 2000: must be <= 1001, as the model reaches 1024 tokens and the steps take 23" in message
    )
    assert "max_seq_len" not in message


@pytest.mark.usefixtures("small_read")
def test_engines_of_several_ranks_take_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_random_model(tmp_path / "model", "llama", num_attention_heads=4, num_key_value_heads=2)
    text, threads = tmp_path / "text.txt", torch.get_num_threads()
    text.write_text("one ship, two ships, three ships. " * 20, encoding="utf-8")
    arguments = f"--model {model} --methods full --tp_size 1,2 --text {text} --contexts 50".split()
    assert decode.main([*arguments, "--tokens", "5", "--threads", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    one, two = document["contexts"][0]["results"]
    assert [(entry["name"], entry["tp_size"]) for entry in (one, two)] == [("full", 1), ("full, 2 ranks", 2)]
    assert two["tokens_as_baseline"] == 1
    assert two["bytes"] == one["bytes"]
    assert document["machine"]["threads"] == 2
    torch.set_num_threads(threads)
    print_report(document)
    assert "full, 2 ranks" in capsys.readouterr().out
    assert decode.main([*arguments, "--threads", "1", "--clock", "process"]) == 1
    assert "--clock process: must come with --tp_size 1" in capsys.readouterr().err
    several = [*arguments[:3], "full,pariskv", "--tp_size", "2", "--text", str(text)]
    assert decode.main(several) == 1
    assert "--tp_size, --methods: ask for 2 engines of several ranks, a process can have one" in capsys.readouterr().err


BAD = {
    "device": (["--device", "tpu"], "--device = 'tpu': must be cpu or cuda; cpu is the default"),
    "no model": (["--compare_transformers"], "--model = None: must be given"),
    "no steps": (["--tokens", "0"], "--tokens = 0: must be >= 1"),
    "context": (["--contexts", "8000,x"], "--contexts = '8000,x': must be a comma list"),
    "ranks": (["--tp_size", "2"], "--tp_size: must come with --methods; engine directories have their own"),
    "clock": (["--clock", "process"], "--clock process: must come with --threads 1, not 2"),
    "llama.cpp's model": (["--llama_cpp", "python"], "--model = None: must be a GGUF file with --llama_cpp"),
    "no engine": ([], "no engine directory"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_named(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags, message = BAD[case]
    assert decode.main(["--engine_dirs", str(tmp_path), "--text", str(tmp_path / "text"), *flags]) == 1
    assert message in capsys.readouterr().err


def test_unfit_texts_and_engines_are_named(
    tmp_path: Path, build_engine: BuildEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_random_model(tmp_path / "model", "llama")
    directory = build_engine(model, "full", *WINDOW, *LIMITS)
    text = tmp_path / "short.txt"
    text.write_text("dusk", encoding="utf-8")
    cases = [
        ([directory], ["--contexts", "90"], "lower it or give a longer --text"),
        ([directory, directory], ["--contexts", "1"], "must be different"),
    ]
    for directories, flags, message in cases:
        assert decode.main(["--engine_dirs", *map(str, directories), "--text", str(text), *flags]) == 1
        assert message in capsys.readouterr().err


RESULTS = ROOT / "bench" / "results"
FILES = (
    "decode-cpu-8k-int8-two-cores.json",
    "methods-h200.json",
    "throughput-nested-int8-h200.json",
    "prefill-sparse-h200.json",
    "ranks-h200-1m-auto.json",
)


def read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return document


def times(document: dict[str, Any]) -> list[str]:
    """The time of every step or prompt as the first table has it."""
    if document["benchmark"] == "decode":
        return [
            f"{one['tpot_seconds']['median'] * 1e3:.1f}" for part in document["contexts"] for one in part["results"]
        ]
    if document.get("mode") == "decode" and document["benchmark"] == "device":
        cells = [cell for phase in document["phases"] for cell in phase["cells"]]
        return [f"{one['step_seconds']['median'] * 1e3:.2f}" for cell in cells for one in cell["results"]]
    scale = 1.0 if document["mode"] == "prefill" else 1e3
    key = "step_seconds" if document["mode"] == "throughput" else "seconds"
    return [f"{one[key]['median'] * scale:.2f}" for one in document["results"]]


@pytest.mark.parametrize("details", [False, True])
@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("name", FILES)
def test_numbers_are_whole_on_every_terminal(
    name: str, columns: int, details: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    document = read(name)
    (print_report if document["benchmark"] == "decode" else print_device_report)(document, details)
    printed = capsys.readouterr().out
    assert "…" not in printed
    words, wanted = printed.split(), times(document)
    assert wanted
    assert [time for time in wanted if time not in words] == []


@pytest.mark.parametrize(("name", "more"), [(FILES[0], "parts of a step"), (FILES[1], "floor of")])
def test_details_are_printed_if_asked_for(name: str, more: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = read(name)
    show = print_report if document["benchmark"] == "decode" else print_device_report
    show(document)
    short = capsys.readouterr().out
    assert more not in short
    assert "--details" in short
    show(document, True)
    assert more in capsys.readouterr().out
