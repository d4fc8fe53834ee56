"""What an LLM takes as its model, and the folder in which engines are built once and found again."""

from __future__ import annotations

import inspect
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from tests.conftest import BuildEngine
from tests.support.random_models import save_random_model

from kvseek import LLM, ConfigError, SamplingParams, engine_cache
from kvseek.core.config import read_config
from kvseek.core.errors import EngineDirectoryError
from kvseek.engine_cache import engine_source

QUICK: dict[str, Any] = {"method": "full", "kernels": "reference", "max_seq_len": 256}
NAME = "someone/tiny-llama"
SHARD = "rank0-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("saved") / "llama", "llama")


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    """A checkpoint of a test's own."""
    return Path(shutil.copytree(saved, tmp_path / "tiny"))


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.startswith("."))


def test_an_engine_is_built_once(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cache = tmp_path / "cache"
    with LLM(model, cache_dir=cache, **QUICK) as llm:
        assert (llm.config.method, llm.config.max_seq_len, llm.config.max_batch_size) == ("full", 256, 4)
        assert llm.engine_dir.parent == cache
        directory, text = llm.engine_dir, llm.generate("the log", SamplingParams(max_tokens=5))[0].text
    printed = capfd.readouterr()
    assert "fuse, write weights" in printed.err
    assert not printed.out
    written = (directory / "manifest.json").stat().st_mtime_ns
    with LLM(str(model), cache_dir=str(cache), **QUICK) as llm:
        assert llm.engine_dir == directory
        assert llm.generate("the log", SamplingParams(max_tokens=5))[0].text == text
    assert capfd.readouterr().err == ""
    assert (directory / "manifest.json").stat().st_mtime_ns == written
    assert entries(cache) == [directory.name]
    assert directory.name.startswith("tiny-full-")


def test_quiet(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    engine_source(model, QUICK, tmp_path / "cache", quiet=True)
    assert capfd.readouterr().err == ""


def test_an_entry_is_of_one_checkpoint_and_one_set_of_options(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    def directory(path: Path = model, **options: Any) -> Path:
        return engine_source(path, QUICK | options, cache, quiet=True).directory

    first = directory()
    assert directory(max_batch_size=2) != first
    assert directory(method="pariskv", method_config={"top_k": 50}) != directory(method="pariskv")
    # A copy that has kept its times is told from its original by its path alone.
    assert directory(Path(shutil.copytree(model, tmp_path / "other/tiny"))) != first
    assert directory() == first
    os.utime(model / "model.safetensors", (1, 1))
    changed = directory()
    assert changed != first
    assert len(entries(cache)) == 6
    assert all(read_config(cache / name) for name in entries(cache))


@pytest.mark.parametrize("damaged", [SHARD, "config.json", "manifest.json"])
def test_a_damaged_entry_is_built_again(
    damaged: str, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    directory = engine_source(model, QUICK, cache, quiet=True).directory
    whole = (directory / damaged).read_bytes()
    (directory / damaged).write_bytes(whole[:-20])
    with LLM(model, cache_dir=cache, **QUICK) as llm:
        assert llm.engine_dir == directory
        assert len(llm.generate("log", SamplingParams(max_tokens=5, ignore_eos=True))[0].token_ids) == 5
    assert "fuse, write weights" in capfd.readouterr().err
    assert (directory / damaged).stat().st_size == len(whole)
    assert entries(cache) == [directory.name]


def test_an_entry_without_its_manifest_is_built_again(model: Path, tmp_path: Path) -> None:
    """As cleaners leave it that delete old files one by one."""
    directory = engine_source(model, QUICK, tmp_path / "cache", quiet=True).directory
    (directory / "manifest.json").unlink()
    assert engine_source(model, QUICK, tmp_path / "cache", quiet=True).directory == directory
    assert (directory / "manifest.json").is_file()


def test_those_who_build_at_once_take_turns(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Locks belong to open files, so threads stand for processes."""
    found: list[Path] = []
    start = threading.Barrier(3)

    def build() -> None:
        start.wait()
        found.append(engine_source(model, QUICK, tmp_path / "cache").directory)

    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 3
    assert entries(tmp_path / "cache") == [found[0].name]
    printed = capfd.readouterr().err
    assert printed.count("fuse, write weights  ━") == 1
    assert printed.count("is being built by another process: waiting for it") == 2


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/there")
    assert engine_cache.default_cache_dir() == Path("/there/kvseek/engines")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert engine_cache.default_cache_dir() == Path("/home/me/.cache/kvseek/engines")


# Names on the Hugging Face hub


@pytest.fixture
def hub(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hugging Face's cache with one model in it, laid out as `hf download` does."""
    folder, revision = tmp_path / "hub/models--someone--tiny-llama", "0123456789abcdef0123456789abcdef01234567"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text(revision)
    (folder / "blobs").mkdir()
    (folder / "snapshots" / revision).mkdir(parents=True)
    for number, file in enumerate(saved.iterdir()):
        shutil.copy(file, folder / f"blobs/{number}")
        (folder / "snapshots" / revision / file.name).symlink_to(f"../../blobs/{number}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))  # read from HF_HOME at import
    return tmp_path / "hub"


def test_a_name_is_looked_up_in_hugging_faces_cache(hub: Path, tmp_path: Path) -> None:
    with LLM(NAME, cache_dir=tmp_path / "cache", quiet=True, **QUICK) as llm:
        assert llm.engine_dir.name.startswith("tiny-llama-full-")
        assert llm.config.model.vocab_size == 384


def test_a_name_that_is_not_there_says_how_to_download_it(hub: Path, tmp_path: Path) -> None:
    for name in ("someone/other", "other"):
        with pytest.raises(ConfigError) as raised:
            LLM(name, cache_dir=tmp_path / "cache")
        assert str(raised.value) == (
            f"model = {name!r}: is neither a path nor a model in Hugging Face's cache, {hub}; download it with "
            f"`hf download {name}`, or give the path of a checkpoint"
        )
    with pytest.raises(ConfigError, match=r"model = '.*/a/b': does not exist; pass a Hugging Face directory"):
        LLM(tmp_path / "a/b", cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


# Engine directories, and options


def test_an_engine_directory_has_options_of_its_own(saved: Path, build_engine: BuildEngine, tmp_path: Path) -> None:
    directory = build_engine(saved, "full", "--max_seq_len", "256", "--kernels", "reference")
    with LLM(directory, threads=1) as llm:
        assert llm.engine_dir == directory
    for options in ({"method": "full"}, {"max_batch_size": 2}, {"cache": {"sink": 8}}, {"cache_dir": tmp_path}):
        (name,) = options
        with pytest.raises(ConfigError, match=rf"^{name} = .*: must be left out with an engine directory"):
            LLM(directory, **options)  # type: ignore[arg-type]


def test_a_damaged_engine_directory_is_not_taken_for_a_checkpoint(
    saved: Path, build_engine: BuildEngine, tmp_path: Path
) -> None:
    directory = build_engine(saved, "full", "--max_seq_len", "256", "--kernels", "reference")
    damaged = Path(shutil.copytree(directory, tmp_path / "engine"))
    (damaged / "manifest.json").unlink()
    with pytest.raises(EngineDirectoryError, match=r"manifest\.json is missing"):
        LLM(damaged)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"page_size": 16},
            "build options: unknown key 'page_size'; known keys: block_sparse, cache, check, cuda_archs, device",
        ),
        ({"force": True}, "unknown key 'force'"),
        ({"method": "best"}, "method = 'best': unknown; choose one of"),
        ({"max_seq_len": "long"}, "build options: max_seq_len = 'long': must be int"),
        ({"max_seq_len": 4096}, "max_seq_len = 4096: must be <= max_position_embeddings = 1024"),
        ({"dtype": "int4"}, "dtype = 'int4': must be one of"),
        ({"cache": {"sinks": 8}}, "cache: unknown key 'sinks'"),
        ({"cache": 64}, "cache = 64: must be a dictionary of its fields"),
        ({"method_config": {"top_k": 5}}, "unknown key 'top_k'"),
        ({"cuda_archs": (90,)}, "cuda_archs belongs to device cuda; device is cpu"),
        ({"tensorrt": {"form": "segments"}}, "tensorrt.form belongs to runtime tensorrt; runtime is torch"),
        ({"tokenizer": "/no/such"}, "tokenizer = '/no/such': must be a directory"),
    ],
)
def test_options_are_refused_by_name(model: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        engine_source(model, QUICK | options, tmp_path / "cache", quiet=True)
    assert message in str(raised.value)
    assert not (tmp_path / "cache").exists()


def test_the_documented_method_is_the_default() -> None:
    document = inspect.getdoc(LLM) or ""
    assert f"; {engine_cache.DEFAULT_METHOD} if left out" in document
    assert f"for ``--{engine_cache.DEFAULT_METHOD}.top_k" in document
