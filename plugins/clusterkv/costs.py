"""Costs of a ClusterKV decode step, for the benchmark's floor model (plugins/measurements/costs.py)."""

from __future__ import annotations

from kvseek.core.config import ModelConfig
from kvseek.plugins.measurements.costs import SelectionCosts

from .config import Config

KERNELS = 2  # score, choose
NUMBER = 4  # bytes of a score, a size, a start, a place
ENTRY_BYTES = 2 * NUMBER  # for each row: its place is read and written


def costs(config: Config, model: ModelConfig, length: int, itemsize: int) -> SelectionCosts:
    """Compute the costs per request, layer and KV head.

    All rows count as read from the pool; how many of them are hot shows only in a run. Generated tokens count as
    if they were clustered like a prompt's, which holds for the defaults.
    """
    rows, clusters = min(config.top_k, length), config.prompt_clusters(length)
    lanes = 1 if config.group_reduce == "mean" else model.group_size
    taken = -(-rows * clusters // length) if length else 0
    return SelectionCosts(
        rows=rows,
        index_bytes=clusters * (model.head_dim * itemsize + 2 * NUMBER),  # both kernels read the sizes
        rerank_bytes=clusters * 2 * NUMBER * lanes + taken * NUMBER + rows * ENTRY_BYTES,
        kernels=KERNELS,
        dense_layers=config.dense_layers,
    )
