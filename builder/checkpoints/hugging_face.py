"""Checkpoints as save_pretrained writes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvseek.core.errors import ConfigError, require
from kvseek.core.model_config import ModelConfig
from kvseek.core.weight_only import HEAD

from .checkpoint import OWN_DTYPE, Checkpoint
from .effective_config import check_effective_config
from .files import DOWNLOAD_AGAIN, Header, SafetensorsFile, generation_ends, metadata_files, naming, read_object
from .model_config import model_config, text_part
from .quantised import UNQUANTISED, Quantisation, QuantisedTensors, QuantisedWeight, modelopt_config
from .tokenizer import ModelTokenizer, load_tokenizer_directory

MERGE = "merge it into the model's weights, or remove it and its file"
MERGE_INTO = "merge it into its base model with peft's merge_and_unload"
MODELOPT_FILE = "hf_quant_config.json"
ADAPTER_FILE = "adapter_config.json"
LEAVE_OUT = "nothing can draft with it: leave it out"
DRAFTING = "mtp."  # what tensors of a multi-token-prediction head begin with
EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")  # a tensor of one expert
# What tensors of models that also read images begin with: Qwen's, and Gemma's.
OF_GEMMA = "vision_tower.", "multi_modal_projector."
IMAGES = ("model.visual.", *OF_GEMMA, *(f"model.{name}" for name in OF_GEMMA))
TEXT = {"model.language_model.": "model.", "language_model.model.": "model."}  # and what those of text alone begin with
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class ExpertStack:
    """A matrix within a tensor of all experts of a layer, as transformers 5 has them in memory.

    Attributes
    ----------
    name : str
        The tensor: gate_up_proj [experts, 2 I, hidden], gates before ups, or down_proj [experts, hidden, I].
    expert : int
    kind : str
        "gate", "up" or "down".
    """

    name: str
    expert: int
    kind: str

    def header(self, whole: Header) -> Header:
        """Describe the matrix, by the header of the tensor; raises ConfigError if that has other axes."""
        fits = len(whole.shape) == 3 and self.expert < whole.shape[0] and whole.shape[1] % 2 == 0
        limit = f"[more than {self.expert} experts, an even number, ...]"
        require(fits, f"shape of {whole.place}", whole.shape, limit, DOWNLOAD_AGAIN)
        rows = whole.shape[1] // (1 if self.kind == "down" else 2)
        return replace(whole, shape=(rows, whole.shape[2]))

    def part(self, expert: Tensor) -> Tensor:
        """Cut the matrix out of an expert's part of the tensor."""
        return expert if self.kind == "down" else expert.chunk(2)[self.kind == "up"].contiguous()


