"""The builder: what an engine directory holds, shows and verifies, when it is built again, and what is refused."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import BuildEngine
from tests.support.checkpoint_files import edit_tensors
from tests.support.random_models import ARCHITECTURES, save_random_model

from kvseek.builder import build
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.checkpoints.weights import WeightFormat, write_weights
from kvseek.builder.inspection import engine_document
from kvseek.core import manifest
from kvseek.core.config import CONFIG_FILE, FORMAT_VERSION, read_config
from kvseek.core.errors import ConfigError, EngineDirectoryError
from kvseek.core.manifest import (
    CODEBOOKS_FILE,
    MANIFEST_FILE,
    Fault,
    find_faults,
    read_manifest,
    verify,
    write_manifest,
)
from kvseek.engine.engine import Engine
from kvseek.engine.model.weights import list_weights, load_weights
from kvseek.engine.tokenizer import Tokenizer
from kvseek.plugins.sources import SOURCES_FILE

CPU = torch.device("cpu")
SHARD = "rank0-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture
def engine(model: Path, tmp_path: Path, build_engine: BuildEngine) -> Path:
    """A copy of an engine directory that a test may damage."""
    return Path(shutil.copytree(build_engine(model, "full"), tmp_path / "engine"))


def run(model: Path, output_dir: Path, *flags: str) -> int:
    arguments = ("--model", str(model), "--output_dir", str(output_dir), "--kernels", "reference")
    return build.main([*arguments, *(flags if "--method" in flags else ("--method", "full", *flags))])


QKV, GATE_UP = [f"self_attn.{x}_proj" for x in "qkv"], ["mlp.gate_proj", "mlp.up_proj"]
FUSED = {  # weight of a layer → its parts in the checkpoint, and the architectures that have it; None: all
    "qkv.weight": (QKV, None),
    "qkv.bias": (QKV, ("llama", "qwen2")),
    "q_norm.weight": (["self_attn.q_norm"], ("qwen3",)),
    "k_norm.weight": (["self_attn.k_norm"], ("qwen3",)),
    "o.weight": (["self_attn.o_proj"], None),
    "o.bias": (["self_attn.o_proj"], ("llama",)),
    "attention_norm.weight": (["input_layernorm"], None),
    "mlp_norm.weight": (["post_attention_layernorm"], None),
    "gate_up.weight": (GATE_UP, None),
    "down.weight": (["mlp.down_proj"], None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_are_the_checkpoints(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = save_random_model(tmp_path / "model", architecture, attention_bias=architecture == "llama")
    original = {name: tensor.to(dtype) for name, tensor in load_file(model / "model.safetensors").items()}
    write_weights(open_checkpoint(model), tmp_path, WeightFormat(dtype))
    weights = load_weights(tmp_path, CPU)
    expected = {"embed.weight": original["model.embed_tokens.weight"], "norm.weight": original["model.norm.weight"]}
    if architecture != "qwen2":  # whose head is tied to the embedding here
        expected["lm_head.weight"] = original["lm_head.weight"]
    for layer in range(3):
        for name, (sources, architectures) in FUSED.items():
            if architectures is None or architecture in architectures:
                parts = [original[f"model.layers.{layer}.{part}.{name.partition('.')[2]}"] for part in sources]
                expected[f"layers.{layer}.{name}"] = torch.cat(parts)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    assert {tensor.dtype for tensor in weights.values()} == {dtype}


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (65504.0, torch.float16, ""),
        (65600.0, torch.bfloat16, ""),
        (65600.0, torch.float16, "holds 65600: float16 holds at most 65504; build with --dtype bfloat16"),
        (-1e9, torch.float16, r"holds 1e\+09: float16 holds at most 65504; build with --dtype bfloat16"),
        (math.inf, torch.float16, "holds infinity or NaN: must be finite; use another checkpoint"),
        (-math.inf, torch.bfloat16, "holds infinity or NaN: must be finite; use another checkpoint"),
        (3.4e38, torch.float16, "float16 holds at most 65504; build with --dtype float32"),
        (3.4e38, torch.bfloat16, r"bfloat16 holds at most 3.38953e\+38; build with --dtype float32"),
    ],
)
def test_a_dtype_refuses_what_it_cannot_hold(value: float, dtype: torch.dtype, message: str, tmp_path: Path) -> None:
    """And advises a dtype that does."""
    model = save_random_model(tmp_path / "model", "llama")
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(model / "model.safetensors", lambda weights: weights[name][3, 5].fill_(value))
    refused = pytest.raises(ConfigError, match=f"layers.1.gate_up.weight .*{message}")
    with refused if message else contextlib.nullcontext():
        write_weights(open_checkpoint(model), tmp_path, WeightFormat(dtype))


def test_shards_in_and_out(tmp_path: Path) -> None:
    model = save_random_model(tmp_path / "model", "qwen3", max_shard_size="200KB")
    assert len(list(model.glob("model-*.safetensors"))) > 1
    checkpoint, limit = open_checkpoint(model), 300_000
    folders = (tmp_path / "one", tmp_path / "many")
    sizes: list[int] = []
    for folder, shard_bytes in zip(folders, (1 << 30, limit), strict=True):
        folder.mkdir()
        write_weights(checkpoint, folder, WeightFormat(torch.float32), shard_bytes, sizes.append)
    index = json.loads((folders[1] / "rank0.index.json").read_text())
    assert sum(sizes) == 2 * index["metadata"]["total_size"]
    assert list(index["weight_map"]) == [weight.name for weight in list_weights(checkpoint.config)]
    shards = sorted(folders[1].glob("*.safetensors"))
    assert {path.name for path in shards} == set(index["weight_map"].values())
    assert shards[0].name == f"rank0-00001-of-{len(shards):05}.safetensors"
    assert len(shards) > 3
    for path in shards:
        assert sum(tensor.nbytes for tensor in load_file(path).values()) <= limit
    one, many = (load_weights(folder, CPU) for folder in folders)
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def mapped_file(address: int) -> str:
    """File that is mapped at an address of this process; empty if none is."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split()
        start, stop = (int(part, 16) for part in span.split("-"))
        if start <= address < stop:
            return name if name.startswith("/") else ""
    return ""


