"""What a decode step of ClusterKV moves, as the benchmark's floor model reads it (plugins/measurements/costs.py)."""

from __future__ import annotations

from kvseek.core.config import ModelConfig
from kvseek.plugins.measurements.costs import SelectionCosts

from .config import Config

KERNELS = 2  # score, choose
NUMBER = 4  # bytes of a score, a size, a start, a place
CACHE_BYTES = 2 * 16  # of a cluster taken: where the store holds it, read and written
ENTRY_BYTES = 4 * NUMBER  # of a row: its place read; place, cached row and kept row written


def costs(config: Config, model: ModelConfig, length: int, itemsize: int) -> SelectionCosts:
    """Costs per request, layer and KV head.

    Rows count as read from the pool: how many of them the last steps' rows spare shows only in a run
    (CudaIndex.hit_rate). Generated tokens are taken to be clustered as a prompt's are, which holds for the defaults.
    """
    rows, clusters = min(config.top_k, length), config.prompt_clusters(length)
    lanes = 1 if config.group_reduce == "mean" else model.group_size
    taken = -(-rows * clusters // length) if length else 0
    return SelectionCosts(
        rows=rows,
        index_bytes=clusters * (model.head_dim * itemsize + 2 * NUMBER),  # both kernels read the sizes
        rerank_bytes=clusters * 2 * NUMBER * lanes + taken * (NUMBER + CACHE_BYTES) + rows * ENTRY_BYTES,
        kernels=KERNELS,
        dense_layers=config.dense_layers,
    )
