"""Costs of a PRKV decode step (plugins/measurements.py)."""

from __future__ import annotations

from kvseek.core.model_config import ModelConfig
from kvseek.kernels.reference.codes.rotation import padded_dim
from kvseek.kernels.reference.codes.store import code_bytes, mean_bytes
from kvseek.plugins.measurements import SelectionCosts
from kvseek.plugins.prkv.config import Config
from kvseek.plugins.prkv.summaries import CODE_BITS


def costs(config: Config, model: ModelConfig, length: int, itemsize: int) -> SelectionCosts:
    """Compute the costs: a box for each page, or codes of 2 bits a channel for each row; then the static rows and whole pages.

    Updates of the static set are left out, because they run beside the steps; what they delay is measured.
    """
    if length <= config.top_k:  # dense
        return SelectionCosts(float(length))
    if config.page_score == "box":
        index_bytes = (length - config.most_static) * 2 * model.head_dim * itemsize / config.page
    else:
        index_bytes = length * (code_bytes(model.head_dim, CODE_BITS) + mean_bytes(padded_dim(model.head_dim)))
    return SelectionCosts(
        rows=float(config.top_k),
        index_bytes=index_bytes,
        upkeep_steps=config.update_interval,
        upkeep_after=config.update_queries,
    )
