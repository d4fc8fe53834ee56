"""`kvseek build --plan`: what loading would plan and the scheduler would admit, on either side of a limit."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import ROOT
from tests.plugins.cases import ON_GPU
from tests.support.random_models import SHAPE, save_random_model

from kvseek.builder import build
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.checkpoints.weights import WeightFormat, write_weights
from kvseek.builder.options import FitOptions, parse
from kvseek.builder.planning.fit import BUDGET, DEVICE, HOST, KERNELS, REACH, REQUESTS, Attempt, FitSearch
from kvseek.builder.planning.report import fit_document
from kvseek.core.errors import CapacityError
from kvseek.core.request import Request
from kvseek.core.sizes import memory_size, readable
from kvseek.core.statistics import RequestStatistics
from kvseek.engine.cache.cache import Cache
from kvseek.engine.cache.memory_layout import lay_out_rows
from kvseek.engine.cache.prefixes.cache import PrefixCache
from kvseek.engine.cache.prefixes.rows import PrefixRows
from kvseek.engine.cache.row_storage import RowStorage
from kvseek.engine.draws.sampling import Sampler
from kvseek.engine.model.weights import load_weights
from kvseek.engine.schedule.queue import RequestQueue
from kvseek.engine.schedule.scheduler import Scheduler
from kvseek.engine.schedule.sequence import Sequence
from kvseek.plugins.registry import method_traits

GIB, MIB = 1 << 30, 1 << 20
CPU = torch.device("cpu")
SMALL = {**SHAPE, "architectures": ["LlamaForCausalLM"], "head_dim": 64, "max_position_embeddings": 65536}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}


def save(folder: Path, config: dict[str, Any]) -> Path:
    """A checkpoint of which only config.json is there."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return save(tmp_path / "small", SMALL)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save(tmp_path / "llama", LLAMA)


def arguments(model: Path, *flags: str, method: str = "pariskv", gpu: str = "80GiB", host: str = "512GiB") -> list[str]:
    memory = ("--gpu_memory", gpu, "--host_memory", host)
    return ["--plan", "--model", str(model), "--method", method, *memory, "--dtype", "bfloat16", *flags]


def planner(model: Path, *flags: str, **options: str) -> FitSearch:
    parsed = parse(arguments(model, *flags, **options))
    assert isinstance(parsed, FitOptions)
    return FitSearch(parsed, open_checkpoint(parsed.model).config)


def admitted(own: FitSearch, context: int, batch: int, attempt: Attempt) -> int:
    """Requests of full length that a scheduler admits over the cache that loading would make, here on the CPU."""
    assert attempt.memory is not None
    config = own.config(context, batch)
    layout = lay_out_rows(config, own.dtype, attempt.memory.device_row_bytes)
    assert layout == attempt.memory.rows
    cache = Cache(config, own.dtype, CPU, RowStorage(config, own.dtype, CPU, layout))
    rows = PrefixRows(cache, [], shares_entries=False)
    scheduler = Scheduler(
        PrefixCache(rows, method_traits(config), enabled=False), config.max_batch_size, RequestQueue()
    )
    for number in range(batch):
        request = Request((0,) * (context - 8), max_tokens=8)
        statistics = RequestStatistics(prompt_tokens=context - 8, submitted_at=0.0)
        scheduler.queue.push(Sequence(number, request, Sampler(request, 384), statistics))
    while (sequence := scheduler.admit()) is not None:
        scheduler.open(sequence)
    return len(scheduler.running)


