"""What a decode step of dense attention moves."""

from __future__ import annotations

from kvseek.core.config import EXTENT_TOKENS, ModelConfig
from kvseek.plugins.measurements.costs import SelectionCosts

from .config import Config


def costs(config: Config, model: ModelConfig, length: int, itemsize: int) -> SelectionCosts:
    """Every row, an extent's side by side, in every layer; no index."""
    return SelectionCosts(rows=length, neighbours=EXTENT_TOKENS, dense_layers=model.num_layers)
