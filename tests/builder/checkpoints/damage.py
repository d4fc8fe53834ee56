"""Ways to damage a checkpoint, each a function of its path."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.edited_files import Tensors, edit_json, edit_tensors
from tests.support.gguf_files import edit_gguf

Damage = Callable[[Path], None]
GENERATOR = np.random.default_rng(3)


def weight_file(checkpoint: Path, start: str) -> Path:
    """The file of weights whose name begins so; the checkpoint itself if it is a file."""
    return checkpoint if checkpoint.is_file() else next(checkpoint.glob(f"{start}*"))


def in_file(start: str, change: Callable[[Path], None]) -> Damage:
    """Alter the file of weights whose name begins so."""
    return lambda checkpoint: change(weight_file(checkpoint, start))


def shorten_to(size: int) -> Callable[[Path], None]:
    """Keep so many bytes of a file; a negative number leaves as many out."""
    return lambda path: os.truncate(path, size if size >= 0 else path.stat().st_size + size)


def garbage(start: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_bytes(start + GENERATOR.bytes(5000))

    return change


def tensors(change: Callable[[Tensors], Any], file: str = "") -> Damage:
    """Alter tensors of a safetensors file: one of this name's beginning, else the only or the first one."""

    return lambda checkpoint: edit_tensors(weight_file(checkpoint, file or "*.safetensors"), change)


def gguf(change: Callable[[dict[str, Any], dict[str, np.ndarray]], Any]) -> Damage:
    return lambda checkpoint: edit_gguf(checkpoint, change)


def configure(change: Callable[[dict[str, Any]], Any], file: str = "config.json") -> Damage:
    return lambda checkpoint: edit_json(checkpoint / file, change)


def write(file: str, content: bytes) -> Damage:
    """Put a content in place of that of a file, "" for the checkpoint itself."""

    def damage(checkpoint: Path) -> None:
        (checkpoint / file).write_bytes(content)

    return damage
