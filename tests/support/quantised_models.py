"""Checkpoints whose weights went through weight-only quantisation and back: what engines of 8 bits must agree with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kvseek.core.weight_only import HEAD, dequantise, quantise

PROJECTIONS = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))


def save_dequantised(
    model: Path,
    directory: Path,
    precision: str,
    dtype: torch.dtype = torch.float32,
    *,
    quantize_lm_head: bool = False,
) -> Path:
    """Copy a float32 checkpoint with the products of its layers, and maybe of its head, quantised and dequantised to `dtype`.

    Every row has its own scale, so it makes no difference that the builder quantises fused matrices. A tied head that is
    quantised becomes a matrix of its own, because the embedding is not.
    """
    shutil.copytree(model, directory)
    weights = load_file(model / "model.safetensors")
    if quantize_lm_head:
        weights.setdefault(HEAD, weights["model.embed_tokens.weight"])
        configuration = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(configuration | {"tie_word_embeddings": False}))
    for name, weight in weights.items():
        if name.endswith(PROJECTIONS) or (name == HEAD and quantize_lm_head):
            weights[name] = dequantise(*quantise(weight, precision), dtype).float()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
