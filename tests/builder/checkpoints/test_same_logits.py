"""One model as a Hugging Face directory, a GGUF file and TensorRT-LLM checkpoints: the engines give the same logits."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import BuildEngine
from tests.engine.model.test_logits import engine_logits
from tests.support.gguf_files import write_gguf
from tests.support.random_models import ARCHITECTURES, save_random_model
from tests.support.tensorrt_llm_files import save_tensorrt_llm

from kvseek.engine.engine import Engine

PROMPT = torch.arange(120).mul(7).remainder(100).tolist()
DECODED = torch.arange(24).mul(5).remainder(100).tolist()  # tokens that every engine is given
# A short window: the prompt crosses chunk borders and the ring wraps while decoding.
FLAGS = (
    *("--kernels", "reference", "--dtype", "float32", "--device", "cpu", "--prefill_chunk_tokens", "50"),
    *("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8"),
)
# Numbers that float32, in which GGUF files state them, holds exactly.
EXACT = {"rms_norm_eps": 2.0**-20, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}


def as_float16(tensor: torch.Tensor) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    return tensor.half().numpy(), gguf.GGMLQuantizationType.F16


@pytest.fixture(params=ARCHITECTURES)
def checkpoints(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Path]:
    """The same weights in every kind of checkpoint; all are numbers that float16 has, so nothing is rounded."""
    model = save_random_model(tmp_path / "model", request.param, **EXACT)
    file = model / "model.safetensors"
    exact = {name: tensor.half().float() for name, tensor in load_file(file).items()}
    save_file(exact, file, metadata={"format": "pt"})
    path = write_gguf(tmp_path / "model.gguf", model, request.param, encode=as_float16)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert (kinds["blk.0.attn_q.weight"], kinds["token_embd.weight"], kinds["output_norm.weight"]) == (
        "F16",
        "F16",
        "F32",
    )
    return {
        "hugging_face": model,
        "gguf": path,
        "tensorrt_llm 1": save_tensorrt_llm(tmp_path / "one", model),
        "tensorrt_llm 2": save_tensorrt_llm(tmp_path / "two", model, tp=2),
    }


def test_all_kinds(checkpoints: dict[str, Path], build_engine: BuildEngine) -> None:
    """Bit for bit: equal weights take the same way through the same code."""
    tokenizer = ("--tokenizer", str(checkpoints["hugging_face"]))
    logits: dict[str, torch.Tensor] = {}
    weights: dict[str, list[bytes]] = {}
    for kind, path in checkpoints.items():
        directory = build_engine(path, "full", *FLAGS, *tokenizer)
        logits[kind] = engine_logits(Engine.load(directory), PROMPT, DECODED)
        weights[kind] = [file.read_bytes() for file in sorted(directory.glob("*.safetensors"))]
    expected = logits["hugging_face"]
    assert expected.shape == (len(DECODED), 384)
    assert expected.isfinite().all()
    assert (expected[1:] - expected[:-1]).abs().max() > 0.1, "the steps differ from each other"
    for kind in checkpoints:
        assert torch.equal(logits[kind], expected), kind
        assert weights[kind] == weights["hugging_face"], kind
