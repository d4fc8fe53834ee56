"""What a decode step has to move, by model, and the time that this takes at the rates measured in the same run.

The floor adds up the parts as if each waited for the one before: matrices, scan of the index, rerank, rows from the device,
rows from the host, nodes of the graph. Rows that the device kept from the last step count as rows from the device.

The part of the nodes is no bound: it counts nodes without overlap, while most kernels of a step start before the last one
has ended (programmatic dependent launch), so a step may beat it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvseek.engine.config import EngineConfig
from kvseek.engine.errors import ConfigError
from kvseek.plugins.registry import get_method

from .shapes import matrix_parameters

# A layer: two norms, four matrix products, of which o and down add up parts (split-K), rotation, activation, attention.
COMMON_NODES = 11
SELECT_NODES = {"full": 0, "pariskv": 4}  # a layer: vote, scan, rerank, top
DEVICE_PARTS = ("weights", "scan", "rerank", "device_rows")  # of Work: bytes read at the rate of a plain read
STEP_NODES = 4  # embedding, last norm, output head, best token


@dataclass(frozen=True)
class Rates:
    """Measured in the run: bytes per second of a plain read, host rows per second, seconds of a node without overlap."""

    read: float
    host_rows: float
    node: float


@dataclass(frozen=True)
class Work:
    """What one decode step moves: bytes read on the device, by part, host rows, and graph nodes."""

    weights: float
    scan: float = 0.0
    rerank: float = 0.0
    device_rows: float = 0.0
    host_rows: float = 0.0  # a row is K and V of one token and KV head in one layer
    host_row_bytes: float = 0.0  # of one row
    nodes: int = 0

    def bytes_by_part(self) -> dict[str, float]:
        """Bytes of each part of the step."""
        on_device = {name: getattr(self, name) for name in DEVICE_PARTS}
        return {**on_device, "host_rows": self.host_rows * self.host_row_bytes}

    def floor(self, rates: Rates) -> dict[str, float]:
        """Seconds by part, and in all."""
        seconds = {name: getattr(self, name) / rates.read for name in DEVICE_PARTS}
        seconds["host_rows"] = self.host_rows / rates.host_rows if self.host_rows else 0.0
        seconds["nodes"] = self.nodes * rates.node
        return {**seconds, "total": sum(seconds.values())}


@dataclass(frozen=True)
class Step:
    """A decode step of one method: tokens in the retrieval region and in the window, requests, and where rows lie."""

    retrieval: int
    window: int
    batch: int
    host_layers: int
    hit_rate: float = 0.0  # selected rows that the device kept from the last step

    def __post_init__(self) -> None:
        if not 0 <= self.hit_rate <= 1:
            raise ConfigError(f"hit_rate = {self.hit_rate}: must be between 0 and 1; it is a share of the rows")


def work(config: EngineConfig, step: Step, itemsize: int) -> Work:
    """What a step moves; raises ConfigError for a method whose bytes nobody wrote down here."""
    if config.method not in WORK:
        raise ConfigError(
            f"--methods: {config.method!r}: must be one of {', '.join(WORK)}; write its bytes into floors.py"
        )
    index, selected = WORK[config.method](config, step)
    model = config.model
    row = 2 * model.head_dim * itemsize
    heads = step.batch * model.num_kv_heads
    on_host = heads * step.host_layers * selected
    on_device: float = heads * (model.num_layers - step.host_layers) * selected
    on_device += heads * model.num_layers * step.window + on_host * step.hit_rate
    nodes = model.num_layers * (COMMON_NODES + SELECT_NODES[config.method]) + STEP_NODES
    return Work(
        weights=float(matrix_parameters(model) * itemsize),
        scan=index.get("scan", 0.0),
        rerank=index.get("rerank", 0.0),
        device_rows=on_device * row,
        host_rows=on_host * (1 - step.hit_rate),
        host_row_bytes=float(row),
        nodes=nodes,
    )


def full_work(config: EngineConfig, step: Step) -> tuple[dict[str, float], int]:
    """Dense attention: no index, all rows."""
    return {}, step.retrieval


def pariskv_work(config: EngineConfig, step: Step) -> tuple[dict[str, float], int]:
    """ParisKV: an id byte of each block of every key; codes and weights of the candidates; top_k rows."""
    from kvseek.plugins.pariskv.config import Config

    settings = get_method(config.method).configure(config.method_config)
    assert isinstance(settings, Config)
    dim = 1 << (config.model.head_dim - 1).bit_length()
    blocks = dim // settings.block_size
    _, beta = settings.schedule(step.retrieval)
    candidates = min(step.retrieval, max(settings.top_k, math.ceil(beta * step.retrieval)))
    heads = config.model.num_layers * config.model.num_kv_heads * step.batch
    rerank = heads * candidates * (dim // 2 + 2 * blocks)
    return {"scan": float(heads * step.retrieval * blocks), "rerank": float(rerank)}, min(
        step.retrieval, settings.top_k
    )


WORK: dict[str, Callable[[EngineConfig, Step], tuple[dict[str, float], int]]] = {
    "full": full_work,
    "pariskv": pariskv_work,
}
