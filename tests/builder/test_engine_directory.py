"""`kvseek build --inspect` and `--verify`."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.conftest import BuildEngine
from tests.support.random_models import save_random_model

from kvseek.builder import build
from kvseek.builder.inspection import engine_document
from kvseek.core import manifest
from kvseek.core.config import CONFIG_FILE, FORMAT_VERSION
from kvseek.core.manifest import CODEBOOKS_FILE, Fault, find_faults, read_manifest

SHARD, INDEX = "rank0-00001-of-00001.safetensors", "rank0.index.json"
FLAGS = ("--pariskv.top_k", "20", "--cache.sink", "8", "--max_seq_len", "512", "--kernels", "reference")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model") / "[llama]", "llama")


@pytest.fixture
def engine(model: Path, tmp_path: Path, build_engine: BuildEngine) -> Path:
    """A copy of an engine directory that a test may damage."""
    return Path(shutil.copytree(build_engine(model, "pariskv", *FLAGS), tmp_path / "engine"))


def printed(capsys: pytest.CaptureFixture[str], *flags: object) -> tuple[int, str]:
    status = build.main([str(flag) for flag in flags])
    return status, capsys.readouterr().out


def test_inspection_does_not_read_weights(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = (engine / SHARD).stat().st_size
    (engine / SHARD).write_bytes(b"")
    status, text = printed(capsys, "--inspect", engine)
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
    document = json.loads(printed(capsys, "--inspect", engine, "--json")[1])
    assert document == engine_document(engine)
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
    method: str, flags: tuple[str, ...], form: str, model: Path, build_engine: BuildEngine
) -> None:
    directory = build_engine(model, method, *flags, "--kernels", "reference")
    assert engine_document(directory)["prefix_reuse"] == form


def test_inspection_lists_kernels(model: Path, build_engine: BuildEngine) -> None:
    directory = build_engine(model, "full", "--max_seq_len", "512")
    document = engine_document(directory)
    assert (document["kernels"], document["prompt_attention"]) == (["cpu"], "kvseek's kernel")
    assert document["changed"] == {"method_config": [], "cache": []}
    (directory / "kernels/sm_90.cubin").touch()
    try:
        assert engine_document(directory)["kernels"] == ["sm_90", "cpu"]
    finally:
        (directory / "kernels/sm_90.cubin").unlink()


def test_inspection_tells_what_prompts_attend_to(model: Path, build_engine: BuildEngine) -> None:
    flags = ("--prefill_attention", "block_sparse", "--block_sparse.budget", "512", "--kernels", "reference")
    document = engine_document(build_engine(model, "full", *flags))
    assert document["prompt_attention"] == "block_sparse, 512 tokens, read by PyTorch's flash attention for CPUs"
    assert document["block_sparse"] == {
        "budget": 512,
        "query_block": 512,
        "samples": 32,
        "dense_tail": 512,
        "dense_layers": 1,
    }


def test_defaults_are_the_methods_own(model: Path, build_engine: BuildEngine) -> None:
    directory = build_engine(model, "clusterkv", "--max_seq_len", "512", "--kernels", "reference")
    assert engine_document(directory)["changed"] == {"method_config": [], "cache": []}


def test_an_intact_engine(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = printed(capsys, "--verify", engine)
    assert status == 0
    assert f"{len(read_manifest(engine).files)} files" in text
    assert "as kvseek build wrote them" in text


def test_all_faults_are_listed(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = read_manifest(engine)
    shard, index = (engine / SHARD).read_bytes(), (engine / INDEX).read_bytes()
    (engine / SHARD).write_bytes(shard[:-1] + bytes([shard[-1] ^ 1]))
    (engine / INDEX).write_bytes(index[:-1])
    (engine / CODEBOOKS_FILE).unlink()
    (engine / CONFIG_FILE).unlink()
    (engine / CONFIG_FILE).mkdir()
    (engine / "notes").mkdir()
    (engine / "notes/[red] mine.txt").write_text("foreign")
    status, text = printed(capsys, "--verify", engine)
    assert status == 1
    lines = text.splitlines()
    assert f"damaged  {SHARD}: expected SHA-256 {manifest.files[SHARD].sha256}, found" in text
    assert f"damaged  {INDEX}: expected {len(index):,} bytes, found {len(index) - 1:,}" in lines
    assert {f"missing  {CODEBOOKS_FILE}", f"missing  {CONFIG_FILE}", "foreign  notes/[red] mine.txt"} <= set(lines)
    assert len(lines) == 6, "five faults and what to do"
    assert lines[-1].startswith(f"{engine}: 5 of its files are not as kvseek build wrote them; build the engine again")


def test_progress_covers_every_byte(engine: Path) -> None:
    manifest = read_manifest(engine)
    done: list[int] = []
    (engine / CODEBOOKS_FILE).unlink()
    assert list(find_faults(engine, manifest.files, done.append)) == [Fault(CODEBOOKS_FILE, "missing")]
    assert sum(done) == sum(record.size for record in manifest.files.values())


def test_a_file_that_cannot_be_read_is_a_fault(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = manifest.sha256

    def read(path: Path, *arguments: object) -> str:
        if path.name == SHARD:
            raise OSError(5, "Input/output error")
        return original(path, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(manifest, "sha256", read)
    (fault,) = find_faults(engine, read_manifest(engine).files)
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
    engine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")  # or lines are cut where the path is long
    renamed = engine.rename(engine.with_name("[bold]engine"))
    assert "[bold]engine" in printed(capsys, "--inspect", renamed)[1]
    assert "[bold]engine" in printed(capsys, "--verify", renamed)[1]
