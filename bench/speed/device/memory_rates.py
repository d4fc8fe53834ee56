"""What the machine can do at best, measured beside the results: plain reads, scattered rows and pages, products.

And what a graph node costs that waits for the one before: overlapping ones cost less (floors.py).
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvseek.bench.machine import PlainRead
from kvseek.bench.methods import load_kernels
from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.errors import KernelError
from kvseek.plugins.ctkvr.host_part import launch_host_function

from .floors import Rates

if TYPE_CHECKING:
    pass

KERNELS = Path(__file__).parents[1] / "cuda"  # laid out as the kernel compiler expects: plugins/<name>/*.cu
READ_THREADS, ROWS_THREADS = 512, 128  # as in probe.cu
READ_BLOCKS, ROWS_BLOCKS = 4, 16  # resident at a time on a multiprocessor
NODES = 1000  # of the graph whose nodes are timed
HOST_FUNCTIONS = 100  # of the graph whose host-function nodes are timed
REPEATS = 9
VECTOR_BYTES = 16  # of one load
PAGE_ROWS = 32  # neighbouring rows of a page: 16 KiB at 128 channels of 16 bits
HOST_BYTES = 1 << 30  # of a read of host memory: more than last-level caches hold
HOST_REPEATS = 5
PRODUCT_ROWS = 8192


class ReadArguments(ctypes.Structure):
    """ProbeReadArguments of probe.cu."""

    _fields_ = (("source", ctypes.c_void_p), ("sink", ctypes.c_void_p), ("count", ctypes.c_int64))


class RowsArguments(ctypes.Structure):
    """ProbeRowsArguments of probe.cu."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("sink", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("row_bytes", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class Probe:
    """Measures rates on one GPU."""

    def __init__(self, device: torch.device) -> None:
        from kvseek.builder.compile.cuda import Specialisation

        self.device = device
        self.kernels = load_kernels(Specialisation("bfloat16", 128, 1, "probe"), device, roots=[KERNELS])
        self._sink = torch.zeros(1, dtype=torch.int32, device=device)

    def read_rate(self, memory: Tensor) -> float:
        """Bytes per second of reading `memory` (contiguous, on the device; give gigabytes), the faster of two ways.

        The ways are this benchmark's kernel and torch's sum: a slow probe would flatter whatever is compared with it.
        """
        flat = memory.view(-1).view(torch.uint8)
        flat = flat[: flat.numel() // VECTOR_BYTES * VECTOR_BYTES]
        arguments = ReadArguments(flat.data_ptr(), self._sink.data_ptr(), flat.numel() // VECTOR_BYTES)
        grid = (READ_BLOCKS * self.kernels.multiprocessors, 1, 1)
        ours = seconds(lambda: self.kernels.launch("kvseek_probe_read", grid, READ_THREADS, arguments))
        numbers = flat.view(torch.int32)
        return flat.numel() / min(ours, seconds(lambda: numbers.sum(dtype=torch.int32)))

    def row_rate(self, base: int, offsets: Tensor, row_bytes: int) -> float:
        """Rows per second of a gather of rows at `base` + offsets (int64, bytes, on the device) of `row_bytes` each."""
        count = offsets.numel()
        arguments = RowsArguments(base, offsets.data_ptr(), self._sink.data_ptr(), count, row_bytes, 0)
        most = ROWS_BLOCKS * self.kernels.multiprocessors
        grid = (min(most, -(-count * 32 // (4 * ROWS_THREADS))), 1, 1)
        return count / seconds(lambda: self.kernels.launch("kvseek_probe_rows", grid, ROWS_THREADS, arguments))

    def node_seconds(self) -> float:
        """Seconds that one more small kernel adds to a graph of kernels that wait for each other: nodes without overlap."""
        number = torch.zeros(1, device=self.device)
        graph = torch.cuda.CUDAGraph()
        number.add_(1)
        with torch.cuda.graph(graph):
            for _ in range(NODES):
                number.add_(1)
        return seconds(graph.replay) / NODES

    def host_function_seconds(self) -> float:
        """Seconds that a host-function node adds to a graph between two kernels that wait for it.

        The function is the C library's `free`, whose signature is that of a host function and which does nothing when
        its argument is null: what is measured is the way to the host and back.
        """
        launch = launch_host_function()
        function = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p).value
        assert function is not None, "a symbol that was found has an address"
        number = torch.zeros(1, device=self.device)
        graph = torch.cuda.CUDAGraph()
        number.add_(1)
        with torch.cuda.graph(graph):
            stream = torch.cuda.current_stream(self.device).cuda_stream
            for _ in range(HOST_FUNCTIONS):
                status = launch(stream, function, 0)
                if status:
                    raise KernelError(f"a host function in a graph: the driver reports {status}; update the driver")
                number.add_(1)
        return max(0.0, seconds(graph.replay) / HOST_FUNCTIONS - self.node_seconds())

    def rates(self, memory: Tensor, pool: PoolSample) -> Rates:
        """All rates; `memory` as of `read_rate`."""
        pages = self.row_rate(pool.base, pool.pages, PAGE_ROWS * pool.row_bytes)
        return Rates(
            read=self.read_rate(memory),
            host_rows=self.row_rate(pool.base, pool.rows, pool.row_bytes),
            host_pages=pages * PAGE_ROWS * pool.row_bytes,
            host_memory=self.host_memory_rate,
            node=self.node_seconds(),
            host_function=self._host_function_seconds,
        )

    @cached_property
    def host_memory_rate(self) -> float:
        """See host_memory_rate; once, as neither memory nor cores change in a run."""
        return host_memory_rate(HOST_BYTES)

    @cached_property
    def _host_function_seconds(self) -> float:
        return self.host_function_seconds()


@dataclass(frozen=True)
class PoolSample:
    """Random rows and pages of one layer of a row pool.

    Attributes
    ----------
    base : int
        Address of the layer's rows as the GPU sees it.
    row_bytes : int
        Of one row: key and value.
    rows, pages : Tensor, int64, on the device
        Bytes from `base` to each row, and to the first row of each page.
    """

    base: int
    row_bytes: int
    rows: Tensor
    pages: Tensor


def random_row_offsets(
    count: int,
    extents: int,
    extent_stride: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    device: torch.device,
    neighbours: int = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Byte offsets, int64 [count], of random pages of `neighbours` rows of one layer of a row pool.

    Sizes and strides are in elements; `neighbours` divides an extent. Without a generator they are the same in each call.
    """
    generator = generator or torch.Generator(device).manual_seed(0)
    extent = torch.randint(0, extents, (count,), device=device, generator=generator)
    page = torch.randint(0, kv_heads * EXTENT_TOKENS // neighbours, (count,), device=device, generator=generator)
    return (extent * extent_stride + page * neighbours * 2 * head_dim) * itemsize


def host_memory_rate(size: int) -> float:
    """Bytes per second that PyTorch's threads read or copy in host memory; the faster, medians over repeats.

    A copy counts what it reads and what it writes.
    """
    read = PlainRead(size)
    target = torch.empty(size // 16, dtype=torch.int64)
    source = torch.ones_like(target)
    copied = 2 * source.nbytes / host_seconds(lambda: target.copy_(source))
    return max(size / host_seconds(read), copied)


def host_seconds(call: Callable[[], object]) -> float:
    """Median seconds of a call on the host, over repeats; one call goes before, uncounted."""
    call()
    times = []
    for _ in range(HOST_REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


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
