"""The storage of the model's weights in an engine directory: as safetensors, or inside TensorRT plans.

This file is the only entry to builder/tensorrt/, which is imported only for engines of `--runtime tensorrt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.table import Table

from kvseek.builder.checkpoints.checkpoint import Checkpoint
from kvseek.builder.checkpoints.weights import WeightFormat, total_size, write_weights
from kvseek.builder.printing import Advance
from kvseek.core.config import EngineConfig


class WeightStorage(Protocol):
    """Writes the weights of one engine, and knows beforehand what that takes."""

    @property
    def task(self) -> str:
        """Name of the writing in the progress bar."""

    @property
    def steps(self) -> int:
        """Sum of the numbers that `write` calls `advance` with."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in the memory of a loaded engine."""

    @property
    def disk_bytes(self) -> int:
        """Most bytes that `write` writes."""

    @property
    def memory_bytes(self) -> int:
        """Most bytes of host memory that `write` holds, beside one weight on its way from the checkpoint."""

    @property
    def notes(self) -> Sequence[str]:
        """Notes for the reader of `--plan` on what its numbers contain."""

    def versions(self) -> dict[str, str]:
        """Return versions of other packages that the files depend on; raises KernelError if such a package is missing."""

    def write(self, checkpoint: Checkpoint, directory: Path, advance: Advance) -> None:
        """Write the weights into `directory`; raises ConfigError on a faulty checkpoint, KernelError as TensorRT fails."""

    def describe(self, directory: Path) -> dict[str, Any] | None:
        """Describe TensorRT plans for `--inspect`, as JSON values; None without plans."""

    def tables(self, directory: Path) -> Sequence[Table]:
        """Make tables of the same description, to be printed."""


def weight_storage(config: EngineConfig) -> WeightStorage:
    """Choose the storage of an engine's weights."""
    if config.runtime == "tensorrt":
        from kvseek.builder.tensorrt.storage import PlanStorage

        return PlanStorage(config)
    return SafetensorsStorage(config)


@dataclass(frozen=True)
class SafetensorsStorage:
    """Weights in safetensors shards (checkpoints/weights.py), which the engine maps and uses in place."""

    config: EngineConfig
    task: str = "fuse, write weights"
    memory_bytes: int = 0
    notes: Sequence[str] = ()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in all ranks, quantised ones with their scales."""
        return total_size(self.config.model, WeightFormat.of(self.config), self.config.tp_size)

    @property
    def steps(self) -> int:
        """Number of bytes before they are divided among ranks, because `write` advances by these."""
        return total_size(self.config.model, WeightFormat.of(self.config))

    @property
    def disk_bytes(self) -> int:
        """Bytes of the weights, without headers, which builder/preflight.py counts for every storage."""
        return self.weight_bytes

    def versions(self) -> dict[str, str]:
        """Return nothing, because kvseek writes the files itself."""
        return {}

    def write(self, checkpoint: Checkpoint, directory: Path, advance: Advance) -> None:
        """Fuse, convert and write one weight at a time; raises as `write_weights`."""
        own = WeightFormat.of(self.config)
        write_weights(checkpoint, directory, own, progress=advance, tp_size=self.config.tp_size)

    def describe(self, directory: Path) -> None:
        """There are no plans."""

    def tables(self, directory: Path) -> Sequence[Table]:
        """None."""
        return ()
