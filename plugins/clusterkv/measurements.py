"""Costs of a ClusterKV decode step, for plugins/measurements.py."""

from __future__ import annotations

from kvseek.core.model_config import ModelConfig
from kvseek.kernels.reference.codes.store import code_bytes
from kvseek.plugins.clusterkv.config import Config
from kvseek.plugins.measurements import SelectionCosts

NUMBER = 4  # bytes of a score, a size, a start, a place
ENTRY_BYTES = 2 * NUMBER  # for each row: its place is read and written


def costs(config: Config, model: ModelConfig, length: int, itemsize: int) -> SelectionCosts:
    """Compute the costs per request, layer and KV head.

    All rows count as read from the pool; how many of them are hot shows only in a run. Generated tokens count as
    if they were clustered like a prompt's, which holds for the defaults.
    """
    listed, clusters = min(config.rows_of_clusters, length), config.prompt_clusters(length)
    lanes = model.group_size
    taken = -(-listed * clusters // length) if length else 0
    numbers = 3 if config.spread_weight else 2  # both kernels read the sizes
    ranked_bytes = code_bytes(model.head_dim, config.rerank_bits) + 2 * NUMBER * lanes + ENTRY_BYTES
    return SelectionCosts(
        rows=min(config.top_k, length),
        index_bytes=clusters * (model.head_dim * itemsize + numbers * NUMBER),
        rerank_bytes=clusters * 2 * NUMBER * lanes
        + taken * NUMBER
        + listed * (ENTRY_BYTES + (ranked_bytes if config.rerank_bits else 0)),
        dense_layers=config.dense_layers,
    )
