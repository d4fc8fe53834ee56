"""Loads costs.py and stages.py of methods' folders, which are for measurements and which the engine never uses."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, cast

from torch import Tensor

from kvseek.core.config import ModelConfig
from kvseek.plugins.contract import Index
from kvseek.plugins.measurements.costs import SelectionCosts
from kvseek.plugins.measurements.stages import Stages
from kvseek.plugins.registry import get_method

Costs = Callable[[Any, ModelConfig, int, int], SelectionCosts]
StagesOf = Callable[[Index, Tensor, int], Stages]


def costs_of(method: str) -> Costs | None:
    """Return the function for a decode step's costs (plugins/measurements/costs.py); None if the method has none.

    Raises ConfigError for an unknown method.
    """
    return cast("Costs | None", _offer(method, "costs"))


def stages_of(method: str) -> StagesOf | None:
    """Return the function for a selection's stages (plugins/measurements/stages.py); None if the method has none.

    Raises ConfigError for an unknown method.
    """
    return cast("StagesOf | None", _offer(method, "stages"))


def _offer(method: str, name: str) -> Any:
    """Import the function `name` of the module `name` in a method's folder, if there is one."""
    module = f"{get_method(method).package}.{name}"
    return getattr(importlib.import_module(module), name) if find_spec(module) else None
