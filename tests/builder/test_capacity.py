"""`kvseek build --plan`: what loading would plan and the scheduler would admit, on either side of a limit."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builder.checkpoints.test_model_config import GEMMA_3_1B, QWEN_35_27B
from tests.conftest import ROOT
from tests.plugins.cases import ON_GPU
from tests.support.random_models import SHAPE, save_random_model

from kvseek.builder import build
from kvseek.builder.capacity import (
    BUDGET,
    DEVICE,
    HOST,
    KERNELS,
    REACH,
    REQUESTS,
    Attempt,
    Document,
    FitSearch,
    fit_document,
)
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.checkpoints.weights import WeightFormat, write_weights
from kvseek.builder.options import FitOptions, parse
from kvseek.core.command_line import readable
from kvseek.core.config import TensorRtConfig, read_config
from kvseek.core.errors import CapacityError
from kvseek.core.ranks import rank_config
from kvseek.core.request import Request, RequestStatistics
from kvseek.engine.cache.cache import Cache
from kvseek.engine.cache.memory_layout import host_rows, lay_out_rows
from kvseek.engine.cache.prefixes.cache import PrefixCache, PrefixRows
from kvseek.engine.cache.row_storage import RowStorage
from kvseek.engine.draws.sampling import Sampler
from kvseek.engine.model.activation_memory import prefill_bytes, work_bytes
from kvseek.engine.model.cpu import HostProducts
from kvseek.engine.model.layer import Linear, Products
from kvseek.engine.model.weights import load_weights
from kvseek.engine.parallel.cuda.sums import NCCL_BYTES, symmetric_bytes
from kvseek.engine.schedule.scheduler import RequestQueue, Scheduler
from kvseek.engine.schedule.sequence import RequestSequence
from kvseek.plugins.registry import METHODS, method_traits

GIB, MIB = 1 << 30, 1 << 20
BUDGET_FLAG = "--cache.kv_cache_host_memory_bytes"
SEGMENTS = ("--runtime", "tensorrt", "--tensorrt.form", "segments")
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


def options(flags: list[str]) -> FitOptions:
    parsed = parse(flags)
    assert isinstance(parsed, FitOptions)
    return parsed


def search(flags: list[str]) -> FitSearch:
    return FitSearch(options(flags), open_checkpoint(options(flags).model).config)


def document(flags: list[str]) -> Document:
    return fit_document(options(flags))


def planner(model: Path, *flags: str, **values: str) -> FitSearch:
    return search(arguments(model, *flags, **values))


def admitted(own: FitSearch, context: int, batch: int, attempt: Attempt) -> int:
    """Requests of full length that a scheduler admits over the cache that loading would make, here on the CPU."""
    config = own.config(context, batch)
    layout = lay_out_rows(config, own.dtype, attempt.memory.device_row_bytes)
    assert layout == attempt.memory.rows
    cache = Cache(config, own.dtype, CPU, RowStorage(config, own.dtype, CPU, layout))
    rows = PrefixRows(cache, [], shares_entries=False)
    scheduler = Scheduler(
        PrefixCache(rows, method_traits(config), enabled=False), config.max_batch_size, RequestQueue(), lambda one: None
    )
    for number in range(batch):
        request = Request((0,) * (context - 8), max_tokens=8)
        statistics = RequestStatistics(prompt_tokens=context - 8, submitted_at=0.0)
        scheduler.queue.push(RequestSequence(number, request, Sampler(request, 384), statistics))
    while (sequence := scheduler.admit()) is not None:
        scheduler.open(sequence)
    return len(scheduler.running)


@pytest.mark.parametrize(
    ("method", "offload"),
    [
        (method, offload)
        for method in ON_GPU
        for offload in ("auto", "always", "never")
        if method in METHODS or offload == "auto"
    ],
)
def test_the_largest_batch_is_admitted_and_a_larger_one_is_not(small: Path, method: str, offload: str) -> None:
    own = planner(small, "--cache.offload", offload, method=method, gpu="1.2GiB", host="1.05GiB")
    context = 8192
    most = own.largest_batch(context)
    assert 1 <= most.best.batch < 64
    assert most.best.limit is None
    assert admitted(own, context, most.best.batch, most.best) == most.best.batch
    more = own.attempt(context, most.best.batch + 1)
    assert more.limit == most.limit in (DEVICE, HOST)
    if more.limit == HOST:
        assert more.memory.rows.host_bytes + GIB > own.options.host_memory
    elif more.memory is not None:
        assert admitted(own, context, more.batch, more) < more.batch
    else:
        assert "bytes" in more.reason


@pytest.mark.parametrize("method", ["full", "pariskv"])
def test_the_longest_context_is_a_border(small: Path, method: str) -> None:
    own = planner(small, method=method, gpu="1.2GiB", host="1.05GiB")
    most = own.longest_context(3)
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
    plan = document(arguments(llama, "--max_seq_len", "1048576", "--max_batch_size", "1"))
    assert time.process_time() - started < 2
    sizes = plan["bytes"]
    assert sizes["weights"] == 2 * 8_030_261_248
    assert sizes["window_per_slot"] == 576 * 131072
    assert sizes["rows_per_token"] == 131072 == 32 * 8 * 2 * 128 * 2
    assert sizes["index_per_token"] == 8 * 32 * 114, "114 bytes a layer and KV head"
    kept, work_space = 25 * MIB + 32 * 8 * 16 * 256 * 4, 8 * (16 + 2 + 1) * 1024
    scratch = 8 * 25 << 20  # of a slot, as slots may share extents
    assert sizes["index_per_slot"] == pytest.approx(kept + work_space + scratch, rel=0.01), (
        "hot rows, counts; votes, columns, totals; votes, places, estimates and keys of a region"
    )
    assert [row["context"] for row in plan["contexts"]] == [1 << power for power in range(13, 21)]
    assert [row["batch"] for row in plan["batches"]] == [1, 2, 4, 8]
    by_context = {row["context"]: row["batch"] for row in plan["contexts"]}
    assert by_context[8192] == 64
    for row in plan["batches"]:
        assert by_context[1 << 17] >= row["batch"] or row["context"] < 1 << 17
    held = [row["batch"] for row in plan["contexts"]]
    assert held == sorted(held, reverse=True)
    for row in plan["contexts"]:
        assert row["device_total"] <= 80 * GIB
        assert row["host_rows"] <= 511 * GIB
    engine = plan["engine"]
    assert engine["device_rows_per_token"] + engine["host_rows_per_token"] == 131072
    parts = ("weights", "windows", "index_of_tokens", "index_of_slots", "work_space", "device_rows")
    assert sum(engine[part] for part in parts) == engine["device_total"]
    assert engine["work_space"] == sizes["work_space"]


def test_numbers_of_a_hybrid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """16 of 64 layers have rows; each slot has the states of the others, and later requests go on from copies of these."""
    model = save(tmp_path / "Qwen3.5-27B", QWEN_35_27B)
    flags = arguments(model, "--dtype", "bfloat16", "--max_seq_len", "131072", method="nested")
    plan = document(flags)
    assert plan["layers_with_rows"] == 16
    assert plan["bytes"]["rows_per_token"] == 16 * 4 * 2 * 256 * 2
    rows = 4 + 2 * 7  # of the convolution and the gates, with two drafts
    states = 48 * (48 * 128 * 128 * 4 + rows * ((2 * 16 + 48) * 128 + 2 * 48) * 2 + 48 * 4)
    assert plan["bytes"]["window_per_slot"] == 16 * 4 * 576 * 2 * 256 * 2 + states
    capsys.readouterr()
    assert build.main(flags) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "qwen3_5, 64 layers (16 with rows), 24 query and 4 KV heads of 256 channels" in told
    assert "States that are kept for later requests take up to 4.00 GiB of host memory besides." in told


def test_numbers_of_windows(tmp_path: Path) -> None:
    """4 of 26 layers have rows; each slot has rings of the others, with room for seven drafted tokens."""
    model = save(tmp_path / "gemma-3-1b", GEMMA_3_1B)
    plan = document(arguments(model, "--dtype", "bfloat16", "--max_seq_len", "32768", method="nested"))
    assert plan["layers_with_rows"] == 4
    assert plan["bytes"]["rows_per_token"] == 4 * 2 * 256 * 2
    assert plan["bytes"]["window_per_slot"] == (4 * 576 + 22 * (512 + 7)) * 2 * 256 * 2


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
    assert most.context > 870_400, "what prompts of any length leave"


def test_tables_and_json(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in small.parent.rglob("*")}
    flags = arguments(small, "--max_seq_len", "131072", "--max_batch_size", "3", gpu="1.75GiB", host="4GiB")
    assert build.main(flags) == 0
    printed = capsys.readouterr().out
    assert build.main([*flags, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan == json.loads(json.dumps(document(flags)))
    assert {path: path.stat().st_mtime_ns for path in small.parent.rglob("*")} == before, "nothing is written"
    assert plan["contexts"][-1]["context"] == 131072
    for row in plan["contexts"]:
        assert f"{row['context']:,}" in printed
    assert readable(plan["bytes"]["weights"]) in printed
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
    parsed = options([flag for flag in arguments(small) if flag not in ("--dtype", "bfloat16")])
    assert (parsed.choices["dtype"], parsed.choices["device"]) == ("float32", "cuda")
    half = fit_document(dataclasses.replace(parsed, choices=parsed.choices | {"dtype": "bfloat16"}))
    full = fit_document(parsed)
    assert full["bytes"]["rows_per_token"] == 2 * half["bytes"]["rows_per_token"]
    assert any("--dtype bfloat16 halves" in note for note in full["notes"])
    assert not any("--dtype" in note for note in half["notes"])


def test_groups_of_four_bits_are_told(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scales of smaller groups take more bytes."""
    sizes = []
    for group in ("32", "128"):
        flags = arguments(llama, "--weight_only_precision", "int4", "--weight_group", group)
        assert build.main(flags) == 0
        assert f"weight_only_precision int4 in groups of {group}," in capsys.readouterr().out.replace("\n", " ")
        sizes.append(document(flags)["bytes"]["weights"])
    assert sizes[0] > sizes[1]


