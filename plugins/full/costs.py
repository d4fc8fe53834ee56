"""Costs of a decode step with dense attention."""

from __future__ import annotations

from kvseek.core.config import EXTENT_TOKENS, ModelConfig
from kvseek.plugins.measurements.costs import SelectionCosts

from .config import Config


def costs(config: Config, model: ModelConfig, length: int, itemsize: int) -> SelectionCosts:
    """Compute the costs: every layer reads every row, 1,024 neighbouring rows of an extent at a time; there is no index."""
    return SelectionCosts(rows=length, neighbours=EXTENT_TOKENS, dense_layers=model.num_layers)
