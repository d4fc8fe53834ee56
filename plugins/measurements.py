"""What a method says of itself for measurements, in measurements.py of its folder.

`costs(config, model, length, itemsize) -> SelectionCosts` are those of a decode step beside the matrices, over a retrieval region
of `length` tokens, for the benchmark's floor model (bench/speed/device/floors.py); `itemsize` is the bytes of a number of the row
pool. All counts are for one request, one layer and one KV head, computed from a model and not counted in a run. Layers that
attend densely cost as much as with dense attention.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SelectionCosts:
    """Costs of choosing rows of a retrieval region and of attending to them.

    Attributes
    ----------
    rows : float
        Retrieval rows attended to.
    index_bytes : float
        Bytes of the index in device memory that every step reads.
    rerank_bytes : float
        Further bytes of device memory that are read to choose rows.
    reranked_keys : float
        Keys that are read from the row pool to choose rows.
    host_cores : bool
        Whether rows and reranked keys in host memory are read by host cores, not over PCIe.
    dense_layers : int
        Number of first layers that attend densely.
    upkeep_steps, upkeep_after : int
        Decode steps in which every layer does its upkeep once (`Index.refresh`), as soon as a request has done `upkeep_after`
        steps since its prompt. A benchmark times as many, after as many.
    """

    rows: float
    index_bytes: float = 0.0
    rerank_bytes: float = 0.0
    reranked_keys: float = 0.0
    host_cores: bool = False
    dense_layers: int = 0
    upkeep_steps: int = 1
    upkeep_after: int = 0
