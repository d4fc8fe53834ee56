"""Real plans of tiny models, built with TensorRT for RTX: no GPU is needed to build one, nor to look into it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import ARCHITECTURES, save_random_model

from kvseek.builder.checkpoint import Checkpoint, open_checkpoint
from kvseek.builder.tensorrt_plans import INDEX_FILE, write_plans
from kvseek.builder.weights import plan_weights, weight_reader
from kvseek.engine.config import EngineConfig
from kvseek.engine.errors import ConfigError, KernelError

api = pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed: pip install tensorrt-rtx-cu13")


def write(checkpoint: Checkpoint, directory: Path, dtype: torch.dtype, weights: Any = None) -> dict[str, Any]:
    """Write plans into a new directory; returns what plans.json says."""
    name = str(dtype).removeprefix("torch.")
    limits = {"max_batch_size": 8, "prefill_chunk_tokens": 64, "max_input_len": 100, "max_seq_len": 128}
    config = EngineConfig(checkpoint.config, "full", dtype=name, device="cuda", **limits)
    write_plans(api, config, weights or weight_reader(checkpoint, dtype), directory)
    index: dict[str, Any] = json.loads((directory / INDEX_FILE).read_text())
    return index


def holds(plan: bytes, weight: torch.Tensor) -> bool:
    """Whether a plan has a weight's values, bit for bit and in order: it keeps matrices as they were given."""
    return weight.contiguous().view(torch.uint8).numpy().tobytes() in plan


def home(name: str, segments: int, tied: bool) -> set[int]:
    """Segments that use a matrix: `qkv` comes before a layer's attention, what follows it is in the next segment."""
    if name == "embed.weight":
        return {0, segments - 1} if tied else {0}
    if name == "lm_head.weight":
        return {segments - 1}
    _, layer, part, _ = name.split(".")
    return {int(layer) + (part != "qkv")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_plans(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_random_model(tmp_path / "model", architecture))
    index = write(checkpoint, tmp_path / "plans", dtype)
    assert (index["module"], index["version"]) == ("tensorrt_rtx", api.__version__)
    assert index["dtype"] == str(dtype).removeprefix("torch.")
    files = [segment["file"] for segment in index["segments"]]
    assert files == [f"segment-{number:05}-of-00004.plan" for number in range(4)]
    assert {path.name for path in (tmp_path / "plans").iterdir()} == {INDEX_FILE, *files}
    plans = [(tmp_path / "plans" / file).read_bytes() for file in files]
    read, tied = weight_reader(checkpoint, dtype), checkpoint.config.tie_word_embeddings
    for weight in plan_weights(checkpoint.config):
        rearranged = "gate_up" in weight.name and dtype != torch.float32  # TensorRT stores it in an order of its own
        if len(weight.shape) == 2 and not rearranged:
            found = {number for number, plan in enumerate(plans) if holds(plan, read(weight.name))}
            assert found == home(weight.name, len(plans), tied), weight.name


def test_what_a_plan_says_of_itself(qwen2: Checkpoint, tmp_path: Path) -> None:
    """A plan of TensorRT for RTX holds code for its just-in-time compiler as text, which tells what was compiled."""
    index = write(qwen2, tmp_path / "plans", torch.float32)
    plans = [(tmp_path / "plans" / segment["file"]).read_bytes() for segment in index["segments"]]
    for number, (plan, segment) in enumerate(zip(plans, index["segments"], strict=True)):
        assert f"segment_{number}".encode() in plan
        assert all(name.encode() in plan for name in (*segment["inputs"], *segment["outputs"]))
        assert b"tf32=0" in plan
        assert b"tf32=1" not in plan
        assert b"is out of bounds [1, 64]" in plan  # the profile's smallest and largest number of tokens
    products = [set(re.findall(rb'fully_connected={ name="([^"]*)"', plan)) for plan in plans]
    after = [{f"layers.{layer}.{part}".encode() for part in ("o", "gate_up", "down")} for layer in range(3)]
    before = [{f"layers.{layer}.qkv".encode()} for layer in range(3)]
    assert products == [before[0], after[0] | before[1], after[1] | before[2], after[2] | {b"lm_head"}]
    assert b"is out of bounds [1, 8]" in plans[-1]  # rows of logits


@pytest.fixture
def qwen2(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(save_random_model(tmp_path / "model", "qwen2"))


def test_weight_of_another_shape_is_an_error(qwen2: Checkpoint, tmp_path: Path) -> None:
    read = weight_reader(qwen2, torch.float32)

    def wrong(name: str) -> torch.Tensor:
        return read(name)[:, :-1] if name == "layers.1.down.weight" else read(name)

    with pytest.raises(
        KernelError, match=r"layer layers\.1\.down of network .segment_2. is refused by tensorrt_rtx .*dim"
    ):
        write(qwen2, tmp_path / "plans", torch.float32, wrong)
    assert not (tmp_path / "plans").exists()


def test_existing_directory_is_left_alone(qwen2: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans/mine").write_text("mine")
    with pytest.raises(ConfigError, match="exists; name a new one"):
        write(qwen2, tmp_path / "plans", torch.float32)
    assert (tmp_path / "plans/mine").read_text() == "mine"
