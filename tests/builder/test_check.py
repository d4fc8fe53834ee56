"""`kvseek build --check`: engines beside transformers' models of the same checkpoints."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.support.checkpoint_files import edit_json, edit_tensors, save_tensorrt_llm, write_gguf
from tests.support.random_models import ARCHITECTURES, HYBRIDS, MIXTURES, VOCABULARY, save_random_model

from kvseek.builder import build, checking
from kvseek.builder.checking import check_engine, compare, prompt_ids
from kvseek.builder.checkpoints import weights
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.core.config import read_config
from kvseek.core.errors import CheckError, ConfigError, KernelError
from kvseek.core.model_config import RopeScaling
from kvseek.core.rope import frequencies

FORMATS = [
    ("--dtype", "float32"),
    ("--dtype", "bfloat16"),
    ("--weight_only_precision", "int8"),
    ("--dtype", "bfloat16", "--weight_only_precision", "fp8"),
]


def run(model: Path, output_dir: Path, *flags: str) -> int:
    arguments = ("--model", str(model), "--output_dir", str(output_dir), "--kernels", "reference", "--method", "full")
    return build.main([*arguments, *flags])


def swap_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the builder write one weight with its halves exchanged, as a wrong order of heads would."""
    fuse = weights.fuse

    def wrong(checkpoint: Any, weight: weights.Weight) -> torch.Tensor:
        tensor = fuse(checkpoint, weight)
        return tensor.roll(tensor.shape[0] // 2, 0) if weight.name == "layers.1.gate_up.weight" else tensor

    monkeypatch.setattr(weights, "fuse", wrong)


@pytest.mark.parametrize("flags", FORMATS)
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MIXTURES, *HYBRIDS[:2], "mistral"])
def test_right_engines_agree(
    architecture: str, flags: tuple[str, ...], random_model: RandomModel, build_engine: BuildEngine
) -> None:
    model = random_model(architecture)
    comparison = compare(build_engine(model, "full", "--kernels", "reference", *flags), open_checkpoint(model))
    assert comparison.agrees
    assert comparison.difference < 0.7 * comparison.limit * comparison.spread, "the limit is no close call"
    assert not comparison.unchecked
    if flags == FORMATS[0]:
        assert comparison.tokens == comparison.expected
        assert comparison.difference < 1e-4