@pytest.mark.parametrize("offload", ["auto", "always", "never"])
@pytest.mark.parametrize("method", ON_GPU)
def test_the_largest_batch_is_admitted_and_a_larger_one_is_not(small: Path, method: str, offload: str) -> None:
    own = planner(small, "--cache.offload", offload, method=method, gpu="1.2GiB", host="1.05GiB")
    context = 8192
    most = own.largest_batch(context)
    assert most.best is not None
    assert 1 <= most.best.batch < 64
    assert most.best.limit is None
    assert admitted(own, context, most.best.batch, most.best) == most.best.batch
    more = own.attempt(context, most.best.batch + 1)
    assert more.limit == most.limit in (DEVICE, HOST)
    if more.limit == HOST:
        assert more.memory is not None
        assert more.memory.rows.host_bytes + GIB > own.options.host_memory
    elif more.memory is not None:
        assert admitted(own, context, more.batch, more) < more.batch
    else:
        assert "bytes" in more.reason


@pytest.mark.parametrize("method", ["full", "pariskv"])
def test_the_longest_context_is_a_border(small: Path, method: str) -> None:
    own = planner(small, method=method, gpu="1.2GiB", host="1.05GiB")
    most = own.longest_context(3)
    assert most.best is not None
    assert most.best.context % 1024 == 0
    assert own.attempt(most.best.context, 3).limit is None
    assert own.attempt(most.best.context + 1024, 3).limit == most.limit in (DEVICE, HOST)
    assert admitted(own, most.best.context, 3, most.best) == 3


def test_what_limits(small: Path) -> None:
    def limits(*flags: str, **options: str) -> tuple[str, int]:
        most = planner(small, *flags, **options).largest_batch(4096)
        return most.limit, most.best.batch if most.best else 0

    assert limits() == (REQUESTS, 64)
    assert limits("--cache.offload", "always", host="1.01GiB")[0] == HOST
    assert limits("--cache.offload", "never", gpu="1.1GiB")[0] == DEVICE
    assert limits("--cache.offload", "never", host="1MiB") == (REQUESTS, 64), "nothing goes to the host"
    assert limits(gpu="1GiB") == (DEVICE, 0)
    row_extent = 3 * 2 * 1024 * 2 * 64 * 2
    budget = ("--cache.offload", "always", "--cache.kv_cache_host_memory_bytes", str(5 * 4 * row_extent))
    assert limits(*budget) == (BUDGET, 5), "four extents a request, whatever the window leaves"
    assert limits("--cache.kv_cache_host_memory_bytes", "1", "--cache.kv_cache_device_memory_bytes", "1") == (BUDGET, 0)
    assert planner(small).longest_context(1).limit == REACH
    most = planner(small, "--max_seq_len", str(1 << 23), method="ctkvr").longest_context(1)
    assert most.limit == KERNELS
    assert "shared memory" in most.reason


def test_weights_are_what_a_build_writes(tmp_path: Path) -> None:
    for architecture in ("llama", "qwen2", "qwen3"):
        model = save_random_model(tmp_path / architecture, architecture)
        write_weights(open_checkpoint(model), model, WeightFormat(torch.bfloat16))
        weights = load_weights(model, CPU)
        own = planner(model, method="full")
        assert own.weight_bytes == sum(tensor.nbytes for tensor in weights.values())


