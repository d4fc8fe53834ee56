"""The methods: each folder of plugins/ that has a method.py. Nothing outside a method's folder names it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvseek.core.config import ModelConfig
from kvseek.core.errors import ConfigError
from kvseek.core.fields import from_dict

if TYPE_CHECKING:
    from torch import Tensor

    from kvseek.plugins.measurements.costs import SelectionCosts
    from kvseek.plugins.measurements.stages import Stages

    from .contract import Index, IndexContext


# Each folder offers config.py with `Config` (a frozen dataclass) and method.py with `create(context) -> Index` and
# `codebooks(config, head_dim) -> dict of tensors` (what the builder computes once; may be empty). config.py may offer
# CACHE_DEFAULTS, defaults of CacheConfig fields for the method; Config may have a field `dense_layers`, the first layers
# that attend densely: on a GPU their rows lie on the device, whatever cache.offload says. method.py may offer
# - `cuda_defines(config, head_dim, group_size) -> dict of integers`: macros of its GPU kernels (*.cu in its folder)
# - `costs(config, model, length, itemsize) -> SelectionCosts`: what a decode step moves (measurements/costs.py)
# - `needs_cpu_library(config) -> bool`: whether its index for the GPU calls compiled code of the CPU
# - `stages(index, query, slot) -> Stages`: which rows each stage of a selection keeps (measurements/stages.py).
def _scan() -> dict[str, str]:
    """Every folder beside this file that has a method.py, by its name. `full`, what the others are compared with, is first."""
    folders = {path.parent.name for path in Path(__file__).parent.glob("*/method.py")}
    return {name: f"kvseek.plugins.{name}" for name in sorted(folders, key=lambda name: (name != "full", name))}


METHODS: dict[str, str] = _scan()


@dataclass(frozen=True)
class Method:
    """A method's entry points, loaded on demand."""

    name: str
    package: str

    @property
    def config_class(self) -> type[Any]:
        """The frozen dataclass of the method's own fields."""
        return cast("type[Any]", importlib.import_module(f"{self.package}.config").Config)

    @property
    def cache_defaults(self) -> dict[str, Any]:
        """Defaults of CacheConfig fields where the method wants others than the engine's."""
        return cast("dict[str, Any]", getattr(importlib.import_module(f"{self.package}.config"), "CACHE_DEFAULTS", {}))

    def dense_layers(self, config: Any) -> int:
        """First layers that attend to every row."""
        return int(getattr(config, "dense_layers", 0))

    def configure(self, values: dict[str, Any]) -> Any:
        """Check `values` against the config class; raises ConfigError on unknown keys and bad values."""
        return from_dict(self.config_class, values, self.name)

    def codebooks(self, config: Any, head_dim: int) -> dict[str, Tensor]:
        """Compute what the builder stores beside the weights."""
        return cast("dict[str, Tensor]", importlib.import_module(f"{self.package}.method").codebooks(config, head_dim))

    def cuda_defines(self, config: Any, head_dim: int, group_size: int) -> dict[str, int]:
        """Macros that the method's GPU kernels are compiled with, beside those of builder/compile/cuda.py; may be none."""
        defines = self._offer("cuda_defines")
        return {} if defines is None else cast("dict[str, int]", defines(config, head_dim, group_size))

    def costs(self, config: Any, model: ModelConfig, length: int, itemsize: int) -> SelectionCosts | None:
        """What a decode step over a retrieval region of `length` tokens moves; None if nobody wrote it down.

        `itemsize` is the bytes of a number of the row pool.
        """
        costs = self._offer("costs")
        return None if costs is None else cast("SelectionCosts", costs(config, model, length, itemsize))

    def needs_cpu_library(self, config: Any) -> bool:
        """Whether the method's index for the GPU calls compiled code of the CPU (kernels/cpu.so)."""
        needs = self._offer("needs_cpu_library")
        return False if needs is None else bool(needs(config))

    def stages(self, index: Index, query: Tensor, slot: int) -> Stages | None:
        """What each stage of the selection for a query [H, D] keeps; None if the method does not tell.

        Changes nothing of `index`, which must be the reference: raises KernelError for one that the stages do not know.
        """
        stages = self._offer("stages")
        return None if stages is None else cast("Stages", stages(index, query, slot))

    def create(self, context: IndexContext) -> Index:
        """Make the index of one layer."""
        return cast("Index", importlib.import_module(f"{self.package}.method").create(context))

    def _offer(self, name: str) -> Any:
        return getattr(importlib.import_module(f"{self.package}.method"), name, None)


def get_method(name: str) -> Method:
    """Look a method up; raises ConfigError that lists the known ones."""
    if name not in METHODS:
        raise ConfigError(f"method = {name!r}: unknown; choose one of {', '.join(METHODS)}")
    return Method(name, METHODS[name])