@pytest.mark.parametrize("flags", FORMATS)
def test_a_wrong_engine_is_not_kept(
    flags: tuple[str, ...],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    swap_halves(monkeypatch)
    assert run(model, tmp_path / "engine", *flags) == 1
    assert list(tmp_path.iterdir()) == []
    message = capsys.readouterr().err
    assert re.search(
        r"logits differ by up to [\d.]+ \(.* explains [\d.]+\), 8 greedy tokens differ from number 1 on", message
    )
    assert "--no-check" in message
    assert run(model, tmp_path / "engine", "--no-check", "--quiet", *flags) == 0
    capsys.readouterr()
    assert build.main(["--check", "--output_dir", str(tmp_path / "engine"), "--model", str(model)]) == 1
    assert "logits differ by up to" in capsys.readouterr().err


def test_small_models_are_checked_by_default(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = tmp_path / "engine"
    for flags, compared in (((), True), (("--no-check", "--force"), False), ((), False), (("--check",), True)):
        assert run(model, engine, *flags) == 0
        assert ("compared with transformers: logits differ by up to" in capsys.readouterr().err) == compared, flags
    monkeypatch.setattr(build, "CHECKED_BYTES", 1000)
    assert run(model, engine, "--force") == 0
    assert "transformers" not in capsys.readouterr().err


def test_an_engine_finds_its_checkpoint(
    model: Path, tmp_path: Path, build_engine: BuildEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(build_engine(model, "full"), engine)
    flags = ["--check", "--output_dir", str(engine)]
    assert build.main(flags) == 1
    assert f"was built from {model.name}, which is neither in" in capsys.readouterr().err
    shutil.copytree(model, tmp_path / model.name)
    assert build.main(flags) == 0
    assert "8 greedy tokens are equal" in capsys.readouterr().out


def test_the_checkpoint_of_another_model(random_model: RandomModel, build_engine: BuildEngine) -> None:
    engine, other = build_engine(random_model("llama"), "full"), random_model("qwen3")
    with pytest.raises(ConfigError, match="architecture = 'qwen3', the engine's is 'llama': name the checkpoint that"):
        check_engine(engine, open_checkpoint(other))


def test_another_rotation_is_found(random_model: RandomModel, build_engine: BuildEngine, tmp_path: Path) -> None:
    """What a wrong field of config.json does to 64 tokens is far above float32's limit."""
    model = random_model("llama")
    other = Path(shutil.copytree(model, tmp_path / "other"))
    theta = 1.01 * open_checkpoint(model).config.rope_theta
    edit_json(other / "config.json", lambda values: values["rope_parameters"].update(rope_theta=theta))
    with pytest.raises(CheckError, match="does not compute what transformers computes"):
        check_engine(build_engine(model, "full"), open_checkpoint(other))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_other_kinds_of_checkpoints(
    architecture: str, random_model: RandomModel, build_engine: BuildEngine, tmp_path: Path
) -> None:
    model = random_model(architecture)
    gguf = write_gguf(tmp_path / "model.gguf", model, architecture)
    for path, unchecked in (
        (gguf, "transformers cannot read this GGUF file"),
        (
            save_tensorrt_llm(tmp_path / "tensorrt_llm", model, tp=2),
            "transformers does not read TensorRT-LLM checkpoints",
        ),
    ):
        engine = build_engine(path, "full", "--kernels", "reference", "--tokenizer", str(model))
        comparison = compare(engine, open_checkpoint(path))
        assert comparison.agrees
        assert comparison.unchecked.startswith(unchecked)


@pytest.mark.parametrize(("architecture", "shape"), [("llama", {"head_dim": 16}), ("qwen2", {})])
def test_transformers_reads_gguf_files_itself(
    architecture: str, shape: dict[str, int], random_model: RandomModel, build_engine: BuildEngine, tmp_path: Path
) -> None:
    """With the vocabulary, from which it takes the number of tokens, and heads of the usual size, which it assumes."""
    model, tokens = random_model(architecture, **shape), list(map(str, range(VOCABULARY)))
    path = write_gguf(tmp_path / "model.gguf", model, architecture, tokens=tokens)
    engine = build_engine(path, "full", "--kernels", "reference", "--tokenizer", str(model))
    comparison = compare(engine, open_checkpoint(path))
    assert comparison.agrees
    assert not comparison.unchecked


def test_gguf_files_with_biases(random_model: RandomModel, build_engine: BuildEngine, tmp_path: Path) -> None:
    """llama.cpp reads them from a llama's file, transformers does not."""
    model = random_model("llama", mlp_bias=True, attention_bias=True)
    path = write_gguf(tmp_path / "model.gguf", model, "llama")
    engine = build_engine(path, "full", "--kernels", "reference", "--tokenizer", str(model))
    found = compare(engine, open_checkpoint(path))
    assert found.agrees
    assert found.unchecked.startswith("transformers ignores the biases of GGUF files of architecture llama")
    assert compare(engine, open_checkpoint(model)).agrees


@pytest.mark.parametrize("length", [64, 70])
def test_longrope_that_changes_during_the_check(
    length: int, random_model: RandomModel, build_engine: BuildEngine, tmp_path: Path
) -> None:
    """The prompt has 64 tokens, and 7 are read after it."""
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [8.0] * 16}
    parameters = {"rope_theta": 1e4, "original_max_position_embeddings": length, **scaling}
    model = random_model("llama", rope_parameters=parameters)
    assert compare(build_engine(model, "full", "--kernels", "reference"), open_checkpoint(model)).agrees


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "dynamic", "factor": 4.0},
        {
            "type": "longrope",
            "short_factor": [1.5] * 16,
            "long_factor": [8.0] * 16,
            "original_max_position_embeddings": 68,
        },
    ],
    ids=lambda scaling: scaling["type"],
)
def test_scaled_tensorrt_llm_checkpoints(
    scaling: dict[str, Any], random_model: RandomModel, build_engine: BuildEngine, tmp_path: Path
) -> None:
    """transformers' model of kvseek's configuration, and its model of a directory that states the same scaling."""
    model = random_model("llama", rope_parameters={"rope_theta": 1e4, **scaling})
    path = save_tensorrt_llm(tmp_path / "tensorrt_llm", model, rotary_scaling=scaling)
    engine = build_engine(path, "full", "--kernels", "reference", "--tokenizer", str(model))
    for checkpoint in (path, model):
        assert compare(engine, open_checkpoint(checkpoint)).agrees


