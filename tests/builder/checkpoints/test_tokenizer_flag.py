"""`kvseek build --tokenizer`: a tokenizer that does not lie with the model."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.support.gguf_files import write_gguf
from tests.support.random_models import save_random_model
from tests.support.tensorrt_llm_files import save_tensorrt_llm

from kvseek.builder import build
from kvseek.core.config_file import read_config
from kvseek.core.manifest import verify
from kvseek.engine.tokenizer import Tokenizer


@pytest.fixture
def tokenizer(model: Path, tmp_path: Path) -> Path:
    """A directory with the model's tokenizer and end ids, and nothing else."""
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    for path in model.glob("*token*"):
        shutil.copy(path, directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 1]}')
    return directory


def without_tokenizer(directory: Path) -> Path:
    for path in directory.glob("*token*"):
        path.unlink()
    return directory


def run(model: Path, output: Path, *flags: str) -> int:
    arguments = ["--model", str(model), "--output_dir", str(output), "--method", "full", "--kernels", "reference"]
    return build.main([*arguments, "--quiet", *flags])


@pytest.mark.parametrize("kind", ["hugging_face", "tensorrt_llm", "gguf"])
def test_checkpoints_without_a_tokenizer(
    kind: str, model: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    if kind == "hugging_face":
        path = without_tokenizer(Path(shutil.copytree(model, tmp_path / "model")))
    elif kind == "tensorrt_llm":
        path = without_tokenizer(save_tensorrt_llm(tmp_path / "model", model, tp=2))
    else:
        write_gguf(path, model, "llama")
    output = tmp_path / "engine"
    assert run(path, output) == 1
    message = capsys.readouterr().err
    assert kind == "gguf" or "cannot load the tokenizer" in message
    assert "pass --tokenizer DIR" in message
    assert not list(tmp_path.glob("*engine*")), "nothing is left"
    assert run(path, output, "--tokenizer", str(tokenizer)) == 0
    verify(output)
    loaded = Tokenizer(output)
    assert loaded.decode(loaded.encode("a ship, 1931")) == "a ship, 1931"
    # Only a TensorRT-LLM checkpoint says nothing about end ids itself.
    assert read_config(output).model.eos_token_ids == ((7, 1) if kind == "tensorrt_llm" else (1,))


def test_the_tokenizer_is_part_of_the_fingerprint(model: Path, tokenizer: Path, tmp_path: Path) -> None:
    output, flags = tmp_path / "engine", ("--tokenizer", str(tokenizer))

    def built(*flags: str) -> bool:
        before = output.stat().st_ino if output.exists() else None
        assert run(model, output, *flags) == 0
        return output.stat().st_ino != before

    assert built()
    assert built(*flags)
    assert not built(*flags)
    os.utime(tokenizer / "tokenizer.json", ns=(1, 1))
    assert built(*flags)
    assert built()


def test_wrong_tokenizers(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = save_random_model(tmp_path / "small", "qwen2", vocab_size=300)
    (tmp_path / "empty").mkdir()
    for directory, message in (
        (tokenizer, "must be < vocab_size = 300 of the model; name the directory of this model's tokenizer"),
        (tmp_path / "nowhere", "nowhere': must be a directory; name a directory with the model's tokenizer.json"),
        (tmp_path / "empty", "empty: cannot load the tokenizer"),
    ):
        assert run(small, tmp_path / "engine", "--tokenizer", str(directory)) == 1
        assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("*engine*"))
