"""The files of a TensorRT-LLM checkpoint's ranks, and tensors joined from them, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvseek.engine.errors import ConfigError

from .tensorrt_llm_layout import Part
from .weights import DTYPE_NAMES

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
COPY_AGAIN = "copy the checkpoint again, or convert the model again"


class RankFile:
    """One rank's safetensors file, mapped.

    Raises
    ------
    ConfigError
        If the file is missing, cut short or no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, _open(path)
        self.names = frozenset(self._file.keys())

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor; raises ConfigError if it is absent, or of a type that unquantised weights do not have."""
        found = self._slice(name).get_dtype()
        if found not in DTYPES:
            limit = ", ".join(DTYPES)
            raise ConfigError(
                f"{self.path}: dtype of {name} = {found}: must be one of {limit}; convert the model without quantisation"
            )
        return DTYPES[found]

    def read(self, part: Part, dtype: torch.dtype) -> Tensor:
        """Copy the rows of a part out of the file; raises ConfigError unless the tensor has that part's shape and `dtype`."""
        tensor = self._slice(part.name)
        if tuple(tensor.get_shape()) != part.shape:
            raise ConfigError(
                f"{self.path}: shape of {part.name} = {tuple(tensor.get_shape())}: must be {part.shape} by config.json; "
                "config and weights are of different conversions"
            )
        if self.dtype(part.name) != dtype:
            raise ConfigError(
                f"{self.path}: dtype of {part.name} = {self.dtype(part.name)}: must be {dtype} as in the first rank's "
                "file; the files are of different conversions"
            )
        rows: Tensor = tensor[part.rows]
        return rows

    def _slice(self, name: str) -> Any:
        if name not in self.names:
            raise ConfigError(f"{self.path}: tensor {name} is missing; {COPY_AGAIN}")
        return self._file.get_slice(name)


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read {path}: {error}; {COPY_AGAIN}") from None


def join(ranks: Sequence[RankFile], part: Part) -> Tensor:
    """Join a tensor from the ranks of its pipeline stage, in memory the tensor and one rank's rows.

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
