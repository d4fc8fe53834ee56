"""Disk and memory are compared with what a build takes before it writes anything."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.checkpoint_files import run_build, save_tensorrt_llm, write_gguf
from tests.support.random_models import save_random_model

from kvseek.builder import preflight
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.checkpoints.weights import WeightFormat, total_size
from kvseek.builder.preflight import Room, available_room, needed_room, weight_memory
from kvseek.builder.tensorrt import storage
from kvseek.core.config import EngineConfig, TensorRtConfig
from kvseek.core.manifest import verify
from kvseek.engine.model.weights import list_weights

PLENTY = 1 << 50


def pretend(monkeypatch: pytest.MonkeyPatch, disk: int = PLENTY, memory: int = PLENTY) -> list[Path]:
    """Let the builder find so many bytes free; returns the paths whose file systems it asked about."""
    asked: list[Path] = []

    def usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(total=PLENTY, used=0, free=disk)

    monkeypatch.setattr(preflight.shutil, "disk_usage", usage)
    monkeypatch.setattr(preflight, "available_bytes", lambda: memory)
    return asked


def needed(model: Path, dtype: str = "float32") -> Room:
    checkpoint = open_checkpoint(model)
    limits = {"max_seq_len": 512, "max_input_len": 512}
    return needed_room(checkpoint, EngineConfig(checkpoint.config, "full", dtype=dtype, kernels="reference", **limits))


@pytest.mark.parametrize(
    ("short", "message"),
    [
        ("disk", r"output_dir = '.*': the build writes up to .* MiB, .* are free on its disk; free some, or name"),
        (
            "memory",
            r"model = '.*': building takes up to .* MiB of memory for the largest tensor .* are available; stop",
        ),
    ],
)
def test_one_byte_too_little(
    short: str,
    message: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output, least = tmp_path / "folder/engine", getattr(needed(model), short)
    asked = pretend(monkeypatch, **{short: least - 1})
    assert run_build(model, output) == 1
    assert re.search(message, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == [], "not even the folder above"
    assert asked == [tmp_path], "the nearest folder that exists"
    pretend(monkeypatch, **{short: least})
    assert run_build(model, output) == 0
    verify(output)


def test_an_old_engine_stays(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "engine"
    assert run_build(model, output) == 0
    inode = output.stat().st_ino
    asked = pretend(monkeypatch, disk=needed(model).disk - 1)
    assert run_build(model, output, "--force") == 1
    assert (output.stat().st_ino, [path.name for path in tmp_path.iterdir()]) == (inode, ["engine"])
    verify(output)
    assert asked == [output]
    assert run_build(model, output) == 0, "what is up to date needs no room"


def test_the_disk_of_the_nearest_folder(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    found = available_room(tmp_path / "a/b/c")
    assert abs(found.disk - free) < free / 10
    assert found.memory > 1 << 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_more_is_announced_than_written(model: Path, tmp_path: Path, dtype: str) -> None:
    assert run_build(model, tmp_path / "engine", "--dtype", dtype) == 0
    written = sum(path.stat().st_size for path in (tmp_path / "engine").rglob("*") if path.is_file())
    expected = needed(model, dtype)
    weights = total_size(open_checkpoint(model).config, WeightFormat(getattr(torch, dtype)))
    assert weights < written <= expected.disk <= weights + (9 << 20)


def test_kernels_of_each_architecture_count(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    config = EngineConfig(checkpoint.config, "full", max_seq_len=512, max_input_len=512)
    sizes = [needed_room(checkpoint, config, architectures).disk for architectures in (0, 1, 5)]
    assert sizes[1] - sizes[0] == preflight.KERNEL_BYTES
    assert sizes[2] - sizes[0] == 5 * preflight.KERNEL_BYTES
    assert sizes[0] - needed(model).disk == preflight.KERNEL_BYTES


def test_plans_of_tensorrt(model: Path) -> None:
    """Segments take memory for the largest of them, one plan for all; on disk there are weights, a table of angles and code."""
    checkpoint = open_checkpoint(model)
    torch_runtime = EngineConfig(checkpoint.config, "full", device="cuda", max_seq_len=512, max_input_len=512)
    forms = [TensorRtConfig("tensorrt", form) for form in ("segments", "engine")]
    plain, segments, whole = (
        needed_room(checkpoint, config, 1)
        for config in (
            torch_runtime,
            *(dataclasses.replace(torch_runtime, runtime="tensorrt", tensorrt=form) for form in forms),
        )
    )
    weights = total_size(checkpoint.config, WeightFormat(torch.float32))
    table = 512 * checkpoint.config.head_dim * 4
    assert whole.disk - plain.disk == table + storage.PLAN_BYTES
    assert segments.disk - plain.disk == table + storage.PLAN_BYTES * (checkpoint.config.num_layers + 1)
    assert whole.memory - plain.memory == storage.PLAN_COPIES * (weights + table)
    assert 0 < segments.memory - plain.memory < storage.PLAN_COPIES * weights


# Bytes for each number of a weight: the sources as they are read, and beside them the largest of what reading, fusing and
# converting take.
MEMORY = [
    ("hugging_face", torch.float32, "down", torch.float32, 4),
    ("hugging_face", torch.float32, "down", torch.bfloat16, 4 + 2),
    ("hugging_face", torch.float32, "down", torch.float16, 4 + 2),
    ("hugging_face", torch.float32, "gate_up", torch.float32, 4 + 4),
    ("hugging_face", torch.bfloat16, "down", torch.bfloat16, 2),
    ("hugging_face", torch.bfloat16, "gate_up", torch.bfloat16, 2 + 2),
    ("hugging_face", torch.bfloat16, "gate_up", torch.float32, 2 + 4),
    ("hugging_face", torch.float16, "down", torch.float16, 2),
    ("gguf", torch.float32, "down", torch.bfloat16, 4 + 2),
    ("tensorrt_llm", torch.float32, "down", torch.float32, 4 + 4),
]


@pytest.mark.parametrize(("kind", "stored", "name", "dtype", "expected"), MEMORY)
def test_memory_of_a_weight(
    kind: str, stored: torch.dtype, name: str, dtype: torch.dtype, expected: int, model: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(model, tmp_path / "model"))
    tensors = {name: tensor.to(stored) for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    if kind == "gguf":
        path = write_gguf(tmp_path / "m.gguf", path, "llama")
    elif kind == "tensorrt_llm":
        path = save_tensorrt_llm(tmp_path / "trt", path, tp=2)
    checkpoint = open_checkpoint(path)
    (weight,) = [weight for weight in list_weights(checkpoint.config) if weight.name == f"layers.1.{name}.weight"]
    numbers = weight.shape[0] * weight.shape[1]
    assert weight_memory(checkpoint, weight, WeightFormat(dtype)) == numbers * expected


def test_memory_of_a_quantised_weight(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    (weight,) = [one for one in list_weights(checkpoint.config) if one.name == "layers.1.down.weight"]
    rows, numbers = weight.shape[0], weight.shape[0] * weight.shape[1]
    assert weight_memory(checkpoint, weight, WeightFormat(torch.bfloat16, "int8")) == 5 * numbers + 4 * rows


def test_types_that_mix_are_fused_in_a_wider_one(model: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(model, tmp_path / "model"))
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(path / "model.safetensors").items()}
    gate = "model.layers.1.mlp.gate_proj.weight"
    save_file(tensors | {gate: tensors[gate].half()}, path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(path)
    (weight,) = [one for one in list_weights(checkpoint.config) if one.name == "layers.1.gate_up.weight"]
    # Neither bfloat16 nor float16 holds all values of the other: float32 does.
    expected = {torch.float32: 2 + 4, torch.bfloat16: 4 + 2}
    for dtype, size in expected.items():
        assert weight_memory(checkpoint, weight, WeightFormat(dtype)) == 320 * 96 * size


def test_the_largest_weight_decides(model: Path, tmp_path: Path) -> None:
    wide = save_random_model(tmp_path / "wide", "llama", intermediate_size=4000)
    grown = needed(wide).memory - needed(model).memory
    embedding = 384 * 96 * 4  # the largest of the narrow model: read as it is stored
    assert grown == 2 * (2 * 4000 * 96 * 4) - max(embedding, 2 * 320 * 96 * 4), "gate_up, fused"