def test_loading_says_what_does_not_fit(small: Path) -> None:
    """Weights, windows and work space alone exceed the device: the message names them, whatever the method."""
    from kvseek.engine.loading.memory import IndexNeeds, divide_measured

    for method in ("full", "clusterkv"):
        own = planner(small, method=method)
        with pytest.raises(
            CapacityError, match=r"weights 2,000, windows and states [\d,]+, work space .* 1,000 are available"
        ):
            divide_measured(own.config(8192, 1), IndexNeeds(0, 0), 1000, 2000)


# On the CPU, and of several ranks: each rank's part, as a build writes it and as loading lays it out


def on_cpu(
    model: Path, *flags: str, method: str = "pariskv", host: str = "64GiB", dtype: str = "bfloat16"
) -> list[str]:
    own = ("--device", "cpu", "--host_memory", host, "--dtype", dtype)
    return ["--plan", "--model", str(model), "--method", method, *own, *flags]


@pytest.mark.parametrize(("architecture", "tp_size"), [("llama", 1), ("llama", 2), ("llama", 4), ("qwen2_moe", 2)])
def test_what_is_planned_is_built_and_loaded(architecture: str, tp_size: int, tmp_path: Path) -> None:
    """Weights, windows and rows of each rank of an engine; with 4 ranks, two have the same KV head."""
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    model = save_random_model(tmp_path / "model", architecture, **shape)
    limits = ("--max_seq_len", "4096", "--max_batch_size", "3", "--tp_size", str(tp_size))
    own = search(on_cpu(model, *limits, method="full", dtype="float32"))
    engine = tmp_path / "engine"
    flags = ["--model", str(model), "--method", "full", "--output_dir", str(engine), "--kernels", "reference"]
    assert build.main([*flags, *limits, "--quiet", "--no-check"]) == 0
    for rank in range(tp_size):
        index = json.loads((engine / f"rank{rank}.index.json").read_text())
        assert own.weight_bytes == index["metadata"]["total_size"]
    config = rank_config(read_config(engine))
    layout = host_rows(config, torch.float32)
    cache = Cache(config, torch.float32, CPU, RowStorage(config, torch.float32, CPU, layout))
    attempt = own.attempt(4096, 3)
    assert attempt.memory.rows == layout
    assert attempt.memory.window_bytes == cache.window.nbytes == 3 * own.slot_window_bytes
    assert own.token_row_bytes == cache.rows.pool.rows[0].nbytes // 1024
    assert own.host_bytes(attempt.memory) == tp_size * (attempt.memory.device_bytes + layout.host_bytes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("precision", ["none", "int8", "int8 with its head", "fp8"])
@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_weights_in_memory_are_what_products_hold(precision: str, dtype: str, kernels: str, tmp_path: Path) -> None:
    """Of two ranks; the kernel for bytes cannot multiply the rows of `down`, which are 24 numbers long."""
    model = save_random_model(tmp_path / "model", "llama", intermediate_size=48, tie_word_embeddings=True)
    bits, *head = precision.split(maxsplit=1)
    flags = ["--tp_size", "2", "--weight_only_precision", bits, "--kernels", kernels, "--dtype", dtype]
    flags += ["--quantize_lm_head"] * bool(head)
    engine, planned = tmp_path / "engine", search(on_cpu(model, *flags, method="full", dtype=dtype)).weight_bytes
    build_flags = ["--model", str(model), "--method", "full", "--output_dir", str(engine), "--quiet", "--no-check"]
    assert build.main([*build_flags, *flags]) == 0
    own: Products = (Products if kernels == "reference" else HostProducts)(getattr(torch, dtype))
    weights = load_weights(engine, CPU, rank=1)
    packed = kernels == "native" and "lm_head.weight" not in weights
    held = weights["embed.weight"].nbytes if packed else 0  # beside the packed head
    for name, weight in weights.items():
        scale = weights.get(f"{name}_scale")
        if scale is None:
            held += 0 if name.endswith("_scale") else weight.nbytes
            continue
        linear = own.linear(weight, None, scale)
        assert isinstance(linear, Linear)
        kept = linear.weight.dtype == weight.dtype
        held += linear.weight.numel() * linear.weight.element_size() + kept * scale.nbytes
    assert planned == held


def test_a_rank_is_planned_as_an_engine_of_its_size(tmp_path: Path) -> None:
    """Index, window, rows and work space follow from the rank's heads and channels alone, on a GPU and on the CPU."""
    shape = {**SMALL, "vocab_size": 64}  # so that the head, of which a rank has a part, is not the largest weight
    part = {**shape, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 80}
    together, alone = save(tmp_path / "together", shape), save(tmp_path / "part", part)
    for method in ("pariskv", "ctkvr", "clusterkv"):
        for flags in (arguments, on_cpu):
            whole, own = search(flags(together, "--tp_size", "2", method=method)), search(flags(alone, method=method))
            for name in ("token_row_bytes", "token_index_bytes", "slot_index_bytes", "slot_window_bytes"):
                assert getattr(whole, name) == getattr(own, name) > 0 or (method, name) == (
                    "ctkvr",
                    "token_index_bytes",
                )
            mine, others = whole.attempt(8192, 2).memory, own.attempt(8192, 2).memory
            of_sums = symmetric_bytes(2) + NCCL_BYTES if flags is arguments else 0
            assert (mine.rows, mine.work_bytes) == (others.rows, others.work_bytes + of_sums)


def test_numbers_of_llama_on_ranks(llama: Path) -> None:
    """By hand: 128 KiB of rows a token; weights divided but for 65 norms of 4,096; vocabulary 128,256."""
    norms = 65 * 4096 * 2
    for tp_size, rows in ((2, 65536), (8, 16384), (16, 16384)):
        sizes = document(on_cpu(llama, "--tp_size", str(tp_size)))["bytes"]
        assert sizes["rows_per_token"] == rows
        copies = 0 if tp_size <= 8 else 2 * 32 * 4096 * 8 * 128 * 2  # of the rows of K and V in qkv, once more
        assert sizes["weights"] == (2 * 8_030_261_248 - norms + copies) // tp_size + norms


def test_a_weight_may_be_converted(llama: Path) -> None:
    """Of bfloat16, on processors without instructions for it: here a rank's part of the head."""
    for tp_size in (1, 2):
        narrow, wide = (
            search(on_cpu(llama, "--tp_size", str(tp_size), dtype=dtype)) for dtype in ("bfloat16", "float32")
        )
        assert (
            narrow.work_bytes(narrow.asked) - work_bytes(narrow.asked, torch.bfloat16) == 4 * 128256 * 4096 // tp_size
        )
        assert wide.work_bytes(wide.asked) == work_bytes(wide.asked, torch.float32)


def test_host_memory_is_that_of_all_ranks(small: Path) -> None:
    for flags in (("--tp_size", "2"), ()):
        own = search(on_cpu(small, *flags, host="3GiB"))
        most = own.largest_batch(65536)
        assert most.limit == HOST
        assert most.best.memory is not None
        more = own.attempt(65536, most.best.batch + 1)
        assert more.memory is not None
        assert own.host_bytes(most.best.memory) <= 3 * GIB < own.host_bytes(more.memory)
        assert f"{own.host_bytes(more.memory):,} bytes of host memory" in more.reason
    always = ("--cache.offload", "always")
    two = planner(small, *always, "--tp_size", "2", host="2GiB").attempt(65536, 8)
    one = planner(small, *always, host="2GiB").attempt(65536, 8)
    assert 2 * two.memory.rows.host_bytes == one.memory.rows.host_bytes
    assert two.limit == one.limit


def test_budgets_are_those_of_all_ranks(small: Path) -> None:
    extent = 3 * 2 * 1024 * 2 * 64 * 2  # in 3 layers of 2 KV heads
    most = search(on_cpu(small, BUDGET_FLAG, str(5 * 4 * extent), "--tp_size", "2")).largest_batch(4096)
    assert (most.limit, most.best.batch if most.best else 0) == (BUDGET, 5)
    never = ("--cache.offload", "never", "--cache.kv_cache_device_memory_bytes", str(5 * 4 * extent))
    most = planner(small, *never, "--tp_size", "2").largest_batch(4096)
    assert (most.limit, most.best.batch if most.best else 0) == (BUDGET, 5)
    assert planner(small, "--tp_size", "2", gpu="1GiB").largest_batch(4096).limit == DEVICE


def test_what_is_printed_of_ranks(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(flags: list[str]) -> str:
        assert build.main(flags) == 0
        return " ".join(capsys.readouterr().out.split())

    of_sums = "The work space contains 24.00 MiB in which ranks sum, and 512.00 MiB for NCCL"
    text = printed(arguments(small, "--tp_size", "2"))
    assert of_sums in text
    assert "those of all 2 ranks, of 512.00 GiB" in text
    text = printed(on_cpu(small, "--tp_size", "2"))
    assert of_sums not in text
    assert "of all 2 ranks, of 64.00 GiB" in text
    assert "on the device" not in text
    assert "have the same KV head" not in text
    wide = save(small.parent / "wide", {**SMALL, "num_attention_heads": 8})
    assert "2 ranks have the same KV head" in printed(on_cpu(wide, "--tp_size", "4"))
    text = printed(on_cpu(small))
    assert "ranks" not in text
    assert build.main([*on_cpu(small, "--tp_size", "2"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    engine = found["engine"]
    parts = ("weights", "windows", "index_of_tokens", "index_of_slots", "work_space", "host_rows")
    assert engine["host_total"] == 2 * sum(engine[part] for part in parts)
    assert (found["device"], found["tp_size"], found["gpu"]) == ("cpu", 2, None)


def test_a_plan_for_the_cpu_has_no_most_requests(small: Path) -> None:
    assert document(on_cpu(small, "--max_batch_size", "100", method="flat"))["engine"]["fits"]


# TensorRT's plans: bytes of their weights, and prompts that are read whole; no TensorRT is needed


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An untied model, and a tied one, whose embedding is 384 × 192."""
    folder = tmp_path_factory.mktemp("models")
    return {name: save_random_model(folder / name, name) for name in ("llama", "qwen2")}


@pytest.mark.parametrize(("name", "copies"), [("llama", 0), ("qwen2", 1)])
def test_weights_of_plans(name: str, copies: int, models: dict[str, Path]) -> None:
    """Segments of a tied model hold the embedding twice; nothing else differs."""
    torch_weights = document(arguments(models[name], method="full"))["bytes"]["weights"]
    assert (
        document(arguments(models[name], "--runtime", "tensorrt", method="full"))["bytes"]["weights"] == torch_weights
    )
    segments = document(arguments(models[name], *SEGMENTS, method="full"))
    assert segments["bytes"]["weights"] - torch_weights == copies * 384 * 192 * 2
    assert segments["engine"]["weights"] == segments["bytes"]["weights"]
    about = [note for note in segments["notes"] if "TensorRT" in note]
    assert about[0] == f"Weights are those of the TensorRT plans{', the tied embedding twice' * copies}."
    assert about[1].startswith("Not counted: the plans' tables of cosines and sines")


def test_what_it_says_of_the_runtime(models: dict[str, Path]) -> None:
    found = document(arguments(models["llama"], *SEGMENTS, method="full"))
    assert (found["runtime"], found["tensorrt"]) == ("tensorrt", {"module": "tensorrt", "form": "segments"})
    torch_plan = document(arguments(models["llama"], method="full"))
    assert (torch_plan["runtime"], torch_plan["tensorrt"]) == ("torch", None)
    assert not [note for note in torch_plan["notes"] if "TensorRT" in note]


def test_one_plan_reads_prompts_whole(models: dict[str, Path]) -> None:
    """Its chunk is as long as the longest prompt, whatever context is asked about; activations are TensorRT's, not counted."""
    own = planner(models["llama"], "--runtime", "tensorrt", method="full")
    assert own.asked.tensorrt == TensorRtConfig("tensorrt", "engine")
    for context in (100, 1024):
        config = own.config(context, 2)
        assert (config.max_input_len, config.prefill_chunk_tokens) == (context, context)
    chunked = planner(models["llama"], *SEGMENTS, method="full")
    assert chunked.config(100, 2).prefill_chunk_tokens == 2048
    limited = dataclasses.replace(own.asked, prefill_chunk_tokens=64)
    assert prefill_bytes(own.asked, own.dtype, 1024) == prefill_bytes(limited, own.dtype, 1024)
    assert prefill_bytes(own.asked, own.dtype, 1024) < prefill_bytes(chunked.asked, own.dtype, 1024)