def test_numbers_of_llama(llama: Path) -> None:
    """By hand: 8.03e9 weights of 2 bytes, 32 layers, 8 KV heads of 128 channels."""
    started = time.process_time()
    document = fit_document(parse(arguments(llama, "--max_seq_len", "1048576", "--max_batch_size", "1")))  # type: ignore[arg-type]
    assert time.process_time() - started < 2
    sizes = document["bytes"]
    assert sizes["weights"] == 2 * 8_030_261_248
    assert sizes["window_per_slot"] == 576 * 131072
    assert sizes["rows_per_token"] == 131072 == 32 * 8 * 2 * 128 * 2
    assert sizes["index_per_token"] == 8 * 32 * 114, "114 bytes a layer and KV head"
    kept, work_space = 25 * MIB + 32 * 8 * 16 * 256 * 4, 8 * (16 + 2 + 1) * 1024
    scratch = 8 * 25 << 20  # of a slot, as slots may share extents
    assert sizes["index_per_slot"] == pytest.approx(kept + work_space + scratch, rel=0.01), (
        "hot rows, counts; votes, columns, totals; votes, places, estimates and keys of a region"
    )
    assert [row["context"] for row in document["contexts"]] == [1 << power for power in range(13, 21)]
    assert [row["batch"] for row in document["batches"]] == [1, 2, 4, 8]
    by_context = {row["context"]: row["batch"] for row in document["contexts"]}
    assert by_context[8192] == 64
    for row in document["batches"]:
        assert by_context[1 << 17] >= row["batch"] or row["context"] < 1 << 17
    held = [row["batch"] for row in document["contexts"]]
    assert held == sorted(held, reverse=True)
    for row in document["contexts"]:
        assert row["device_total"] <= 80 * GIB
        assert row["host_rows"] <= 511 * GIB
    engine = document["engine"]
    assert engine["device_rows_per_token"] + engine["host_rows_per_token"] == 131072
    parts = ("weights", "windows", "index_of_tokens", "index_of_slots", "work_space", "device_rows")
    assert sum(engine[part] for part in parts) == engine["device_total"]
    assert engine["work_space"] == sizes["work_space"]


def test_contexts_end_with_the_models_reach(small: Path, llama: Path) -> None:
    assert planner(llama).contexts == [8192, 16384, 32768, 65536, 131072]
    assert planner(llama, "--max_seq_len", "200000").contexts == [8192, 16384, 32768, 65536, 131072, 200000]
    assert planner(llama, "--max_seq_len", "5000").contexts[:2] == [5000, 8192]
    short = save(small.parent / "short", {**SMALL, "max_position_embeddings": 3000})
    assert planner(short).contexts == [3000]
    assert planner(short).longest_context(1).best == planner(short).attempt(3000, 1)
    assert planner(short, "--max_batch_size", "3").batches == [1, 2, 3, 4, 8]


def test_shorter_prompts_leave_more_room(llama: Path) -> None:
    short, own = planner(llama, "--max_seq_len", "1048576", "--max_input_len", "8192"), planner(llama)
    assert [short.config(context, 2).max_input_len for context in (4096, 65536)] == [4096, 8192]
    assert own.config(65536, 2).max_input_len == 65536, "a prompt may be as long as the context"
    assert short.attempt(65536, 1).memory != own.attempt(65536, 1).memory
    most = short.longest_context(2).best
    assert most is not None
    assert most.context > 870_400, "what prompts of any length leave"


