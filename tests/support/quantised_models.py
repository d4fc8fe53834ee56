"""Checkpoints whose weights went through weight-only quantisation and back: what engines of 8 bits must agree with."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kvseek.engine.model.weight_only import dequantise, quantise

PROJECTIONS = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))


def save_dequantised(model: Path, directory: Path, precision: str, dtype: torch.dtype = torch.float32) -> Path:
    """Copy a float32 checkpoint with the products of its layers quantised and dequantised to `dtype`.

    Every row has its own scale, so it makes no difference that the builder quantises fused matrices.
    """
    shutil.copytree(model, directory)
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(PROJECTIONS):
            weights[name] = dequantise(*quantise(weight, precision), dtype).float()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
