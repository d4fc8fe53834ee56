"""The entry point of this folder: TensorRT plans as what holds an engine's weights (builder/weight_storage.py).

Only building loads TensorRT's module. What plans take, and what `--inspect` says of them, is told without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from kvseek.builder.checkpoints.checkpoint import Checkpoint
from kvseek.builder.checkpoints.weights import WeightFormat, weight_reader
from kvseek.builder.printing import Advance
from kvseek.core.config import EngineConfig

from .api import load_tensorrt
from .inspection import plan_tables, read_plans
from .plans import write_plans
from .sizes import angle_bytes, largest_plan, plan_count, weight_bytes

# Of a plan's constants: the network's, TensorRT's and the plan's (Llama-3.1-8B in segments: 4.7 GB for 1.4).
PLAN_COPIES = 3
PLAN_BYTES = 1 << 20  # of a plan, beside its constants (TensorRT for RTX: 0.4 to 0.7 MB)


@dataclass(frozen=True)
class PlanStorage:
    """Weights as constants of TensorRT plans. Methods and properties are those of WeightStorage."""

    config: EngineConfig
    task: str = "build TensorRT plans"

    @property
    def steps(self) -> int:
        """Number of plans."""
        return plan_count(self.config)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of all plans."""
        return weight_bytes(self.config)

    @property
    def disk_bytes(self) -> int:
        """Weights, the table of cosines and sines, and the plans' code."""
        return self.weight_bytes + angle_bytes(self.config) + PLAN_BYTES * self.steps

    @property
    def memory_bytes(self) -> int:
        """Copies of the constants of the largest plan: one plan is built at a time."""
        return PLAN_COPIES * largest_plan(self.config)

    @property
    def notes(self) -> Sequence[str]:
        """What is counted twice, and what is not counted."""
        copied = self.config.model.tie_word_embeddings and self.steps > 1
        return (
            f"Weights are those of the TensorRT plans{', the tied embedding twice' * copied}.",
            "Not counted: the plans' tables of cosines and sines and their code, and memory of TensorRT's execution contexts.",
        )

    def versions(self) -> dict[str, str]:
        """TensorRT's version, for plans run with the version alone that built them."""
        return {"tensorrt_version": load_tensorrt(self.config.tensorrt.module).__version__}

    def write(self, checkpoint: Checkpoint, directory: Path, advance: Advance) -> None:
        """Build and write the plans; raises as `write_plans`, and ConfigError as `weight_reader`."""
        reader = weight_reader(checkpoint, WeightFormat.of(self.config).dtype)
        write_plans(load_tensorrt(self.config.tensorrt.module), self.config, reader, directory, advance)

    def describe(self, directory: Path) -> dict[str, Any]:
        """Contents of rank0.plans.json; raises EngineDirectoryError if it is missing or malformed."""
        return read_plans(directory)

    def tables(self, directory: Path) -> Sequence[Table]:
        """What the plans were built with and for, and their files with inputs and outputs."""
        return plan_tables(read_plans(directory))
