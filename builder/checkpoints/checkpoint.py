"""Model checkpoints that the builder reads: one interface, tensors under their Hugging Face names."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from kvseek.core.errors import ConfigError
from kvseek.core.model_config import ModelConfig

from .files import Header, metadata_files
from .quantised import NarrowWeight
from .tokenizer import ModelTokenizer, load_tokenizer_directory

OWN_DTYPE = "activations and rows keep the engine's dtype: the checkpoint's scales for 8 bits of them are not used"
NAME_TOKENIZER = "name a directory with the model's tokenizer.json"


class Checkpoint(ABC):
    """A model on disk: its configuration, its tensors one at a time, its tokenizer.

    Parameters
    ----------
    path : Path
        The model's directory or file.
    tokenizer_directory : Path, optional
        Directory that the tokenizer is read from, instead of the checkpoint.
    """

    def __init__(self, path: Path, tokenizer_directory: Path | None = None) -> None:
        self.path = path
        self.tokenizer_directory = tokenizer_directory

    @property
    @abstractmethod
    def config(self) -> ModelConfig:
        """Shape of the model; raises ConfigError if the decoder cannot run it."""

    @property
    def reading_copies(self) -> int:
        """Most copies of a tensor that reading it needs, beside the tensor itself."""
        return 0

    @property
    @abstractmethod
    def files(self) -> list[Path]:
        """Files of the checkpoint that the engine is made from."""

    @abstractmethod
    def unused(self, names: set[str]) -> set[str]:
        """Return the checkpoint's own names of the tensors that are not among the Hugging Face `names`."""

    @abstractmethod
    def header(self, name: str) -> Header:
        """Describe one tensor, unread; raises ConfigError if it is absent, or of a type that is not supported."""

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """Read one tensor to the CPU, as `header` describes it; raises as `header` does."""

    @property
    def quantised_by(self) -> str | None:
        """The name of the method by which weights were quantised; None if config.json states none. Reads no weights."""
        return None

    def quantised(self, name: str) -> NarrowWeight | None:
        """Find a weight that is stored quantised, of which `tensor` returns what its numbers mean; None for any other.

        Of blocks of a GGUF file only those whose numbers an engine may keep are found.

        Raises ConfigError if it is of a format that is not supported.
        """
        return None

    @property
    def notes(self) -> Sequence[str]:
        """What a publisher's files ask for and an engine does not do, for whoever builds it."""
        return ()

    def check(self) -> None:
        """Raise ConfigError if the checkpoint contradicts itself; reads whole tensors where they are stored twice."""
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        if not self.config.tie_word_embeddings or self.unused({embedding}) == self.unused({embedding, head}):
            return
        # Digests, so that one tensor is in memory at a time. transformers uses the head of a tied model if it differs.
        if self._digest(head) != self._digest(embedding):
            raise ConfigError(
                f"{self.path}: tie_word_embeddings = True: must be false, because the checkpoint has a {head} that differs from "
                f"{embedding}; set it to false to serve {head}, as transformers does, or remove {head} from the file"
            )

    def _digest(self, name: str) -> bytes:
        return hashlib.sha256(self.tensor(name).contiguous().view(torch.uint8).numpy().data).digest()

    @property
    def sources(self) -> list[Path]:
        """List every file that the engine is made from: the checkpoint's, then those of a separate tokenizer directory."""
        apart = self.tokenizer_directory
        return [*self.files, *(metadata_files(apart) if apart is not None else [])]

    def tokenizer(self) -> ModelTokenizer:
        """Load the tokenizer; raises ConfigError if it cannot be read."""
        return self._loaded_tokenizer

    @cached_property
    def _loaded_tokenizer(self) -> ModelTokenizer:
        if self.tokenizer_directory is not None:
            return load_tokenizer_directory(self.tokenizer_directory, NAME_TOKENIZER)
        return self._own_tokenizer()

    @abstractmethod
    def _own_tokenizer(self) -> ModelTokenizer:
        """Load the tokenizer in the model's own directory or file."""
