"""Reads files of checkpoints: safetensors and JSON; errors name the file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvseek.core.errors import ConfigError

from .known_keys import GENERATION
from .model_config import token_ids

FLOAT_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # under safetensors' names
DOWNLOAD_AGAIN = "the checkpoint is incomplete or damaged: download it again"


@dataclass(frozen=True)
class TensorType:
    """Shape of a tensor in a safetensors file, and safetensors' own name of its type."""

    shape: tuple[int, ...]
    dtype: str


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the file that is being read before the message of a ConfigError, unless it names the file itself."""
    try:
        yield
    except ConfigError as error:
        if str(path) in str(error):
            raise
        raise ConfigError(f"{path}: {error}") from None


def open_safetensors(path: Path, remedy: str) -> Any:
    """Map a safetensors file; raises ConfigError, ending in `remedy`, if it is missing, cut short or of another kind."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read {path}: {error}; {remedy}") from None


def tensor_types(file: Any) -> dict[str, TensorType]:
    """Read shape and type of every tensor of an open safetensors file, by its name."""
    slices = ((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118  no mapping
    return {name: TensorType(tuple(entry.get_shape()), entry.get_dtype()) for name, entry in slices}


def float_type(path: Path, name: str, dtype: str, remedy: str) -> torch.dtype:
    """Look up a type by its name in safetensors; raises ConfigError, ending in `remedy`, if it is not in FLOAT_TYPES."""
    if dtype not in FLOAT_TYPES:
        raise ConfigError(f"{path}: dtype of {name} = {dtype}: must be one of {', '.join(FLOAT_TYPES)}; {remedy}")
    return FLOAT_TYPES[dtype]


def metadata_files(directory: Path) -> list[Path]:
    """List the configuration, tokenizer and template files of a directory, sorted."""
    suffixes = (".json", ".jinja", ".txt", ".model")
    return sorted(path for path in directory.iterdir() if path.suffix in suffixes and path.is_file())


def generation_ends(directory: Path) -> list[int]:
    """Read the end ids that the generation_config.json of a directory states; empty without that file.

    Raises ConfigError if the file has a key that known_keys.GENERATION does not list.
    """
    path = directory / "generation_config.json"
    if not path.exists():
        return []
    with naming(path):
        values = read_object(path)
        GENERATION.check(values)
        return token_ids(values.get("eos_token_id"))


def read_object(path: Path) -> dict[str, Any]:
    """Parse a JSON file that holds an object; raises ConfigError if it does not."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, or a number of 5,000 digits
        raise ConfigError(f"cannot read {path}: {error}; download the checkpoint again") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} = {type(document).__name__}: must be a JSON object; download the checkpoint again")
    return document