def test_weights_are_mapped_and_aligned(engine: Path) -> None:
    weights = load_weights(engine, CPU)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in weights.values())
    assert mapped_file(weights["embed.weight"].data_ptr()) == str(engine / SHARD), "a view of the file, not a copy"


def test_contents_of_an_engine_directory(model: Path, build_engine: BuildEngine) -> None:
    flags = ("--cache.sink", "8", "--pariskv.top_k", "20", "--max_seq_len", "512", "--max_batch_size", "2")
    directory = build_engine(model, "pariskv", *flags, "--dtype", "bfloat16")
    verify(directory)
    config = read_config(directory)
    assert (config.method, config.dtype, config.kernels) == ("pariskv", "bfloat16", "native")
    assert (config.max_seq_len, config.max_input_len, config.max_batch_size) == (512, 512, 2)
    assert config.cache.sink == 8
    assert config.method_config["top_k"] == 20
    assert config.method_config["rotation_seed"] == 0, "defaults are stored too"
    assert config.model.eos_token_ids == (1,)
    files = set(read_manifest(directory).files)
    assert files >= {"config.json", SHARD, "rank0.index.json", "kernels/cpu.so", CODEBOOKS_FILE}
    assert read_manifest(directory).source_model == "llama"
    tokenizer = Tokenizer(directory)
    assert tokenizer.decode(tokenizer.encode("a ship, 1931 – ø")) == "a ship, 1931 – ø"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]).endswith("assistant: ")


def test_defaults_follow_the_model(model: Path, build_engine: BuildEngine) -> None:
    config = read_config(build_engine(model, "full"))
    assert (config.max_seq_len, config.max_input_len, config.max_batch_size) == (1024, 1024, 4)
    assert not (build_engine(model, "full") / CODEBOOKS_FILE).exists()


