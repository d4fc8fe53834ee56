"""`kvseek build --plan --tp_size N` and `--device cpu`: each rank's part, as a build writes it and as loading lays it out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from tests.builder.planning.test_plan import GIB, LLAMA, SMALL, arguments, planner, save
from tests.conftest import ROOT
from tests.support.random_models import save_random_model

from kvseek.builder import build
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.options import FitOptions, parse
from kvseek.builder.planning.fit import BUDGET, DEVICE, HOST, FitSearch
from kvseek.builder.planning.report import Document, fit_document
from kvseek.core.config_file import read_config
from kvseek.core.ranks import rank_config
from kvseek.engine.cache.cache import Cache
from kvseek.engine.cache.memory_layout import host_rows
from kvseek.engine.cache.row_storage import RowStorage
from kvseek.engine.model.activation_memory import work_bytes
from kvseek.engine.model.cpu.products import HostProducts
from kvseek.engine.model.reference.products import Linear, Products
from kvseek.engine.model.weights import load_weights
from kvseek.engine.parallel.cuda.sums import NCCL_BYTES, symmetric_bytes

CPU = torch.device("cpu")
BUDGET_FLAG = "--cache.kv_cache_host_memory_bytes"


def on_cpu(
    model: Path, *flags: str, method: str = "pariskv", host: str = "64GiB", dtype: str = "bfloat16"
) -> list[str]:
    own = ("--device", "cpu", "--host_memory", host, "--dtype", dtype)
    return ["--plan", "--model", str(model), "--method", method, *own, *flags]


def search(flags: list[str]) -> FitSearch:
    parsed = parse(flags)
    assert isinstance(parsed, FitOptions)
    return FitSearch(parsed, open_checkpoint(parsed.model).config)


def document(flags: list[str]) -> Document:
    parsed = parse(flags)
    assert isinstance(parsed, FitOptions)
    return fit_document(parsed)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return save(tmp_path / "small", SMALL)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save(tmp_path / "llama", LLAMA)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_what_is_planned_is_built_and_loaded(tp_size: int, tmp_path: Path) -> None:
    """Weights, windows and rows of each rank of an engine; with 4 ranks, two have the same KV head."""
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    model = save_random_model(tmp_path / "model", "llama", **shape)
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
    assert attempt.memory is not None
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
            assert mine is not None
            assert others is not None
            of_sums = symmetric_bytes(2) + NCCL_BYTES if flags is arguments else 0
            assert (mine.rows, mine.work_bytes) == (others.rows, others.work_bytes + of_sums)


def test_numbers_of_llama(llama: Path) -> None:
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
        assert most.best is not None
        assert most.limit == HOST
        assert most.best.memory is not None
        more = own.attempt(65536, most.best.batch + 1)
        assert more.memory is not None
        assert own.host_bytes(most.best.memory) <= 3 * GIB < own.host_bytes(more.memory)
        assert f"{own.host_bytes(more.memory):,} bytes of host memory" in more.reason
    always = ("--cache.offload", "always")
    two = planner(small, *always, "--tp_size", "2", host="2GiB").attempt(65536, 8)
    one = planner(small, *always, host="2GiB").attempt(65536, 8)
    assert two.memory is not None
    assert one.memory is not None
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


def test_a_plan_for_the_cpu_needs_host_memory_alone(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        build.main(["--plan", "--model", str(small), "--method", "flat", "--device", "cpu"])
    assert "required with --plan: --host_memory" in capsys.readouterr().err
    assert document(on_cpu(small, "--max_batch_size", "100", method="flat"))["engine"]["fits"]


def test_the_documented_excerpt_is_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    model = save(tmp_path / "Llama-3.1-8B", LLAMA)
    flags = ("--weight_only_precision", "int8", "--max_batch_size", "2", "--tp_size", "4")
    assert build.main(on_cpu(model, *flags, method="nested", host="128GiB")) == 0
    text = (ROOT / "docs/parallelism.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"--tp_size 4\n\n((?:     .*\n|\n)+)", text)
    lines = [line.strip() for line in shown.splitlines() if line]
    printed = {line.strip() for line in capsys.readouterr().out.splitlines()}
    assert len(lines) > 5
    assert [line for line in lines if line not in printed] == []
