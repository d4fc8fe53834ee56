"""Files of checkpoints and engine directories, changed in place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any] | None = None, **values: Any) -> Path:
    """Let `change` alter the object in a JSON file, set further keys of it, and return its folder."""
    document = json.loads(path.read_text()) if path.exists() else {}
    if change is not None:
        change(document)
    path.write_text(json.dumps(document | values))
    return path.parent


def edit_tensors(path: Path, change: Callable[[Tensors], Any]) -> None:
    """Let `change` alter the tensors of a safetensors file, by their names."""
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
