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
NAME_TOKENIZER = "name a directory with the model's tokenizer.json"
FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Checkpoint(ABC):
    """A model on disk: its configuration, its tensors one at a time, its tokenizer.

    Parameters
    ----------
    path : Path
        The model's directory or file.
    tokenizer_directory : Path, optional
        Where the tokenizer is read from instead of the checkpoint.
    """

    def __init__(self, path: Path, tokenizer_directory: Path | None = None) -> None:
        self.path = path
        self.tokenizer_directory = tokenizer_directory

    @property
    @abstractmethod
    def config(self) -> ModelConfig:
        """Shape of the model; raises ConfigError if the decoder cannot run it."""

    @property
    @abstractmethod
    def files(self) -> list[Path]:
        """Files of the checkpoint that the engine is made from."""

    @abstractmethod
    def unused(self, names: set[str]) -> set[str]:
        """Tensors of the checkpoint, under its own names, that are not among the Hugging Face `names`."""

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """Read one tensor, floating point, on the CPU."""

    @property
    def sources(self) -> list[Path]:
        """Every file that the engine is made from: the checkpoint's, then those of the tokenizer's own directory."""
        apart = self.tokenizer_directory
        return [*self.files, *(metadata_files(apart) if apart is not None else [])]

    def tokenizer(self) -> Any:
        """Load the tokenizer, a transformers PreTrainedTokenizerBase; raises ConfigError if it cannot be read."""
        return self._loaded_tokenizer

    @cached_property
    def _loaded_tokenizer(self) -> Any:
        if self.tokenizer_directory is not None:
            return load_tokenizer_directory(self.tokenizer_directory, NAME_TOKENIZER)
        return self._own_tokenizer()

    @abstractmethod
    def _own_tokenizer(self) -> Any:
        """Load the tokenizer that lies with the model."""


def open_checkpoint(path: Path, tokenizer_directory: Path | None = None) -> Checkpoint:
    """Open a Hugging Face directory, a TensorRT-LLM checkpoint or a GGUF file.

    Parameters
    ----------
    tokenizer_directory : Path, optional
        Where the tokenizer is read from instead.

    Raises
    ------
    ConfigError
        If `path` is none of them, or `tokenizer_directory` no directory.
    """
    from .gguf_checkpoint import GgufCheckpoint
    from .tensorrt_llm_checkpoint import TensorRtLlmCheckpoint

    if tokenizer_directory is not None and not tokenizer_directory.is_dir():
        raise ConfigError(f"tokenizer = {str(tokenizer_directory)!r}: must be a directory; {NAME_TOKENIZER}")
    if path.is_file():
        return GgufCheckpoint(path, tokenizer_directory)
    kinds = "a Hugging Face directory with safetensors, a TensorRT-LLM checkpoint or a .gguf file"
    if not (path / "config.json").is_file():
        found = "has no config.json" if path.is_dir() else "does not exist"
        raise ConfigError(f"model = {str(path)!r}: {found}; pass {kinds}")
    values = read_object(path / "config.json")
    if "format_version" in values or "pretrained_config" in values:
        kind = "an engine directory of kvseek" if "format_version" in values else "a compiled TensorRT-LLM engine"
        raise ConfigError(f"model = {str(path)!r}: is {kind}; pass the checkpoint that it was built from")
    if isinstance(values.get("architecture"), str) and "architectures" not in values:
        return TensorRtLlmCheckpoint(path, tokenizer_directory)
    return HuggingFaceCheckpoint(path, tokenizer_directory)


class HuggingFaceCheckpoint(Checkpoint):
    """A directory as save_pretrained writes it: config.json, safetensors in one file or in shards, a tokenizer."""

    @cached_property
    def config(self) -> ModelConfig:
        """Shape of the model, from config.json and generation_config.json."""
        return model_config(read_object(self.path / "config.json"), generation_ends(self.path))

    @property
    def files(self) -> list[Path]:
        """The directory's JSON, template and tokenizer files, and the weight files."""
        return sorted({*metadata_files(self.path), *(self.path / file for file in self._files.values())})

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

    def _own_tokenizer(self) -> Any:
        remedy = "put the model's tokenizer.json and tokenizer_config.json there, or pass --tokenizer DIR"
        return load_tokenizer_directory(self.path, remedy)

    @cached_property
    def _files(self) -> dict[str, str]:
        """Tensor name → file."""
        if (self.path / INDEX_FILE).exists():
            weight_map = read_object(self.path / INDEX_FILE).get("weight_map")
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


def load_tokenizer_directory(directory: Path, remedy: str) -> Any:
    """Load a directory's tokenizer; raises ConfigError, ending in `remedy`, if transformers can read none there."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ConfigError(f"{directory}: cannot load the tokenizer ({error}); {remedy}") from None


def metadata_files(directory: Path) -> list[Path]:
    """Configuration, tokenizer and template files of a directory, sorted."""
    suffixes = (".json", ".jinja", ".txt", ".model")
    return sorted(path for path in directory.iterdir() if path.suffix in suffixes and path.is_file())


def generation_ends(directory: Path) -> list[int]:
    """End ids that the generation_config.json of a directory states; empty without one."""
    path = directory / "generation_config.json"
    return token_ids(read_object(path).get("eos_token_id")) if path.exists() else []


def read_object(path: Path) -> dict[str, Any]:
    """Parse a JSON file that holds an object; raises ConfigError if it does not."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; download the checkpoint again") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} = {type(document).__name__}: must be a JSON object; download the checkpoint again")
    return document
