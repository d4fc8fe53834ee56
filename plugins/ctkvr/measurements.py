"""Costs of a CTkvr decode step on a GPU, for plugins/measurements.py."""

from __future__ import annotations

import math

from kvseek.core.model_config import ModelConfig
from kvseek.kernels.reference.codes.store import code_bytes
from kvseek.plugins.ctkvr.config import MOST_CENTROIDS, Config
from kvseek.plugins.measurements import SelectionCosts

OFFSET_BYTES = 4  # a centroid's product with the mean, per query head (build.py)
DEDUPLICATION = 0.5  # share of the probed places that are distinct: section 3.1.2, footnote: "0.5 or less"


def costs(config: Config, model: ModelConfig, length: int, itemsize: int) -> SelectionCosts:
    """Compute the costs for a region of `length` prompt tokens; recalled tokens that no list holds are not counted."""
    if length <= config.top_k:
        return SelectionCosts(rows=length)
    centroids = config.prompt_centroids(length, MOST_CENTROIDS)
    listed = min(config.probes, centroids) * config.list_width(length)
    recalled = min(length, max(config.top_k, math.ceil(DEDUPLICATION * listed)))
    return SelectionCosts(
        rows=config.top_k,
        index_bytes=centroids * model.group_size * (model.head_dim * itemsize + OFFSET_BYTES),
        rerank_bytes=4 * listed + (recalled * code_bytes(model.head_dim, config.bits) if config.bits else 0),
        reranked_keys=0 if config.bits else recalled,
        host_cores=config.execution == "cpu",
    )
