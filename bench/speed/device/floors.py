"""What a decode step has to move, by model, and the time that this takes at least at rates that are measured in the same run.

Rates are those of plain reads, copies over the host link, large products.
Methods say what their selection moves (plugins/measurements.py). The floor adds up the parts as if each waited for the one
before: matrices, scan of the index, rerank, rows from the device at the rate of a plain read; rows in host memory at that of the
host link, or of host memory where host cores read them. Rows that the device kept from earlier steps count as rows from the
device. Single rows come slower than the link's rate, and launches cost time too: no step can beat its floor, few come near it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from kvseek.bench import methods
from kvseek.bench.machine import PlainRead
from kvseek.bench.speed.shapes import matrix_bytes
from kvseek.core.config import EngineConfig
from kvseek.core.errors import ConfigError
from kvseek.engine.cache.memory_layout import part_bytes, slot_state_bytes
from kvseek.plugins.measurements import SelectionCosts
from kvseek.plugins.registry import get_method

REPEATS = 9
READ_BYTES = 1 << 30  # of a read of device memory: many times what the L2 cache holds
HOST_BYTES = 1 << 30  # of a read of host memory: more than last-level caches hold
LINK_BYTES = 256 << 20  # of a copy to the device
PRODUCT_ROWS = 8192


@dataclass(frozen=True)
class Rates:
    """Bytes per second, measured in the run: a plain read of device memory, copies over the host link, host cores' reads."""

    read: float
    host_link: float
    host_memory: float


@dataclass(frozen=True)
class Work:
    """Bytes that one decode step moves, by part."""

    weights: float
    states: float = 0.0  # of layers that keep no rows
    scan: float = 0.0
    rerank: float = 0.0
    device_rows: float = 0.0
    host_rows: float = 0.0  # and keys of rows, over the host link
    host_cores: float = 0.0  # the same, read by host cores

    def bytes_by_part(self) -> dict[str, float]:
        """Bytes of each part of the step."""
        return asdict(self)

    def floor(self, rates: Rates) -> dict[str, float]:
        """Seconds by part, and in all."""
        own = {"host_rows": rates.host_link, "host_cores": rates.host_memory}
        seconds = {part: moved / own.get(part, rates.read) for part, moved in self.bytes_by_part().items()}
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
    costs = methods.costs_of(config.method)
    if costs is None:
        raise ConfigError(
            f"--methods: {config.method!r}: must say what its step moves; write costs of plugins/{config.method}/measurements.py "
            "(plugins/measurements.py), or leave it out"
        )
    settings = get_method(config.method).configure(config.method_config)
    return costs(settings, config.model, length, itemsize)


def work(config: EngineConfig, step: Step, itemsize: int) -> Work:
    """What a step moves; raises ConfigError for a method that does not say it."""
    costs, model = costs_of(config, step.retrieval, itemsize), config.model
    layers = len(model.row_layers)
    window_row, row = (
        2 * size for size in (model.head_dim * itemsize, part_bytes(config.cache, model.head_dim, itemsize))
    )
    dense = min(costs.dense_layers, layers)
    dense_on_host = max(0, dense - (layers - step.host_layers))
    selecting, on_host = layers - dense, step.host_layers - dense_on_host
    heads = step.batch * model.num_kv_heads
    at_home = heads * costs.rows * (selecting - on_host * (1 - step.hit_rate))
    at_home += heads * step.retrieval * (dense - dense_on_host)
    keys = heads * costs.reranked_keys  # a key is half a row
    away = (heads * costs.rows * (1 - step.hit_rate) + keys / 2) * on_host * row
    whole = heads * dense_on_host * step.retrieval * row
    passes = 1.0 if model.window_layers else 2.0  # a ring is read; a step writes one row of it
    return Work(
        weights=float(matrix_bytes(config, step.batch)),
        states=passes * step.batch * slot_state_bytes(model, getattr(torch, config.dtype), 0),
        scan=heads * selecting * costs.index_bytes,
        rerank=heads * selecting * costs.rerank_bytes + keys * (selecting - on_host) * row / 2,
        device_rows=at_home * row + heads * step.window * layers * window_row,
        host_rows=whole + (0 if costs.host_cores else away),
        host_cores=away if costs.host_cores else 0,
    )


class Probe:
    """Measures rates on one GPU; that of host memory once, as neither memory nor cores change in a run."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._source = device, torch.ones(LINK_BYTES, dtype=torch.uint8).pin_memory()
        self._host_memory = host_memory_rate(HOST_BYTES)

    def rates(self) -> Rates:
        """All rates at this moment. READ_BYTES of the work space are taken for it."""
        # Integers, because a sum of floats is limited by the latency of additions.
        numbers = torch.zeros(READ_BYTES // 4, dtype=torch.int32, device=self._device)
        target = torch.empty_like(self._source, device=self._device)
        link = seconds(lambda: target.copy_(self._source, non_blocking=True))
        read = numbers.nbytes / seconds(lambda: numbers.sum(dtype=torch.int32))
        return Rates(read=read, host_link=LINK_BYTES / link, host_memory=self._host_memory)


def host_memory_rate(size: int) -> float:
    """Bytes per second that PyTorch's threads read in host memory, the median; one read goes before, uncounted."""
    read, times = PlainRead(size), list[float]()
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        read()
        times.append(time.perf_counter() - start)
    return size / statistics.median(times[1:])


def seconds(call: Callable[[], object]) -> float:
    """Median device seconds of a call, over repeats, by CUDA events; one call goes before, uncounted."""
    call()
    times = []
    for _ in range(REPEATS):
        start, end = timing_event(), timing_event()
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(elapsed_seconds(start, end))
    return statistics.median(times)


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large square matrix product, which neither memory nor launches hold up."""
    left, right = torch.randn(2, PRODUCT_ROWS, PRODUCT_ROWS, device=device).to(dtype)
    return 2 * PRODUCT_ROWS**3 / seconds(lambda: left @ right)


def timing_event(in_graph: bool = False) -> torch.cuda.Event:
    """An event with a time; `in_graph`: a captured record becomes a node, and every replay sets the time anew."""
    return torch.cuda.Event(enable_timing=True, external=in_graph)  # type: ignore[no-untyped-call]


def elapsed_seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    """Device seconds from one event to another; the device must have passed both."""
    return float(start.elapsed_time(end)) * 1e-3