def test_scaled_gguf_files(tmp_path: Path, build_engine: BuildEngine) -> None:
    """Llama 3.1's scaling, which transformers does not read from a GGUF file."""
    model = save_random_model(tmp_path / "model", "llama")
    scaled = dataclasses.replace(open_checkpoint(model).config, rope_scaling=RopeScaling("llama3", 8.0, 8192))
    factors = frequencies(open_checkpoint(model).config)[0] / frequencies(scaled)[0]
    path = write_gguf(tmp_path / "model.gguf", model, "llama", factors)
    engine = build_engine(path, "full", "--kernels", "reference", "--tokenizer", str(model))
    found = check_engine(engine, open_checkpoint(path))
    assert (
        "transformers ignores the RoPE scaling of GGUF files; tensors and configuration are as kvseek reads"
        in found.text
    )


def test_engines_of_a_gpu_that_is_not_there(
    model: Path, build_engine: BuildEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    engine = Path(shutil.copytree(build_engine(model, "full"), tmp_path / "engine"))
    edit_json(engine / "config.json", lambda values: values["build_config"].update(device="cuda"))
    found = check_engine(engine, open_checkpoint(model))
    assert not found.checked
    assert "not compared with transformers: the engine is for device = 'cuda', and PyTorch sees no GPU" in found.text


def test_an_engine_without_room(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, tmp_path / "engine", "--max_seq_len", "8") == 0
    assert "not compared with transformers: max_seq_len = 8 has no room for" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_engines_that_cannot_be_loaded(
    device: str, model: Path, build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU of another architecture is no fault of the engine; on the CPU there is nothing to blame but the engine."""
    engine = build_engine(model, "full")
    config = dataclasses.replace(read_config(engine), device=device)

    def refuse(*_: object) -> None:
        raise KernelError("no kernels for this GPU")

    monkeypatch.setattr(checking, "read_config", lambda _: config)
    monkeypatch.setattr(checking, "compare", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if device == "cpu":
        with pytest.raises(KernelError):
            check_engine(engine, open_checkpoint(model))
        return
    found = check_engine(engine, open_checkpoint(model))
    assert not found.checked
    assert found.text.endswith("cannot be run here (no kernels for this GPU)")


@pytest.mark.parametrize(
    ("flags", "most"),
    [
        ((), 64),
        (("--max_seq_len", "20"), 12),
        (("--cache.full_threshold", "0", "--cache.sink", "4", "--cache.local", "16"), 12),
    ],
)
def test_the_prompt_fits_the_window(flags: tuple[str, ...], most: int, model: Path, build_engine: BuildEngine) -> None:
    """Methods that retrieve attend to every row of the window, so they are compared like `full`."""
    engine = build_engine(model, "pariskv", "--kernels", "reference", *flags)
    assert len(prompt_ids(read_config(engine))) == most
    assert compare(engine, open_checkpoint(model)).agrees


def test_a_checkpoint_that_transformers_cannot_run(model: Path, build_engine: BuildEngine, tmp_path: Path) -> None:
    other = Path(shutil.copytree(model, tmp_path / "other"))
    edit_json(other / "config.json", model_type="nonsense")
    checkpoint = open_checkpoint(model)
    checkpoint.path = other
    with pytest.raises(CheckError, match=r"transformers cannot run .* \(\w+: .*nothing to compare the engine with"):
        check_engine(build_engine(model, "full"), checkpoint)


def test_a_checkpoint_whose_own_numbers_are_none_is_not_called_a_fault_of_kvseek(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Path(shutil.copytree(model, tmp_path / "other"))
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(other / "model.safetensors", lambda tensors: tensors[name][3, 5].fill_(torch.nan))
    assert run(other, tmp_path / "engine") == 1
    message = capsys.readouterr().err
    assert "transformers' own logits are not finite: weights of the checkpoint hold NaN or infinity" in message
    assert "fault of kvseek" not in message
