"""How an engine directory holds the model's weights: as safetensors, or inside of TensorRT plans.

This file is the only door to builder/tensorrt/, which is imported for engines of `--runtime tensorrt` alone.
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
        """What the progress bar calls the writing."""

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
        """What a reader of `--plan` must know to trust the numbers."""

    def versions(self) -> dict[str, str]:
        """What the files depend on beside the build's options and kvseek; raises KernelError if it is not installed."""

    def write(self, checkpoint: Checkpoint, directory: Path, advance: Advance) -> None:
        """Write the weights into `directory`; raises ConfigError on a faulty checkpoint, KernelError as TensorRT fails."""

    def describe(self, directory: Path) -> dict[str, Any] | None:
        """What `--inspect` tells of TensorRT plans, as JSON values; None without plans."""

    def tables(self, directory: Path) -> Sequence[Table]:
        """The same to be printed."""


def weight_storage(config: EngineConfig) -> WeightStorage:
    """How an engine of this configuration holds its weights."""
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
        """Bytes of all weights, quantised ones with their scales."""
        return total_size(self.config.model, WeightFormat.of(self.config))

    @property
    def steps(self) -> int:
        """Bytes, too."""
        return self.weight_bytes

    @property
    def disk_bytes(self) -> int:
        """Headers aside, which builder/preflight.py counts for every storage."""
        return self.weight_bytes

    def versions(self) -> dict[str, str]:
        """Nothing: kvseek writes the files itself."""
        return {}

    def write(self, checkpoint: Checkpoint, directory: Path, advance: Advance) -> None:
        """Fuse, convert and write one weight at a time; raises as `write_weights`."""
        write_weights(checkpoint, directory, WeightFormat.of(self.config), progress=advance)

    def describe(self, directory: Path) -> None:
        """There are no plans."""

    def tables(self, directory: Path) -> Sequence[Table]:
        """None."""
        return ()
