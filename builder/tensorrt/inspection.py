"""What `kvseek build --inspect` says of an engine's TensorRT plans, from rank0.plans.json alone: no TensorRT is needed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from kvseek.builder.printing import Column, table
from kvseek.engine.tensorrt.plan_files import parse_plan_index


def read_plans(directory: Path) -> dict[str, Any]:
    """Contents of rank0.plans.json; raises EngineDirectoryError if it is missing or malformed."""
    return dataclasses.asdict(parse_plan_index(directory))


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