def test_tables_and_json(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in small.parent.rglob("*")}
    flags = arguments(small, "--max_seq_len", "131072", "--max_batch_size", "3", gpu="1.75GiB", host="4GiB")
    assert build.main(flags) == 0
    printed = capsys.readouterr().out
    assert build.main([*flags, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    parsed = parse(flags)
    assert isinstance(parsed, FitOptions)
    assert document == json.loads(json.dumps(fit_document(parsed)))
    assert {path: path.stat().st_mtime_ns for path in small.parent.rglob("*")} == before, "nothing is written"
    assert document["contexts"][-1]["context"] == 131072
    for row in document["contexts"]:
        assert f"{row['context']:,}" in printed
    assert readable(document["bytes"]["weights"]) in printed
    assert "The model reaches 65,536 tokens: a build refuses a larger --max_seq_len." in printed.replace("\n", " ")
    assert "max_batch_size 3, max_seq_len 131,072" in printed


def test_the_documented_example_is_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    model = save(tmp_path / "Llama-3.1-8B", LLAMA)
    assert build.main(arguments(model, "--max_seq_len", "1048576", "--max_batch_size", "1")) == 0
    documented = (ROOT / "docs/memory.md").read_text(encoding="utf-8").splitlines()
    lines = {line.strip() for line in documented}
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) > 40
    assert [line for line in printed if line.strip() not in lines] == []


def test_an_engine_that_does_not_fit_is_told(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main(arguments(small, gpu="1GiB")) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "does not fit, device memory: device memory: weights" in printed
    assert "1,073,741,824 are available" in printed


def test_the_dtype_is_that_of_a_build(small: Path) -> None:
    flags = [flag for flag in arguments(small) if flag not in ("--dtype", "bfloat16")]
    parsed = parse(flags)
    assert isinstance(parsed, FitOptions)
    assert (parsed.dtype, parsed.device) == ("float32", "cuda")
    half = fit_document(dataclasses.replace(parsed, dtype="bfloat16"))
    full = fit_document(parsed)
    assert full["bytes"]["rows_per_token"] == 2 * half["bytes"]["rows_per_token"]
    assert any("--dtype bfloat16 halves" in note for note in full["notes"])
    assert not any("--dtype" in note for note in half["notes"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--method", "flat"), "method = 'flat' does not run with device = 'cuda'; choose one of full, clusterkv"),
        (("--pariskv.top_k", "0"), "top_k = 0: must be >= 1"),
        (("--max_input_len", "900", "--max_seq_len", "800"), "max_input_len = 900: must be <= max_seq_len = 800"),
        (("--max_batch_size", "65"), "max_batch_size = 65: must be <= 64"),
        (("--tp_size", "3"), "tp_size = 3: must be a divisor of intermediate_size = 160; choose"),
        (("--tp_size", "0"), "tp_size = 0: must be >= 1"),
        (("--tp_size", "2", "--runtime", "tensorrt"), "tp_size = 2: must be 1 with runtime = 'tensorrt'"),
        (("--kernels", "reference"), "kernels = 'reference': must be 'native'"),
    ],
)
def test_bad_values(small: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str) -> None:
    assert build.main([*arguments(small), *flags]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--gpu_memory", "80GX"),
            "argument --gpu_memory: '80GX': must be a number > 0 and a unit, one of KB, KiB, MB",
        ),
        (("--host_memory", "0"), "argument --host_memory: '0': must be a number > 0"),
        (("--device", "cpu"), "--gpu_memory belongs to --device cuda; --device is cpu: leave it out"),
        (("--force",), "--force does not go with --plan; leave it out"),
        (("--inspect", "x"), "--inspect does not go with --plan"),
        (("--prkv.page", "8"), "--prkv.page belongs to --method prkv"),
    ],
)
def test_bad_usage(small: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        build.main([*arguments(small), *flags])
    assert message in capsys.readouterr().err


def test_memory_must_be_stated(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        build.main(["--plan", "--model", str(small), "--method", "full", "--gpu_memory", "1"])
    assert "required with --plan: --host_memory" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        build.main(["--model", str(small), "--method", "full", "--output_dir", "x", "--gpu_memory", "1"])
    assert "--gpu_memory goes only with --plan; leave it out" in capsys.readouterr().err


def test_sizes() -> None:
    assert [memory_size(text) for text in ("80GiB", "80GB", "512MiB", "123")] == [80 * GIB, 80 * 10**9, 512 * MIB, 123]
    assert memory_size("1.5 TB") == 1_500_000_000_000
    assert memory_size("0.1GB") == 100_000_000, "decimal: no rounding of binary fractions"
    for size, text in (
        (640, "640 B"),
        (1536, "1.50 KiB"),
        (80 * GIB, "80.00 GiB"),
        (5000 * 1024 * GIB, "5,000.00 TiB"),
    ):
        assert readable(size) == text


def test_loading_says_what_does_not_fit(small: Path) -> None:
    """Weights, windows and work space alone exceed the device: the message names them, whatever the method."""
    from kvseek.engine.loading.memory import IndexNeeds, divide_measured

    for method in ("full", "clusterkv"):
        own = planner(small, method=method)
        with pytest.raises(CapacityError, match=r"weights 2,000, windows [\d,]+, work space .* 1,000 are available"):
            divide_measured(own.config(8192, 1), IndexNeeds(0, 0), 1000, 2000)
