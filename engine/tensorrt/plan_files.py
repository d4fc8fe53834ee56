"""Writes and reads rank0.plans.json, the index of an engine directory's TensorRT plans."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from kvseek.core.batch import buckets_for
from kvseek.core.config import EngineConfig
from kvseek.core.errors import ConfigError, EngineDirectoryError, from_dict, require
from kvseek.core.tensorrt_api import PACKAGES

PLANS_FILE = "rank0.plans.json"
REBUILD = "build the engine again"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a dynamic dimension: plans admit `minimum` to `maximum`, and are fastest at `optimum`."""

    minimum: int
    optimum: int
    maximum: int

    def __post_init__(self) -> None:
        ordered = 1 <= self.minimum <= self.optimum <= self.maximum
        limit = "1 <= minimum <= optimum <= maximum"
        require(ordered, "sizes", (self.minimum, self.optimum, self.maximum), limit, "check the engine's limits")


@dataclass(frozen=True)
class PlanLimits:
    """Sizes of the plans' dynamic dimensions: the tokens of a call, and the tokens (`rows`) whose logits it computes."""

    tokens: Sizes
    rows: Sizes


@dataclass(frozen=True)
class PlanEntry:
    """One plan: its file, relative to the engine directory, and its tensors by name, each with `dtype` and `shape`."""

    file: str
    inputs: dict[str, Any]
    outputs: dict[str, Any]


@dataclass(frozen=True)
class PlanIndex:
    """Contents of rank0.plans.json.

    Attributes
    ----------
    module, version : str
        Module and version of the TensorRT that built the plans, which run with no other version.
    form : str
        "engine": one plan; "segments": one more than the model has layers.
    """

    module: str
    version: str
    form: str
    dtype: str
    max_seq_len: int
    limits: PlanLimits
    segments: tuple[PlanEntry, ...]


def parse_plan_index(directory: Path) -> PlanIndex:
    """Read the index of a directory's plans, checking nothing else; raises EngineDirectoryError if missing or malformed."""
    path = directory / PLANS_FILE
    try:
        return from_dict(PlanIndex, json.loads(path.read_text(encoding="utf-8")), PLANS_FILE)
    except FileNotFoundError:
        raise EngineDirectoryError(f"{path} is missing; {REBUILD}, or copy all of its files") from None
    except (ValueError, TypeError, AttributeError, ConfigError) as error:  # no JSON, no UTF-8, no object, other fields
        raise EngineDirectoryError(f"{path} is corrupt ({error}); {REBUILD}") from None


def read_plan_index(directory: Path, config: EngineConfig) -> PlanIndex:
    """Read the index of an engine's plans, and check that they were built for that engine.

    Raises
    ------
    EngineDirectoryError
        If the index is missing, malformed or of another engine than `config`, if the plans are too small for that engine, or a
        plan is missing.
    """
    path, index = directory / PLANS_FILE, parse_plan_index(directory)
    _check_origin(path, index, config)
    _check_limits(path, index, config)
    for entry in index.segments:
        if not (directory / entry.file).is_file():
            raise EngineDirectoryError(f"{directory / entry.file} is missing; {REBUILD}, or copy all of its files")
    return index


def write_plan_index(directory: Path, index: PlanIndex) -> None:
    """Write rank0.plans.json."""
    (directory / PLANS_FILE).write_text(json.dumps(asdict(index), indent=2) + "\n", encoding="utf-8")


def check_version(index: PlanIndex, api: ModuleType) -> None:
    """Raise EngineDirectoryError unless the installed version of TensorRT built the plans."""
    if index.version != api.__version__:
        raise EngineDirectoryError(
            f"{PLANS_FILE}: version = {index.version!r}: must be {api.__version__!r}, that of the installed {api.__name__}: a "
            f"plan runs with the version that built it; pip install {PACKAGES[index.module]}=={index.version}, or {REBUILD}"
        )


def _check_origin(path: Path, index: PlanIndex, config: EngineConfig) -> None:
    plans = 1 if config.tensorrt.form == "engine" else config.model.num_layers + 1
    facts = {
        "module": (index.module, config.tensorrt.module),
        "form": (index.form, config.tensorrt.form),
        "dtype": (index.dtype, config.dtype),
        "max_seq_len": (index.max_seq_len, config.max_seq_len),
        "number of segments": (len(index.segments), plans),
    }
    for name, (found, wanted) in facts.items():
        if found != wanted:
            raise EngineDirectoryError(
                f"{path}: {name} = {found!r}: must be {wanted!r}, by the engine's configuration; {REBUILD}"
            )


def _check_limits(path: Path, index: PlanIndex, config: EngineConfig) -> None:
    bucket = buckets_for(config.max_batch_size)[-1]
    longest = config.max_input_len
    if config.tensorrt.form == "segments":
        longest = min(config.prefill_chunk_tokens, longest)
    for name, sizes, most in (
        ("tokens", index.limits.tokens, max(bucket, longest)),
        ("rows", index.limits.rows, bucket),
    ):
        if not (sizes.minimum <= 1 and most <= sizes.maximum):
            found = (sizes.minimum, sizes.maximum)
            raise EngineDirectoryError(
                f"{path}: limits.{name} = {found}: must hold 1 to {most}, what prompts and decode steps take; {REBUILD}"
            )
