"""Reads files of checkpoints: safetensors and JSON; errors name the file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvseek.core.errors import ConfigError

from .known_keys import GENERATION
from .model_config import token_ids

FLOAT_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # under safetensors' names
ALLOW = "let this user read it"
FETCH = "it stands for the file in Git's large file storage: fetch the file with `git lfs pull`"
LFS_POINTER = b"version https://git-lfs"
DOWNLOAD_AGAIN = "the checkpoint is incomplete or damaged: download it again"


@dataclass(frozen=True)
class Header:
    """Description of a checkpoint's tensor that has not been read.

    Attributes
    ----------
    place : str
        The file and the tensor's name there, for messages.
    shape : tuple of int
        Shape of the tensor under its Hugging Face name.
    dtype : torch.dtype
        Floating-point type in which `Checkpoint.tensor` returns it.
    """

    place: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file, unread.

    Attributes
    ----------
    place : str
        The file and the name, for messages.
    shape : tuple of int
    kind : str
        Its type under safetensors' name.
    read : callable
        Copies it out of the file.
    """

    place: str
    shape: tuple[int, ...]
    kind: str
    read: Callable[[], Tensor] = field(compare=False)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the file that is being read before the message of a ConfigError, unless it names the file itself."""
    try:
        yield
    except ConfigError as error:
        if str(path) in str(error):
            raise
        raise ConfigError(f"{path}: {error}") from None


class SafetensorsFile:
    """A safetensors file: the names and headers of its tensors, and the tensors one at a time.

    It is opened anew for every tensor, because pages of an open mapping count as the process's memory: in the end the whole file.

    Parameters
    ----------
    damaged, quantised : str
        What helps if the file cannot be read, and if a tensor is of a type that no unquantised weight has.

    Raises
    ------
    ConfigError
        If the file is missing, cut short or of another kind.
    """

    def __init__(self, path: Path, damaged: str, quantised: str) -> None:
        self.path, self._damaged, self._quantised = path, damaged, quantised
        file = self._open()
        slices = ((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118  no mapping
        self._types = {name: (tuple(entry.get_shape()), entry.get_dtype()) for name, entry in slices}

    @property
    def names(self) -> Set[str]:
        """Names of the tensors."""
        return self._types.keys()

    def header(self, name: str) -> Header:
        """Describe a tensor; raises ConfigError if its type is not in FLOAT_TYPES, KeyError if there is no such tensor."""
        shape, dtype = self._types[name]
        if dtype not in FLOAT_TYPES:
            limit = ", ".join(FLOAT_TYPES)
            raise ConfigError(f"{self.path}: dtype of {name} = {dtype}: must be one of {limit}; {self._quantised}")
        return Header(f"{self.path}: {name}", shape, FLOAT_TYPES[dtype])

    def stored(self, name: str) -> StoredTensor:
        """Describe a tensor of any type; raises KeyError if there is no such tensor."""
        return StoredTensor(f"{self.path}: {name}", *self._types[name], partial(self.tensor, name))

    def tensor(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Copy rows of a tensor out of the file."""
        file = self._open()
        found: Tensor = file.get_tensor(name) if rows == slice(None) else file.get_slice(name)[rows]
        return found

    def _open(self) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(self.path, framework="pt")
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror or error}; {ALLOW}") from None
        except SafetensorError as error:
            with self.path.open("rb") as file:
                pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
            raise ConfigError(f"cannot read {self.path}: {error}; {FETCH if pointer else self._damaged}") from None


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
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; {ALLOW}") from None
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, or a number of 5,000 digits
        raise ConfigError(f"cannot read {path}: {error}; correct it, or download it again") from None
    if not isinstance(document, dict):
        raise ConfigError(
            f"{path} = {type(document).__name__}: must be a JSON object; correct it, or download it again"
        )
    return document