class HuggingFaceCheckpoint(Checkpoint):
    """A directory as save_pretrained writes it: config.json, safetensors in one file or in shards, a tokenizer.

    `mtp`: with the multi-token-prediction head; raises ConfigError then if the files have none.
    """

    def __init__(self, path: Path, tokenizer_directory: Path | None = None, *, mtp: bool = False) -> None:
        super().__init__(path, tokenizer_directory)
        self._mtp = mtp
        limit = f"left out with files that have no tensors {DRAFTING}*"
        require(not mtp or any(name.startswith(DRAFTING) for name in self._files), "mtp", mtp, limit, LEAVE_OUT)

    @cached_property
    def config(self) -> ModelConfig:
        """Shape of the model, from config.json and generation_config.json."""
        path, ends = self.path / "config.json", generation_ends(self.path)
        with naming(path):
            return replace(model_config(self._text or read_object(path), ends), mtp=self._mtp)

    @cached_property
    def _text(self) -> dict[str, Any] | None:
        """The configuration of the text part of a model that also reads images."""
        return text_part(read_object(self.path / "config.json"))

    def check(self) -> None:
        """Raise ConfigError unless transformers reads the same model from the directory, and no adapter lies there."""
        super().check()
        adapter = self.path / ADAPTER_FILE
        if adapter.exists():
            raise ConfigError(f"{adapter} belongs to an adapter, which transformers would apply; {MERGE}")
        check_effective_config(self.config, self.path)

    @property
    def files(self) -> list[Path]:
        """The directory's JSON, template and tokenizer files, and the weight files."""
        return sorted({*metadata_files(self.path), *(self.path / file for file in self._files.values())})

    def unused(self, names: set[str]) -> set[str]:
        """Return the tensors that are not in `names`, as "NAME of FILE", without old Llama checkpoints' RoPE frequencies."""
        left = set(self._files) - (names if self._quantised is None else self._quantised.used(names))
        left -= {*self._drafting, *self._of_images, *(stack.name for name in names if (stack := self._stack(name)))}
        return {f"{name} of {self._files[name]}" for name in left if not name.endswith("rotary_emb.inv_freq")}

    @cached_property
    def _drafting(self) -> list[str]:
        """Tensors of a hybrid's head that predicts further tokens, if the engine has none of them."""
        left_out = self.config.delta_net is not None and not self._mtp
        return [name for name in self._files if name.startswith(DRAFTING)] if left_out else []

    @cached_property
    def _of_images(self) -> list[str]:
        return [] if self._text is None else [name for name in self._files if name.startswith(IMAGES)]

    @property
    def quantised_by(self) -> str | None:
        """See Checkpoint.quantised_by."""
        return None if self._rules is None else self._rules.method

    def quantised(self, name: str) -> QuantisedWeight | None:
        """See Checkpoint.quantised."""
        return None if self._quantised is None else self._quantised.find(name)

    @property
    def reading_copies(self) -> int:
        """See Checkpoint.reading_copies: the packed numbers, and a transposed copy."""
        return 0 if self._rules is None else 2

    @property
    def notes(self) -> Sequence[str]:
        """See Checkpoint.notes."""
        found, notes = self._quantised, []
        if found is not None and (found.rules.cache or found.reduces_activations):
            notes.append(OWN_DTYPE)
        if self._drafting:
            notes.append(
                f"{len(self._drafting)} tensors of the multi-token-prediction head ({DRAFTING}*) are not used: on the CPU --mtp "
                "lets it draft"
            )
        if self._of_images:
            begins = sorted({one for one in IMAGES for name in self._of_images if name.startswith(one)})
            named = ", ".join(f"{one}*" for one in begins)
            notes.append(f"{len(self._of_images)} tensors for images ({named}) are left out: --text_only")
        return notes

    def header(self, name: str) -> Header:
        """Describe one tensor; raises ConfigError if no file has the tensor, or it is of an unknown type."""
        if (own := self.quantised(name)) is not None:
            return Header(own.place, own.shape, torch.float32)
        if stack := self._stack(name):
            return stack.header(self._weight_files[self._files[stack.name]].header(self._stored_name(stack.name)))
        if name not in self._files:
            raise ConfigError(f"{self.path}: tensor {name} is missing in {self._listing}; {self._remedy_for(name)}")
        return self._weight_files[self._files[name]].header(self._stored_name(name))

    def tensor(self, name: str) -> Tensor:
        """Read one tensor; raises as `header`."""
        if (own := self.quantised(name)) is not None:
            return own.read()
        self.header(name)
        if stack := self._stack(name):
            file, rows = self._weight_files[self._files[stack.name]], slice(stack.expert, stack.expert + 1)
            return stack.part(file.tensor(self._stored_name(stack.name), rows)[0])
        return self._weight_files[self._files[name]].tensor(self._stored_name(name))

    def _stack(self, name: str) -> ExpertStack | None:
        """Find the tensor of all experts that has a tensor of one, if experts are stored so."""
        found = EXPERT.fullmatch(name)
        if found is None or name in self._files:
            return None
        stack = ExpertStack(f"{found[1]}{'down' if found[3] == 'down' else 'gate_up'}_proj", int(found[2]), found[3])
        return stack if stack.name in self._files else None

    def _stored_name(self, name: str) -> str:
        """Return the name in the files of a tensor that a model of text alone has under `name`."""
        stored = self._weight_files[self._files[name]].names
        if self._text is None:
            return name
        own = (theirs + name.removeprefix(ours) for theirs, ours in TEXT.items() if name.startswith(ours))
        return next((one for one in own if one in stored), name)

    def _own_tokenizer(self) -> ModelTokenizer:
        remedy = "put the model's tokenizer.json and tokenizer_config.json there, or pass --tokenizer DIR"
        return load_tokenizer_directory(self.path, remedy)

    @cached_property
    def _rules(self) -> Quantisation | None:
        """By config.json, or by hf_quant_config.json, where ModelOpt's older checkpoints state it."""
        path = self.path / "config.json"
        values = read_object(path).get("quantization_config")
        if values is None and (apart := self.path / MODELOPT_FILE).exists():
            path, values = apart, modelopt_config(read_object(apart))
        if values is None:
            return None
        with naming(path):
            return Quantisation.read(values)

    @cached_property
    def _quantised(self) -> QuantisedTensors | None:
        if self._rules is None:
            return None
        files = self._weight_files
        stored = {name: files[file].stored(self._stored_name(name)) for name, file in self._files.items()}
        return QuantisedTensors(self._rules, stored)

    @cached_property
    def _files(self) -> dict[str, str]:
        """Tensor name → file, by the files' own headers, with which the index must agree."""
        files = {name: file for file, weights in self._weight_files.items() for name in weights.names}
        for name, file in self._weight_map.items():
            if name not in self._weight_files[file].names:
                raise ConfigError(
                    f"{self.path / file}: tensor {name} is missing, {INDEX_FILE} names it; {DOWNLOAD_AGAIN}"
                )
        files |= self._weight_map
        if self._text is not None:
            for theirs, ours in TEXT.items():
                begins = [name for name in files if name.startswith(theirs)]
                files |= {ours + name.removeprefix(theirs): files.pop(name) for name in begins}
        return files

    @cached_property
    def _weight_files(self) -> dict[str, SafetensorsFile]:
        files = sorted(set(self._weight_map.values())) or [SINGLE_FILE]
        for file in files:
            if not (self.path / file).is_file():
                raise ConfigError(f"{self.path / file} is missing, {INDEX_FILE} names it; {DOWNLOAD_AGAIN}")
        return {file: SafetensorsFile(self.path / file, DOWNLOAD_AGAIN, UNQUANTISED) for file in files}

    @cached_property
    def _weight_map(self) -> dict[str, str]:
        """Tensor name → file as the index of several files has it; empty where there is a single file."""
        path = self.path / INDEX_FILE
        if (self.path / SINGLE_FILE).exists():  # as in transformers, goes before the shards of an index beside it
            return {}
        if not path.exists():
            remedy = "save the model with save_pretrained, which writes them"
            if (self.path / ADAPTER_FILE).exists():
                remedy = f"{ADAPTER_FILE} belongs to an adapter: {MERGE_INTO} and name the result"
            raise ConfigError(f"{self.path} has neither {SINGLE_FILE} nor {INDEX_FILE}; {remedy}")
        weight_map = read_object(path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ConfigError(f"{path}: weight_map must be an object of tensor names and files; {DOWNLOAD_AGAIN}")
        if not weight_map:
            raise ConfigError(f"{path}: weight_map is empty: must name every tensor; {DOWNLOAD_AGAIN}")
        return weight_map

    def _remedy_for(self, missing: str) -> str:
        """Say what helps where config.json asks for a tensor that no file claims to have: no download was cut short."""
        if missing == HEAD and not self.config.tie_word_embeddings:
            return (
                "tie_word_embeddings is false, or absent, in config.json: set it to true if the head is the embedding, as in "
                "many small models, else use a checkpoint that has the head"
            )
        return "config.json and weights are of different models, or the weights were not saved whole: use another checkpoint"

    @property
    def _listing(self) -> str:
        return INDEX_FILE if self._weight_map else SINGLE_FILE
