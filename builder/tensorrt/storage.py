"""The entry point of this folder: TensorRT plans as what holds an engine's weights (builder/weight_storage.py).

Only building loads TensorRT's module. What plans take, and what `--inspect` says of them, is told without it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor

from kvseek.builder.checkpoints.checkpoint import Checkpoint
from kvseek.builder.checkpoints.storage import WeightStorage
from kvseek.builder.checkpoints.weights import NONE_MEASURED, WeightFormat, weight_reader
from kvseek.builder.printing import Advance, Column, table
from kvseek.core.tensorrt_api import import_tensorrt
from kvseek.engine.tensorrt.plan_files import parse_plan_index

from .plans import angle_bytes, largest_plan, plan_count, weight_bytes, write_plans

# Of a plan's constants: the network's, TensorRT's and the plan's (Llama-3.1-8B in segments: 4.7 GB for 1.4).
PLAN_COPIES = 3
PLAN_BYTES = 1 << 20  # of a plan, beside its constants (TensorRT for RTX: 0.4 to 0.7 MB)


@dataclass(frozen=True)
class PlanStorage(WeightStorage):
    """Weights as constants of TensorRT plans."""

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
        return {"tensorrt_version": import_tensorrt(self.config.tensorrt.module).__version__}

    def write(
        self,
        checkpoint: Checkpoint,
        directory: Path,
        advance: Advance,
        importance: Mapping[str, Tensor] = NONE_MEASURED,
    ) -> None:
        """Build and write the plans, which round no weights; raises as `write_plans`, and ConfigError as `weight_reader`."""
        reader = weight_reader(checkpoint, WeightFormat.of(self.config).dtype)
        write_plans(import_tensorrt(self.config.tensorrt.module), self.config, reader, directory, advance)

    def describe(self, directory: Path) -> dict[str, Any]:
        """Contents of rank0.plans.json; raises EngineDirectoryError if it is missing or malformed."""
        return dataclasses.asdict(parse_plan_index(directory))

    def tables(self, directory: Path) -> Sequence[Table]:
        """What the plans were built with and for, and their files with inputs and outputs."""
        return plan_tables(self.describe(directory))


def plan_tables(plans: dict[str, Any]) -> tuple[Table, Table]:
    """What the plans were built with and for; and their files with inputs and outputs, those that are alike together."""
    sizes = [(f"{name} of a call", _range(plans["limits"][name])) for name in ("tokens", "rows")]
    about = [(name, str(plans[name])) for name in ("module", "version", "form", "dtype")]
    built = table("TensorRT", ("", "left"), ("value", "left"), rows=[*about, *sizes])
    alike = itertools.groupby(plans["segments"], lambda plan: (plan["inputs"], plan["outputs"]))
    rows = [(_files(list(group)), _tensors(inputs), _tensors(outputs)) for (inputs, outputs), group in alike]
    columns: tuple[Column, ...] = (("plan", "left"), ("inputs", "left"), ("outputs", "left"))
    return built, table("Plans, * dynamic", *columns, rows=rows)


def _range(sizes: dict[str, int]) -> str:
    return f"{sizes['minimum']:,} to {sizes['maximum']:,}, best at {sizes['optimum']:,}"


def _files(plans: Sequence[dict[str, Any]]) -> str:
    first, last = plans[0]["file"], plans[-1]["file"]
    return str(first) if first == last else f"{first}\nto {last}"


def _tensors(tensors: dict[str, dict[str, Any]]) -> str:
    """Tensors a line each: name, dtype, shape."""

    def line(name: str, tensor: dict[str, Any]) -> str:
        shape = ", ".join("*" if size == -1 else f"{size}" for size in tensor["shape"])
        return f"{name} {tensor['dtype']} [{shape}]"

    return "\n".join(line(name, tensor) for name, tensor in tensors.items())
