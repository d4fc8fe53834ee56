"""What a method's decode step moves beside the matrices, as the benchmark's floor model reads it (benchmarks/device/floors.py).

`costs(config, model, length, itemsize) -> SelectionCosts`, in costs.py of a method's folder, is for a step over a
retrieval region of `length` tokens; `itemsize` is the bytes of a number of the row pool. All counts are for one request,
one layer and one KV head, by model and not by counter. A layer that attends densely counts as dense attention does.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SelectionCosts:
    """Costs of choosing rows of a retrieval region and of attending to them.

    Attributes
    ----------
    rows : float
        Retrieval rows attended to, wherever they lie.
    index_bytes : float
        Of the index, read from device memory by every step: what the method scans.
    rerank_bytes : float
        Further bytes of device memory that the choice reads.
    reranked_keys : float
        Keys of the row pool that the choice reads, where the pool lies.
    device_rows : float
        Of `rows`, those that the method always keeps on the device.
    neighbours : int
        Rows that lie next to each other in the pool and are read together: 1, or the size of a page.
    kernels : int
        Graph nodes of a layer that dense attention does not have.
    host_functions : int
        Host-function nodes of a layer whose rows lie in host memory.
    host_cores : bool
        Rows and reranked keys in host memory are read by host cores, not over PCIe.
    dense_layers : int
        First layers that attend densely.
    """

    rows: float
    index_bytes: float = 0.0
    rerank_bytes: float = 0.0
    reranked_keys: float = 0.0
    device_rows: float = 0.0
    neighbours: int = 1
    kernels: int = 0
    host_functions: int = 0
    host_cores: bool = False
    dense_layers: int = 0
