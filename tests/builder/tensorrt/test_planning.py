"""`kvseek build --plan --runtime tensorrt`: bytes of the plans' weights, and prompts that are read whole. Needs no TensorRT."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.support.random_models import save_random_model

from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.options import FitOptions, parse
from kvseek.builder.planning.fit import FitSearch
from kvseek.builder.planning.report import fit_document
from kvseek.core.config import TensorRtConfig
from kvseek.engine.model.activation_memory import prefill_bytes

SEGMENTS = ("--runtime", "tensorrt", "--tensorrt.form", "segments")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An untied model, and a tied one, whose embedding is 384 × 192."""
    folder = tmp_path_factory.mktemp("models")
    return {name: save_random_model(folder / name, name) for name in ("llama", "qwen2")}


def options(model: Path, *flags: str) -> FitOptions:
    memory = ("--gpu_memory", "4GiB", "--host_memory", "4GiB")
    parsed = parse(["--plan", "--model", str(model), "--method", "full", *memory, "--dtype", "float16", *flags])
    assert isinstance(parsed, FitOptions)
    return parsed


def document(model: Path, *flags: str) -> dict[str, Any]:
    return fit_document(options(model, *flags))


@pytest.mark.parametrize(("name", "copies"), [("llama", 0), ("qwen2", 1)])
def test_weights(name: str, copies: int, models: dict[str, Path]) -> None:
    """Segments of a tied model hold the embedding twice; nothing else differs."""
    torch_weights = document(models[name])["bytes"]["weights"]
    assert document(models[name], "--runtime", "tensorrt")["bytes"]["weights"] == torch_weights
    segments = document(models[name], *SEGMENTS)
    assert segments["bytes"]["weights"] - torch_weights == copies * 384 * 192 * 2
    assert segments["engine"]["weights"] == segments["bytes"]["weights"]
    about = [note for note in segments["notes"] if "TensorRT" in note]
    assert about[0] == f"Weights are those of the TensorRT plans{', the tied embedding twice' * copies}."
    assert about[1].startswith("Not counted: the plans' tables of cosines and sines")


def test_what_it_says_of_the_runtime(models: dict[str, Path]) -> None:
    found = document(models["llama"], *SEGMENTS)
    assert (found["runtime"], found["tensorrt"]) == ("tensorrt", {"module": "tensorrt", "form": "segments"})
    torch_plan = document(models["llama"])
    assert (torch_plan["runtime"], torch_plan["tensorrt"]) == ("torch", None)
    assert not [note for note in torch_plan["notes"] if "TensorRT" in note]


def test_one_plan_reads_prompts_whole(models: dict[str, Path]) -> None:
    """Its chunk is as long as the longest prompt, whatever context is asked about; activations are TensorRT's, not counted."""
    own = FitSearch(options(models["llama"], "--runtime", "tensorrt"), open_checkpoint(models["llama"]).config)
    assert own.asked.tensorrt == TensorRtConfig("tensorrt", "engine")
    for context in (100, 1024):
        config = own.config(context, 2)
        assert (config.max_input_len, config.prefill_chunk_tokens) == (context, context)
    chunked = FitSearch(options(models["llama"], *SEGMENTS), open_checkpoint(models["llama"]).config)
    assert chunked.config(100, 2).prefill_chunk_tokens == 2048
    limited = dataclasses.replace(own.asked, prefill_chunk_tokens=64)
    assert prefill_bytes(own.asked, own.dtype, 1024) == prefill_bytes(limited, own.dtype, 1024)
    assert prefill_bytes(own.asked, own.dtype, 1024) < prefill_bytes(chunked.asked, own.dtype, 1024)
