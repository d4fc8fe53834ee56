"""What the machine can do at best, measured beside the results: plain reads, copies over the host link, products."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kvseek.bench.machine import PlainRead

from .floors import Rates

REPEATS = 9
HOST_BYTES = 1 << 30  # of a read of host memory: more than last-level caches hold
LINK_BYTES = 256 << 20  # of a copy to the device
PRODUCT_ROWS = 8192


class Probe:
    """Measures rates on one GPU; that of host memory once, as neither memory nor cores change in a run."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._source = device, torch.ones(LINK_BYTES, dtype=torch.uint8).pin_memory()
        self._host_memory = host_memory_rate(HOST_BYTES)

    def rates(self, memory: Tensor) -> Rates:
        """All rates at this moment; `memory` is read (contiguous, on the device; give gigabytes)."""
        numbers = memory.view(-1).view(
            torch.int32
        )  # integers, because a sum of floats is limited by the latency of additions
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
