"""What the GPU's memory can do at best, measured beside the results: plain reads, scattered host rows.

And what a graph node costs that waits for the one before: overlapping ones cost less (floors.py).
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvseek.engine.config import EXTENT_TOKENS

from .floors import Rates

if TYPE_CHECKING:
    from kvseek.engine.cuda import CudaKernels

KERNELS = Path(__file__).parent / "kernels"  # laid out as the kernel compiler expects: plugins/<name>/*.cu
READ_THREADS, ROWS_THREADS = 512, 128  # as in probe.cu
READ_BLOCKS, ROWS_BLOCKS = 4, 16  # resident at a time on a multiprocessor
NODES = 1000  # of the graph whose nodes are timed
REPEATS = 9
VECTOR_BYTES = 16  # of one load


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
        from kvseek.builder.compile_cuda import Specialisation, cached_cubin
        from kvseek.engine.cuda import CudaKernels

        major, minor = torch.cuda.get_device_capability(device)
        specialisation = Specialisation("bfloat16", 128, 1, "probe")
        image = cached_cubin(specialisation, 10 * major + minor, roots=[KERNELS])
        self.device = device
        self.kernels: CudaKernels = CudaKernels(image, device)
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

    def rates(self, memory: Tensor, base: int, offsets: Tensor, row_bytes: int) -> Rates:
        """All rates; arguments as of `read_rate` and `row_rate`."""
        return Rates(self.read_rate(memory), self.row_rate(base, offsets, row_bytes), self.node_seconds())


def random_row_offsets(
    count: int, extents: int, extent_stride: int, kv_heads: int, head_dim: int, itemsize: int, device: torch.device
) -> Tensor:
    """Byte offsets, int64 [count], of random rows of one layer of a row pool; sizes and strides in elements."""
    generator = torch.Generator(device).manual_seed(0)
    extent = torch.randint(0, extents, (count,), device=device, generator=generator)
    row = torch.randint(0, kv_heads * EXTENT_TOKENS, (count,), device=device, generator=generator)
    return (extent * extent_stride + row * 2 * head_dim) * itemsize


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


def timing_event(in_graph: bool = False) -> torch.cuda.Event:
    """An event with a time; `in_graph`: a captured record becomes a node, and every replay sets the time anew."""
    return torch.cuda.Event(enable_timing=True, external=in_graph)  # type: ignore[no-untyped-call]


def elapsed_seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    """Device seconds from one event to another; the device must have passed both."""
    return float(start.elapsed_time(end)) * 1e-3
