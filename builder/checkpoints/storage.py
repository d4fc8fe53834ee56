"""The storage of an engine's weights: what writing takes, and the writing. Here as safetensors shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor

from kvseek.builder.printing import Advance
from kvseek.core.config import EngineConfig

from .checkpoint import Checkpoint
from .weights import NONE_MEASURED, WeightFormat, total_size, write_weights


@dataclass(frozen=True)
class WeightStorage:
    """Writes the weights of one engine, and knows beforehand what that takes.

    Here they are safetensors shards (weights.py), which the engine maps and uses in place; PlanStorage of
    builder/tensorrt/storage.py overrides all.

    Attributes
    ----------
    task : str
        Name of the writing in the progress bar.
    """

    config: EngineConfig
    task: str = "fuse, write weights"

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in the memory of a loaded engine, of all ranks; quantised ones with their scales."""
        return total_size(self.config.model, WeightFormat.of(self.config), self.config.tp_size)

    @property
    def steps(self) -> int:
        """Sum of the numbers that `write` calls `advance` with: here of bytes before they are divided among ranks."""
        return total_size(self.config.model, WeightFormat.of(self.config))

    @property
    def disk_bytes(self) -> int:
        """Most bytes that `write` writes, without headers, which builder/preflight.py counts for every storage."""
        return self.weight_bytes

    @property
    def memory_bytes(self) -> int:
        """Most bytes of host memory that `write` holds, beside one weight on its way from the checkpoint."""
        return 0

    @property
    def notes(self) -> Sequence[str]:
        """Notes for the reader of `--plan` on what its numbers contain."""
        return ()

    def versions(self) -> dict[str, str]:
        """Return versions of other packages that the files depend on; raises KernelError if such a package is missing."""
        return {}

    def write(
        self,
        checkpoint: Checkpoint,
        directory: Path,
        advance: Advance,
        importance: Mapping[str, Tensor] = NONE_MEASURED,
    ) -> None:
        """Write the weights into `directory`; raises ConfigError on a faulty checkpoint, KernelError as TensorRT fails.

        `importance` is that of `write_weights`.
        """
        own, ranks = WeightFormat.of(self.config), self.config.tp_size
        write_weights(checkpoint, directory, own, progress=advance, tp_size=ranks, importance=importance)

    def describe(self, directory: Path) -> dict[str, Any] | None:
        """Describe TensorRT plans for `--inspect`, as JSON values; None without plans."""
        return None

    def tables(self, directory: Path) -> Sequence[Table]:
        """Make tables of the same description, to be printed."""
        return ()
