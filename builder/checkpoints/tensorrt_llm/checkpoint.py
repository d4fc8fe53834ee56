"""TensorRT-LLM checkpoints: config.json and one safetensors file a rank, as TensorRT-LLM's convert_checkpoint.py writes them.

Tensors are joined over the ranks when they are read, and returned under their Hugging Face names.
"""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from kvseek.builder.checkpoints.checkpoint import Checkpoint, Header
from kvseek.builder.checkpoints.files import generation_ends, metadata_files, naming, read_object
from kvseek.builder.checkpoints.model_config import model_config
from kvseek.builder.checkpoints.tokenizer import ModelTokenizer, load_tokenizer_directory
from kvseek.core.config import ModelConfig, require
from kvseek.core.errors import ConfigError

from .config import Mapping, hugging_face_values, read_mapping
from .layout import Layout, Part
from .ranks import COPY_AGAIN, RankFile, join

LAYER = re.compile(r"transformer\.layers\.(\d+)\.")
CACHE_SCALES = ("kv_cache_scaling_factor", "kv_cache_rcp_scaling_factor")  # of a KV cache that kvseek does not quantise


class TensorRtLlmCheckpoint(Checkpoint):
    """A directory with TensorRT-LLM's config.json and rank0.safetensors, rank1.safetensors, ..., not quantised."""

    reading_copies = 1  # a rank's rows beside the joined tensor

    @cached_property
    def config(self) -> ModelConfig:
        """Shape of the model; special tokens are the tokenizer's, because a TensorRT-LLM configuration has none."""
        path, ends = self.path / "config.json", generation_ends(self.tokenizer_directory or self.path)
        with naming(path):
            values = hugging_face_values(self._values)
        tokenizer = self.tokenizer()
        values |= {f"{name}_id": tokenizer.special_id(name) for name in ("bos_token", "eos_token", "pad_token")}
        with naming(path):
            return model_config(values, ends)

    @property
    def files(self) -> list[Path]:
        """The directory's JSON, template and tokenizer files, and the ranks' files."""
        return [*metadata_files(self.path), *self._rank_paths]

    def unused(self, names: set[str]) -> set[str]:
        """Return the tensors that are not in `names`, as "NAME of FILE", without the scales of a quantised KV cache."""
        expected: list[set[str]] = [set() for _ in range(self._mapping.pp_size)]
        for name in names:
            part = self._layout.locate(name)
            expected[part.pipeline_rank].add(part.name)
        return {
            f"{name} of {rank.path.name}"
            for number, rank in enumerate(self._ranks)
            for name in rank.names - expected[number // self._mapping.tp_size]
            if not name.endswith(CACHE_SCALES)
        }

    def header(self, name: str) -> Header:
        """Describe one tensor; raises ConfigError if a rank lacks it or holds another shape or dtype."""
        part = self._layout.locate(name)
        ranks = self._sharing(part)
        dtype = ranks[0].dtype(part.name)
        for rank in ranks:
            rank.check(part, dtype)
        return Header(f"{ranks[0].path}: {part.name}", part.joined_shape, dtype)

    def tensor(self, name: str) -> Tensor:
        """Join one tensor over its ranks; raises as `header`, and if ranks differ that should hold copies."""
        part = self._layout.locate(name)
        return join(self._sharing(part), part)

    def _own_tokenizer(self) -> ModelTokenizer:
        return load_tokenizer_directory(self.path, "pass --tokenizer DIR, the model's Hugging Face directory")

    @cached_property
    def _values(self) -> dict[str, Any]:
        return read_object(self.path / "config.json")

    @cached_property
    def _mapping(self) -> Mapping:
        with naming(self.path / "config.json"):
            return read_mapping(self._values)

    @property
    def _rank_paths(self) -> list[Path]:
        """The ranks' files; raises ConfigError if one is missing or there are more than the mapping has ranks."""
        world_size = self._mapping.world_size
        expected = [self.path / f"rank{rank}.safetensors" for rank in range(world_size)]
        absent = [path.name for path in expected if not path.is_file()]
        if absent:
            raise ConfigError(
                f"{self.path}: {absent[0]} is missing ({len(absent)} of the {world_size} ranks' files); copy the "
                "checkpoint again, or convert the model again with --output_dir there"
            )
        extra = sorted(path.name for path in set(self.path.glob("rank*.safetensors")) - set(expected))
        if extra:
            raise ConfigError(
                f"{self.path}: {extra[0]} belongs to none of the {world_size} ranks of config.json's mapping; remove "
                "the files of another conversion"
            )
        return expected

    @cached_property
    def _ranks(self) -> list[RankFile]:
        return [RankFile(path) for path in self._rank_paths]

    @cached_property
    def _layout(self) -> Layout:
        model, mapping, layers = self.config, self._mapping, self._layers_of_ranks()
        with naming(self.path / "config.json"):
            return Layout(model, mapping, layers)

    def _layers_of_ranks(self) -> list[int]:
        """Number of layers of each pipeline rank; its files number the layers from 0."""
        layers = []
        for rank in self._ranks[:: self._mapping.tp_size]:
            numbers = [int(found[1]) for name in rank.names if (found := LAYER.match(name))]
            layers.append(max(numbers, default=-1) + 1)
        limit = f"{self.config.num_layers} together: num_hidden_layers of config.json"
        field = f"{self.path}: layers in the ranks' files"
        require(sum(layers) == self.config.num_layers, field, layers, limit, COPY_AGAIN)
        return layers

    def _sharing(self, part: Part) -> list[RankFile]:
        """Return the tensor-parallel ranks that share a tensor."""
        first = part.pipeline_rank * self._mapping.tp_size
        return self._ranks[first : first + self._mapping.tp_size]