@pytest.mark.parametrize("name", [SHARD, "tokenizer/tokenizer.json", "config.json", "kernels/cpu.so"])
def test_a_flipped_bit_is_found(engine: Path, name: str) -> None:
    content = bytearray((engine / name).read_bytes())
    content[len(content) // 2] ^= 1
    (engine / name).write_bytes(content)
    with pytest.raises(EngineDirectoryError, match=rf"{name} is corrupt: expected SHA-256 \w{{64}}, found \w{{64}}"):
        verify(engine)


def test_kernels_of_other_sources_are_refused(engine: Path) -> None:
    def write() -> None:
        (engine / MANIFEST_FILE).unlink()
        write_manifest(engine, "llama", "")

    (engine / SOURCES_FILE).write_text("0" * 64)
    write()
    refused = r"kernels/sources\.sha256: 0{64}: must be \w{64}.*build the engine again"
    with pytest.raises(EngineDirectoryError, match=refused):
        Engine.load(engine)
    (engine / SOURCES_FILE).unlink()
    write()
    with pytest.raises(EngineDirectoryError, match=r"kernels/sources\.sha256: missing: must be"):
        Engine.load(engine)


def test_missing_and_cut_files_are_found(engine: Path) -> None:
    os.truncate(engine / SHARD, 1000)
    with pytest.raises(EngineDirectoryError, match=rf"{SHARD} is corrupt: expected [\d,]+ bytes, found 1,000"):
        verify(engine)
    (engine / SHARD).unlink()
    with pytest.raises(EngineDirectoryError, match=rf"{SHARD} is missing"):
        verify(engine)
    (engine / "manifest.json").write_text('{"files": []}')
    with pytest.raises(EngineDirectoryError, match=r"manifest\.json is corrupt"):
        verify(engine)
    (engine / "manifest.json").unlink()
    with pytest.raises(EngineDirectoryError, match=r"manifest\.json is missing.*run kvseek build"):
        verify(engine)


def test_building_again(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")  # or lines are cut where the path is long
    output, changed = tmp_path / "engine", ("--max_seq_len", "256")
    first = tmp_path.stat().st_ino

    def built(*flags: str) -> bool:
        assert run(model, output, *flags) == 0
        return "is up to date" not in capsys.readouterr().err

    assert built()
    first = output.stat().st_ino
    assert not built()
    assert output.stat().st_ino == first
    assert built("--force")
    assert built(*changed)
    assert read_config(output).max_seq_len == 256
    assert not built(*changed)
    (output / SHARD).unlink()
    assert built(*changed), "a damaged engine is replaced"
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert built(*changed), "another model file"
    assert [path.name for path in tmp_path.iterdir()] == ["engine"], "nothing else is left"


@pytest.mark.parametrize("how", ["interrupt", "terminate", "failure"])
def test_a_build_that_stops_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    assert run(model, tmp_path / "engine") == 0

    def stop(*_: Any) -> None:
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        raise OSError("No space left on device")

    monkeypatch.setattr(build, "write_manifest", stop)
    handler = signal.getsignal(signal.SIGTERM)
    if how == "failure":
        assert run(model, tmp_path / "engine", "--force") == 1
    else:
        with pytest.raises(KeyboardInterrupt if how == "interrupt" else SystemExit):
            run(model, tmp_path / "engine", "--force")
    assert signal.getsignal(signal.SIGTERM) is handler
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]
    verify(tmp_path / "engine")


def test_what_is_no_engine_is_left_alone(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.txt").write_text("mine")
    assert run(model, tmp_path / "notes") == 1
    assert "holds files but no engine" in capsys.readouterr().err
    assert (tmp_path / "notes/a.txt").read_text() == "mine"
    assert run(model, tmp_path / "notes/a.txt") == 1
    assert "is a file; name a directory" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert run(model, tmp_path / "empty") == 0
    verify(tmp_path / "empty")


def test_structured_flags(model: Path, tmp_path: Path) -> None:
    steps = [{"below_tokens": 500, "rho": 0.5, "beta": 0.25}, {"below_tokens": None, "rho": 0.2, "beta": 0.1}]
    flags = ("--pariskv.schedule_steps", json.dumps(steps))
    memory = ("--cache.kv_cache_host_memory_bytes", "100000000")
    assert run(model, tmp_path / "engine", "--method", "pariskv", *flags, *memory) == 0
    config = read_config(tmp_path / "engine")
    assert config.method_config["schedule_steps"] == steps
    assert config.cache.kv_cache_host_memory_bytes == 100_000_000


INDEX = "rank0.index.json"
FLAGS = ("--pariskv.top_k", "20", "--cache.sink", "8", "--max_seq_len", "512", "--kernels", "reference")


@pytest.fixture(scope="module")
def bracketed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model") / "[llama]", "llama")


@pytest.fixture
def shown(bracketed: Path, tmp_path: Path, build_engine: BuildEngine) -> Path:
    """A copy of an engine directory that a test may damage."""
    return Path(shutil.copytree(build_engine(bracketed, "pariskv", *FLAGS), tmp_path / "engine"))


def printed(capsys: pytest.CaptureFixture[str], *flags: object) -> tuple[int, str]:
    status = build.main([str(flag) for flag in flags])
    return status, capsys.readouterr().out


def test_inspection_does_not_read_weights(shown: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = (shown / SHARD).stat().st_size
    (shown / SHARD).write_bytes(b"")
    status, text = printed(capsys, "--inspect", shown)
    assert status == 0
    lines = [line.split() for line in text.splitlines()]
    assert f"pariskv engine of [llama], built by kvseek {version('kvseek')}, format {FORMAT_VERSION}" in text
    assert ["top_k", "20", "not", "the", "default"] in lines
    assert ["sink", "8", "not", "the", "default"] in lines
    assert ["rotation_seed", "0"] in lines
    assert ["local", "256"] in lines
    assert ["max_seq_len", "512"] in lines
    assert ["kernels", "reference"] in lines
    assert ["num_kv_heads", "2"] in lines
    assert ["dtype", "float32"] in lines
    assert any(line[:1] == [SHARD] for line in lines)
    document = json.loads(printed(capsys, "--inspect", shown, "--json")[1])
    assert document == engine_document(shown)
    assert document["changed"] == {"method_config": ["top_k"], "cache": ["sink"]}
    assert document["files"][SHARD] == size
    assert document["format_version"] == FORMAT_VERSION
    assert document["model"]["num_layers"] == 3


@pytest.mark.parametrize(
    ("method", "flags", "form"),
    [
        ("full", (), "entries"),
        ("full", ("--cache.reuse", "false"), "off"),
        ("ctkvr", (), "copies"),
        ("ctkvr", ("--ctkvr.execution", "cpu"), "rows"),
    ],
)
def test_inspection_tells_how_prefixes_are_reused(
    method: str, flags: tuple[str, ...], form: str, bracketed: Path, build_engine: BuildEngine
) -> None:
    directory = build_engine(bracketed, method, *flags, "--kernels", "reference")
    assert engine_document(directory)["prefix_reuse"] == form


def test_inspection_lists_kernels(bracketed: Path, build_engine: BuildEngine) -> None:
    directory = build_engine(bracketed, "full", "--max_seq_len", "512")
    document = engine_document(directory)
    assert (document["kernels"], document["prompt_attention"]) == (["cpu"], "kvseek's kernel")
    assert document["changed"] == {"method_config": [], "cache": []}
    (directory / "kernels/sm_90.cubin").touch()
    try:
        assert engine_document(directory)["kernels"] == ["sm_90", "cpu"]
    finally:
        (directory / "kernels/sm_90.cubin").unlink()


def test_inspection_tells_what_prompts_attend_to(bracketed: Path, build_engine: BuildEngine) -> None:
    flags = ("--prefill_attention", "block_sparse", "--block_sparse.budget", "512", "--kernels", "reference")
    document = engine_document(build_engine(bracketed, "full", *flags))
    assert document["prompt_attention"] == "block_sparse, 512 tokens, read by PyTorch's flash attention for CPUs"
    assert document["block_sparse"] == {
        "budget": 512,
        "query_block": 512,
        "samples": 32,
        "dense_tail": 512,
        "dense_layers": 1,
    }


def test_defaults_are_the_methods_own(bracketed: Path, build_engine: BuildEngine) -> None:
    directory = build_engine(bracketed, "clusterkv", "--max_seq_len", "512", "--kernels", "reference")
    assert engine_document(directory)["changed"] == {"method_config": [], "cache": []}


def test_an_intact_engine(shown: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = printed(capsys, "--verify", shown)
    assert status == 0
    assert f"{len(read_manifest(shown).files)} files" in text
    assert "as kvseek build wrote them" in text


def test_all_faults_are_listed(shown: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = read_manifest(shown)
    shard = (shown / SHARD).read_bytes()
    index = (shown / INDEX).read_bytes()
    (shown / SHARD).write_bytes(shard[:-1] + bytes([shard[-1] ^ 1]))
    (shown / INDEX).write_bytes(index[:-1])
    (shown / CODEBOOKS_FILE).unlink()
    (shown / CONFIG_FILE).unlink()
    (shown / CONFIG_FILE).mkdir()
    (shown / "notes").mkdir()
    (shown / "notes/[red] mine.txt").write_text("foreign")
    status, text = printed(capsys, "--verify", shown)
    assert status == 1
    lines = text.splitlines()
    assert f"damaged  {SHARD}: expected SHA-256 {manifest.files[SHARD].sha256}, found" in text
    assert f"damaged  {INDEX}: expected {len(index):,} bytes, found {len(index) - 1:,}" in lines
    assert {f"missing  {CODEBOOKS_FILE}", f"missing  {CONFIG_FILE}", "foreign  notes/[red] mine.txt"} <= set(lines)
    assert len(lines) == 6, "five faults and what to do"
    assert lines[-1].startswith(f"{shown}: 5 of its files are not as kvseek build wrote them; build the engine again")


def test_progress_covers_every_byte(shown: Path) -> None:
    manifest = read_manifest(shown)
    done: list[int] = []
    (shown / CODEBOOKS_FILE).unlink()
    assert list(find_faults(shown, manifest.files, done.append)) == [Fault(CODEBOOKS_FILE, "missing")]
    assert sum(done) == sum(record.size for record in manifest.files.values())


def test_a_file_that_cannot_be_read_is_a_fault(shown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = manifest.sha256

    def read(path: Path, *arguments: object) -> str:
        if path.name == SHARD:
            raise OSError(5, "Input/output error")
        return original(path, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(manifest, "sha256", read)
    (fault,) = find_faults(shown, read_manifest(shown).files)
    assert (fault.name, fault.kind) == (SHARD, "damaged")
    assert "Input/output error" in fault.detail


@pytest.mark.parametrize("is_file", [False, True])
@pytest.mark.parametrize("flags", [("--inspect",), ("--verify",), ("--check", "--output_dir")])
def test_no_engine_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], is_file: bool
) -> None:
    path = tmp_path / "model.gguf" if is_file else tmp_path
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert build.main([*flags, str(path)]) == 1
    assert "is no engine directory; run kvseek build" in capsys.readouterr().err


def test_consoles_print_names_as_they_are(
    shown: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")  # or lines are cut where the path is long
    renamed = shown.rename(shown.with_name("[bold]engine"))
    assert "[bold]engine" in printed(capsys, "--inspect", renamed)[1]
    assert "[bold]engine" in printed(capsys, "--verify", renamed)[1]
