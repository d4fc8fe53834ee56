"""Model checkpoints that the builder reads: one interface, tensors under their Hugging Face names."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvseek.engine.config import ModelConfig
from kvseek.engine.errors import ConfigError

from .model_config import model_config, token_ids

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Checkpoint(ABC):
    """A model on disk: its configuration, its tensors one at a time, its tokenizer."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    @abstractmethod
    def config(self) -> ModelConfig:
        """Shape of the model; raises ConfigError if the decoder cannot run it."""

    @property
    @abstractmethod
    def files(self) -> list[Path]:
        """Files that the engine is made from."""

    @abstractmethod
    def unused(self, names: set[str]) -> set[str]:
        """Tensors of the checkpoint, under its own names, that are not among the Hugging Face `names`."""

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """Read one tensor, floating point, on the CPU."""

    @abstractmethod
    def tokenizer(self) -> Any:
        """Load the tokenizer, a transformers PreTrainedTokenizerBase."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a Hugging Face directory or a GGUF file.

    Raises
    ------
    ConfigError
        If `path` is neither.
    """
    from .gguf_checkpoint import GgufCheckpoint

    if path.is_file():
        return GgufCheckpoint(path)
    if (path / "config.json").is_file():
        return HuggingFaceCheckpoint(path)
    found = "has no config.json" if path.is_dir() else "does not exist"
    raise ConfigError(f"model = {str(path)!r}: {found}; pass a Hugging Face directory with safetensors or a .gguf file")


class HuggingFaceCheckpoint(Checkpoint):
    """A directory as save_pretrained writes it: config.json, safetensors in one file or in shards, a tokenizer."""

    @cached_property
    def config(self) -> ModelConfig:
        """Shape of the model, from config.json and generation_config.json."""
        generation = self.path / "generation_config.json"
        ends = token_ids(_read_object(generation).get("eos_token_id")) if generation.exists() else []
        return model_config(_read_object(self.path / "config.json"), ends)

    @property
    def files(self) -> list[Path]:
        """The directory's JSON, template and tokenizer files, and the weight files."""
        metadata = [p for p in self.path.iterdir() if p.suffix in (".json", ".jinja", ".txt", ".model") and p.is_file()]
        return sorted({*metadata, *(self.path / file for file in self._files.values())})

    def unused(self, names: set[str]) -> set[str]:
        """Tensors that `names` leave out; RoPE frequencies, which old Llama checkpoints carry, follow from the config."""
        return {name for name in set(self._files) - names if not name.endswith("rotary_emb.inv_freq")}

    def tensor(self, name: str) -> Tensor:
        """Read one tensor; raises ConfigError if it is absent, unreadable or of a quantised dtype."""
        if name not in self._files:
            raise ConfigError(f"{self.path}: tensor {name} is missing; the checkpoint is incomplete: download it again")
        tensor: Tensor = self._open(self._files[name]).get_tensor(name)
        if tensor.dtype not in FLOAT_TYPES:
            limit = ", ".join(str(dtype) for dtype in FLOAT_TYPES)
            remedy = "use the unquantised checkpoint"
            raise ConfigError(f"dtype of {name} = {tensor.dtype}: must be one of {limit}; {remedy}")
        return tensor

    def tokenizer(self) -> Any:
        """Load the directory's tokenizer; raises ConfigError if there is none that transformers can read."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.path, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            remedy = "put the model's tokenizer.json and tokenizer_config.json there"
            raise ConfigError(f"{self.path}: cannot load the tokenizer ({error}); {remedy}") from None

    @cached_property
    def _files(self) -> dict[str, str]:
        """Tensor name → file."""
        if (self.path / INDEX_FILE).exists():
            weight_map = _read_object(self.path / INDEX_FILE).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ConfigError(f"{self.path / INDEX_FILE}: weight_map is missing; download the checkpoint again")
            return weight_map
        if (self.path / SINGLE_FILE).exists():
            return dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        raise ConfigError(
            f"{self.path} has neither {SINGLE_FILE} nor {INDEX_FILE}; save the model with save_pretrained, which writes them"
        )

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(self.path / file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read {self.path / file}: {error}; download the checkpoint again") from None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; download the checkpoint again") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} = {type(document).__name__}: must be a JSON object; download the checkpoint again")
    return document
