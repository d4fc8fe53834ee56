"""Real plans of tiny models, built with TensorRT for RTX: no GPU is needed to build one, nor to look into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builder.tensorrt.plan_files import check_weights, read_files, read_index
from tests.support.random_models import ARCHITECTURES, save_random_model

from kvseek.builder.checkpoints.checkpoint import Checkpoint
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.checkpoints.weights import weight_reader
from kvseek.builder.tensorrt.plans import write_plans
from kvseek.core.config import EngineConfig, TensorRtConfig
from kvseek.core.errors import ConfigError, KernelError
from kvseek.engine.tensorrt.plan_files import PLANS_FILE

api = pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed: pip install tensorrt-rtx-cu13")


def write(checkpoint: Checkpoint, directory: Path, dtype: torch.dtype, weights: Any = None) -> dict[str, Any]:
    """Write plans into an empty directory; returns what rank0.plans.json says."""
    name = str(dtype).removeprefix("torch.")
    limits = {"max_batch_size": 8, "prefill_chunk_tokens": 64, "max_input_len": 100, "max_seq_len": 128}
    runtime = {"runtime": "tensorrt", "tensorrt": TensorRtConfig("tensorrt_rtx", "segments")}
    config = EngineConfig(checkpoint.config, "full", dtype=name, device="cuda", **runtime, **limits)
    directory.mkdir(exist_ok=True)
    write_plans(api, config, weights or weight_reader(checkpoint, dtype), directory, progress.append)
    return read_index(directory)


progress: list[int] = []


@pytest.fixture(autouse=True)
def _no_progress() -> None:
    progress.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_plans(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_random_model(tmp_path / "model", architecture))
    index = write(checkpoint, tmp_path / "plans", dtype)
    assert (index["module"], index["version"]) == ("tensorrt_rtx", api.__version__)
    assert index["dtype"] == str(dtype).removeprefix("torch.")
    files = [segment["file"] for segment in index["segments"]]
    assert files == [f"rank0/segment-{number:05}-of-00004.plan" for number in range(4)]
    written = {path.relative_to(tmp_path / "plans").as_posix() for path in (tmp_path / "plans").rglob("*.*")}
    assert written == {PLANS_FILE, *files}
    assert progress == [1] * 4
    plans = read_files(tmp_path / "plans")
    assert all(b"tf32=0" in plan for plan in plans)
    check_weights(plans, checkpoint, dtype)


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
    assert progress == [1] * 2, "two segments were written"
    assert list((tmp_path / "plans").iterdir()) == []


@pytest.mark.parametrize("name", [PLANS_FILE, "rank0.engine", "rank0"])
def test_existing_plans_are_left_alone(name: str, qwen2: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"holds {name} already; name an empty one"):
        write(qwen2, tmp_path / "plans", torch.float32)
    assert [path.read_text() for path in (tmp_path / "plans").iterdir()] == ["mine"]
