"""Costs of a decode step with dense attention."""

from __future__ import annotations

from kvseek.core.model_config import ModelConfig
from kvseek.plugins.measurements import SelectionCosts

from .method import Config


def costs(config: Config, model: ModelConfig, length: int, itemsize: int) -> SelectionCosts:
    """Compute the costs: every layer reads every row; there is no index."""
    return SelectionCosts(rows=length, dense_layers=model.num_layers)
