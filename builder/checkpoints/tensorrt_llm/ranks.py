"""Reads the files of a TensorRT-LLM checkpoint's ranks, and joins tensors from them, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kvseek.builder.checkpoints.files import TensorType, float_type, open_safetensors, tensor_types
from kvseek.core.errors import ConfigError
from kvseek.core.weight_only import HEAD

from .layout import Part

COPY_AGAIN = "copy the checkpoint again, or convert the model again"


class RankFile:
    """One rank's safetensors file, opened for every tensor.

    It does not stay open, because pages of an open mapping count as the process's memory: in the end the whole file.

    Raises
    ------
    ConfigError
        If the file is missing, cut short or no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._types = path, tensor_types(open_safetensors(path, COPY_AGAIN))
        self.names = frozenset(self._types)

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a tensor; raises ConfigError if it is absent, or of a type that no unquantised weight has."""
        return float_type(self.path, name, self._type(name).dtype, "convert the model without quantisation")

    def check(self, part: Part, dtype: torch.dtype) -> None:
        """Raise ConfigError unless the file has the tensor of a part, in that part's shape and in `dtype`."""
        shape = self._type(part.name).shape
        if shape != part.shape:
            raise ConfigError(
                f"{self.path}: shape of {part.name} = {shape}: must be {part.shape} by config.json; "
                "config and weights are of different conversions"
            )
        if self.dtype(part.name) != dtype:
            raise ConfigError(
                f"{self.path}: dtype of {part.name} = {self.dtype(part.name)}: must be {dtype} as in the first rank's "
                "file; the files are of different conversions"
            )

    def read(self, part: Part, dtype: torch.dtype) -> Tensor:
        """Copy the rows of a part out of the file; raises as `check`."""
        self.check(part, dtype)
        rows: Tensor = open_safetensors(self.path, COPY_AGAIN).get_slice(part.name)[part.rows]
        return rows

    def _type(self, name: str) -> TensorType:
        if name not in self.names:
            untied = (
                "share_embedding_table is false, or absent, in config.json: set it to true if the head is the embedding"
            )
            remedy = f"{untied}, else convert the model again" if name == HEAD else COPY_AGAIN
            raise ConfigError(f"{self.path}: tensor {name} is missing; {remedy}")
        return self._types[name]


def join(ranks: Sequence[RankFile], part: Part) -> Tensor:
    """Join a tensor from the tensor-parallel ranks that share it; memory holds the tensor and one rank's rows.

    Raises
    ------
    ConfigError
        If a rank's tensor is absent or of another shape or dtype, or ranks that hold copies differ.
    """
    extent = len(range(part.shape[0])[part.rows]) if part.axis == 0 else part.shape[part.axis]
    shape = list(part.shape)
    shape[part.axis] = extent * (len(ranks) // part.copies)
    joined = torch.empty(shape, dtype=ranks[0].dtype(part.name))
    for number, rank in enumerate(ranks):
        place = joined.narrow(part.axis, number // part.copies * extent, extent)
        rows = rank.read(part, joined.dtype)
        if number % part.copies == 0:
            place.copy_(rows)
        elif not torch.equal(place, rows):
            first = ranks[number - number % part.copies].path.name
            raise ConfigError(
                f"{rank.path}: {part.name} differs from that of {first}, must be a copy of it; the files are of "
                "different conversions"
            )
    return joined.narrow(part.axis, 0, part.size)
