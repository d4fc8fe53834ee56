"""What a decode step has to move, by model, and the time that this takes at the rates measured in the same run.

Methods say what their selection moves (plugins/measurements/costs.py). The floor adds up the parts as if each waited for the one
before: matrices, scan of the index, rerank, rows from the device, rows from the host, nodes of the graph. Rows that the
device kept from earlier steps count as rows from the device.

Rows in host memory cost what they are read at: single rows at the rate of a gather, pages at that of a gather of pages,
rows that host cores read at the bandwidth of host memory, plus a host-function node in each layer.

The part of the nodes is no bound: it counts nodes without overlap, while most kernels of a step start before the last one
has ended (programmatic dependent launch), so a step may beat it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvseek.benchmarks.shapes import matrix_bytes
from kvseek.core.config import EngineConfig
from kvseek.core.errors import ConfigError
from kvseek.measurement import offers
from kvseek.plugins.measurements.costs import SelectionCosts
from kvseek.plugins.registry import get_method

# A layer: two norms, four matrix products, one of them with the activation, rotation, attention.
COMMON_NODES = 8
DEVICE_PARTS = ("weights", "scan", "rerank", "device_rows")  # of Work: bytes read at the rate of a plain read
STEP_NODES = 4  # embedding, last norm, output head, best token


@dataclass(frozen=True)
class Rates:
    """Measured in the run.

    Attributes
    ----------
    read : float
        Bytes per second of a plain read of device memory.
    host_rows : float
        Random rows per second that the GPU reads from the row pool.
    host_pages : float
        Bytes per second of random pages of PAGE_ROWS rows, likewise.
    host_memory : float
        Bytes per second that all host cores read from host memory.
    node, host_function : float
        Seconds of a kernel node without overlap, and of a host-function node, in a graph.
    """

    read: float
    host_rows: float
    host_pages: float
    host_memory: float
    node: float
    host_function: float


@dataclass(frozen=True)
class Work:
    """What one decode step moves: bytes, by part; rows that are read one by one; and graph nodes."""

    weights: float
    scan: float = 0.0
    rerank: float = 0.0
    device_rows: float = 0.0
    host_rows: float = 0.0  # rows, or keys of rows, that the GPU reads one by one from host memory
    host_row_bytes: float = 0.0  # of all of them
    host_page_bytes: float = 0.0
    host_core_bytes: float = 0.0
    nodes: int = 0
    host_functions: int = 0

    def bytes_by_part(self) -> dict[str, float]:
        """Bytes of each part of the step."""
        on_device = {name: getattr(self, name) for name in DEVICE_PARTS}
        on_host = {"host_rows": self.host_row_bytes, "host_pages": self.host_page_bytes}
        return {**on_device, **on_host, "host_cores": self.host_core_bytes}

    def floor(self, rates: Rates) -> dict[str, float]:
        """Seconds by part, and in all."""
        seconds = {name: getattr(self, name) / rates.read for name in DEVICE_PARTS}
        seconds["host_rows"] = self.host_rows / rates.host_rows
        seconds["host_pages"] = self.host_page_bytes / rates.host_pages
        seconds["host_cores"] = self.host_core_bytes / rates.host_memory
        seconds["nodes"] = self.nodes * rates.node
        seconds["host_functions"] = self.host_functions * rates.host_function
        return {**seconds, "total": sum(seconds.values())}


@dataclass(frozen=True)
class Step:
    """A decode step of one method: tokens in the retrieval region and in the window, requests, and where rows lie."""

    retrieval: int
    window: int
    batch: int
    host_layers: int  # the last ones
    hit_rate: float = 0.0  # selected rows that the device kept from earlier steps

    def __post_init__(self) -> None:
        if not 0 <= self.hit_rate <= 1:
            raise ConfigError(f"hit_rate = {self.hit_rate}: must be between 0 and 1; it is a share of the rows")


def costs_of(config: EngineConfig, length: int, itemsize: int) -> SelectionCosts:
    """What the method's selection moves; raises ConfigError for a method that does not say it."""
    costs = offers.costs_of(config.method)
    if costs is None:
        raise ConfigError(
            f"--methods: {config.method!r}: must say what its step moves; write plugins/{config.method}/costs.py "
            "(plugins/measurements/costs.py), or leave it out"
        )
    settings = get_method(config.method).configure(config.method_config)
    return costs(settings, config.model, length, itemsize)


def work(config: EngineConfig, step: Step, itemsize: int) -> Work:
    """What a step moves; raises ConfigError for a method that does not say it."""
    costs, model = costs_of(config, step.retrieval, itemsize), config.model
    row = 2 * model.head_dim * itemsize
    dense = min(costs.dense_layers, model.num_layers)
    dense_on_host = max(0, dense - (model.num_layers - step.host_layers))
    selecting, on_host = model.num_layers - dense, step.host_layers - dense_on_host
    heads = step.batch * model.num_kv_heads
    at_home = heads * costs.rows * (selecting - on_host * (1 - step.hit_rate))
    at_home += heads * (step.window * model.num_layers + step.retrieval * (dense - dense_on_host))
    keys_at_home = heads * costs.reranked_keys * (selecting - on_host) * row / 2
    nodes = model.num_layers * COMMON_NODES + selecting * costs.kernels + STEP_NODES
    return Work(
        weights=float(matrix_bytes(config)),
        scan=heads * selecting * costs.index_bytes,
        rerank=heads * selecting * costs.rerank_bytes + keys_at_home,
        device_rows=at_home * row,
        **_host_parts(costs, heads * on_host, row, step.hit_rate, float(heads * dense_on_host * step.retrieval * row)),
        nodes=nodes,
        host_functions=on_host * costs.host_functions,
    )


def _host_parts(costs: SelectionCosts, lists: int, row: int, hit_rate: float, dense_bytes: float) -> dict[str, float]:
    """What `lists` KV heads and requests, of layers whose rows lie in host memory, read there; dense layers read all.

    A reranked key is half a row; over PCIe it costs what a row does, which is a matter of requests and not of bytes.
    """
    rows = lists * costs.rows * (1 - hit_rate)
    keys = lists * costs.reranked_keys
    if costs.host_cores:
        return {"host_core_bytes": rows * row + keys * row / 2, "host_page_bytes": dense_bytes}
    if costs.neighbours > 1:
        return {"host_page_bytes": rows * row + dense_bytes, "host_rows": keys, "host_row_bytes": keys * row / 2}
    return {"host_rows": rows + keys, "host_row_bytes": rows * row + keys * row / 2, "host_page_bytes": dense_bytes}
