"""Model checkpoints that the builder reads: one interface, tensors under their Hugging Face names."""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvseek.engine.config import ModelConfig
from kvseek.engine.errors import ConfigError

from .model_config import model_config, token_ids
from .tensor_headers import Header

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
TensorTypes = dict[str, tuple[tuple[int, ...], str]]  # name → shape and safetensors' name of the type
NAME_TOKENIZER = "name a directory with the model's tokenizer.json"
FLOAT_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # under safetensors' names
DOWNLOAD_AGAIN = "the checkpoint is incomplete or damaged: download it again"


class Checkpoint(ABC):
    """A model on disk: its configuration, its tensors one at a time, its tokenizer.

    Parameters
    ----------
    path : Path
        The model's directory or file.
    tokenizer_directory : Path, optional
        Where the tokenizer is read from instead of the checkpoint.

    Attributes
    ----------
    reading_copies : int
        Copies of a tensor that reading it takes at most, beside the tensor itself.
    """

    reading_copies = 0

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
    def header(self, name: str) -> Header:
        """Describe one tensor, unread; raises ConfigError if it is absent, or of a type that is not supported."""

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """Read one tensor, on the CPU, as `header` describes it; raises as that."""

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
        path, ends = self.path / "config.json", generation_ends(self.path)
        with naming(path):
            return model_config(read_object(path), ends)

    @property
    def files(self) -> list[Path]:
        """The directory's JSON, template and tokenizer files, and the weight files."""
        return sorted({*metadata_files(self.path), *(self.path / file for file in self._files.values())})

    def unused(self, names: set[str]) -> set[str]:
        """Tensors that `names` leave out, as "NAME of FILE"; old Llama checkpoints' RoPE frequencies are no weights."""
        left = set(self._files) - names
        return {f"{name} of {self._files[name]}" for name in left if not name.endswith("rotary_emb.inv_freq")}

    def header(self, name: str) -> Header:
        """Describe one tensor; raises ConfigError if no file has it, or it is no floating-point tensor."""
        if name not in self._files:
            raise ConfigError(f"{self.path}: tensor {name} is missing in {self._listing}; {DOWNLOAD_AGAIN}")
        path = self.path / self._files[name]
        shape, dtype = self._headers[self._files[name]][name]
        return Header(f"{path}: {name}", shape, float_type(path, name, dtype, "use the unquantised checkpoint"))

    def tensor(self, name: str) -> Tensor:
        """Read one tensor; raises as `header`."""
        self.header(name)
        # Opened for every tensor: pages of a mapping that stays open count as the process's memory until it is closed.
        tensor: Tensor = open_safetensors(self.path / self._files[name], DOWNLOAD_AGAIN).get_tensor(name)
        return tensor

    def _own_tokenizer(self) -> Any:
        remedy = "put the model's tokenizer.json and tokenizer_config.json there, or pass --tokenizer DIR"
        return load_tokenizer_directory(self.path, remedy)

    @cached_property
    def _files(self) -> dict[str, str]:
        """Tensor name → file, by the files' own headers, with which the index must agree."""
        files = {name: file for file, header in self._headers.items() for name in header}
        for name, file in self._weight_map.items():
            if name not in self._headers[file]:
                raise ConfigError(
                    f"{self.path / file}: tensor {name} is missing, {INDEX_FILE} names it; {DOWNLOAD_AGAIN}"
                )
        return files | self._weight_map

    @cached_property
    def _headers(self) -> dict[str, TensorTypes]:
        """File → tensor name → shape and type."""
        files = sorted(set(self._weight_map.values())) or [SINGLE_FILE]
        for file in files:
            if not (self.path / file).is_file():
                raise ConfigError(f"{self.path / file} is missing, {INDEX_FILE} names it; {DOWNLOAD_AGAIN}")
        return {file: tensor_types(open_safetensors(self.path / file, DOWNLOAD_AGAIN)) for file in files}

    @cached_property
    def _weight_map(self) -> dict[str, str]:
        """Tensor name → file as the index of several files has it; empty with a single file."""
        path = self.path / INDEX_FILE
        if not path.exists():
            if (self.path / SINGLE_FILE).exists():
                return {}
            remedy = "save the model with save_pretrained, which writes them"
            raise ConfigError(f"{self.path} has neither {SINGLE_FILE} nor {INDEX_FILE}; {remedy}")
        weight_map = read_object(path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ConfigError(f"{path}: weight_map must be an object of tensor names and files; {DOWNLOAD_AGAIN}")
        if not weight_map:
            raise ConfigError(f"{path}: weight_map is empty: must name every tensor; {DOWNLOAD_AGAIN}")
        return weight_map

    @property
    def _listing(self) -> str:
        return INDEX_FILE if self._weight_map else SINGLE_FILE


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


def tensor_types(file: Any) -> TensorTypes:
    """Shape and type of every tensor of an open safetensors file, under safetensors' names."""
    slices = ((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118  no mapping
    return {name: (tuple(entry.get_shape()), entry.get_dtype()) for name, entry in slices}


def float_type(path: Path, name: str, dtype: str, remedy: str) -> torch.dtype:
    """Look up a type by safetensors' name of it; raises ConfigError, ending in `remedy`, if it is not in FLOAT_TYPES."""
    if dtype not in FLOAT_TYPES:
        raise ConfigError(f"{path}: dtype of {name} = {dtype}: must be one of {', '.join(FLOAT_TYPES)}; {remedy}")
    return FLOAT_TYPES[dtype]


def load_tokenizer_directory(directory: Path, remedy: str) -> Any:
    """Load a directory's tokenizer; raises ConfigError, ending in `remedy`, if transformers can read none there."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError) as error:
        raise ConfigError(f"{directory}: cannot load the tokenizer ({error}); {remedy}") from None


def metadata_files(directory: Path) -> list[Path]:
    """Configuration, tokenizer and template files of a directory, sorted."""
    suffixes = (".json", ".jinja", ".txt", ".model")
    return sorted(path for path in directory.iterdir() if path.suffix in suffixes and path.is_file())


def generation_ends(directory: Path) -> list[int]:
    """End ids that the generation_config.json of a directory states; empty without one."""
    path = directory / "generation_config.json"
    if not path.exists():
        return []
    with naming(path):
        return token_ids(read_object(path).get("eos_token_id"))


def read_object(path: Path) -> dict[str, Any]:
    """Parse a JSON file that holds an object; raises ConfigError if it does not."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; download the checkpoint again") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} = {type(document).__name__}: must be a JSON object; download the checkpoint again")
    return document
