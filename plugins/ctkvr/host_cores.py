"""The part of a CTkvr decode step on host cores: rerank and attention beside the GPU's window attention (section 3.2).

The recall kernel writes places and queries to pinned memory. A second branch of the stream, or of the graph that captures it,
runs a host function on them while the GPU attends to the window; then a kernel merges both results. No Python runs in a replay.
It takes as many threads as the process can keep busy, by its affinity mask and the limits of its control groups.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from kvseek.core.batch import Batch, Selection
from kvseek.core.errors import KernelError
from kvseek.core.index_context import LayerRows
from kvseek.kernels.arguments import pointers
from kvseek.kernels.cuda.attention.attend import LayerAttention, address
from kvseek.plugins.ctkvr.native import (
    MOST_THREADS,
    HostPool,
    check_supported,
    describe_step,
    host_function,
    raise_error,
)
from kvseek.plugins.ctkvr.reference import ReferenceIndex
from kvseek.plugins.ctkvr.workspace import MergeArguments

GROUPS = Path("/sys/fs/cgroup")  # control groups of version 2; version 1 has a folder for each resource there
MEMBERSHIP = Path("/proc/self/cgroup")

MERGE_THREADS = 256


def usable_cores() -> int:
    """Count the cores of the calling thread's affinity mask; fewer if a control group grants less processor time, at least 1.

    Threads that wait for work on more cores use up the group's time, and then all threads of the group stand still for the
    rest of the period. A fraction of a core is not counted.
    """
    cores = len(os.sched_getaffinity(0))
    for folder in _groups():
        cores = min(cores, _granted(folder, cores))
    return max(1, cores)


def _groups() -> list[Path]:
    """List the process's control group of version 2 and its parents, the outermost last, and a container's of version 1."""
    names = MEMBERSHIP.read_text(encoding="utf-8").splitlines() if MEMBERSHIP.is_file() else []
    inside = [name.split(":", 2)[2].strip("/") for name in names if name.startswith("0::")]
    groups = [GROUPS / name for name in inside if ".." not in Path(name).parts]
    around = [folder for group in groups for folder in group.parents if folder.is_relative_to(GROUPS)]
    return [*groups, *around, GROUPS, GROUPS / "cpu"]


def _granted(folder: Path, unlimited: int) -> int:
    """Return the whole cores that a control group grants; `unlimited` if it sets no limit."""
    if (folder / "cpu.max").is_file():
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
    elif (folder / "cpu.cfs_quota_us").is_file():
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period"))
    else:
        return unlimited
    limited = quota.strip() not in ("max", "-1")
    return int(quota) // int(period) if limited else unlimited


class HostBuffers:
    """Buffers between GPU and host cores, for batches of up to `most` requests; the layers use them one after another.

    All but the last two attributes lie in pinned memory, which both sides see at the same address.

    Attributes
    ----------
    recalled : Tensor, int32 [most, G, capacity]
    counts : Tensor, int32 [most, G]
    slots : Tensor, int32 [most]
    queries : Tensor [most, H, D]
    out : Tensor, float32 [most, H, D]
    lse : Tensor, float32 [most, H]
    best : Tensor, int32 [most, G, width], or None if centroids are not updated
    window_lse : Tensor, float32 [most, H], on the device
    no_rows : Tensor, int32 [most, G, 1], on the device
        The rows of an empty selection.
    """

    def __init__(self, index: ReferenceIndex, most: int) -> None:
        context = index.context
        assert context.library is not None, "Traits.cpu_library_on_gpu asks for it"
        heads, kv_heads, dim = context.num_heads, context.num_kv_heads, context.head_dim

        def pinned(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros((most, *shape), dtype=dtype, pin_memory=True)

        self.recalled, self.counts, self.slots = pinned(kv_heads, index.capacity), pinned(kv_heads), pinned()
        self.queries = pinned(heads, dim, dtype=context.dtype)
        self.out, self.lse = pinned(heads, dim, dtype=torch.float32), pinned(heads, dtype=torch.float32)
        self.best = pinned(kv_heads, index.width) if index.config.update else None
        self.window_lse = torch.empty((most, heads), dtype=torch.float32, device=context.device)
        self.no_rows = torch.full((most, kv_heads, 1), -1, dtype=torch.int32, device=context.device)
        self.stream = torch.cuda.Stream(context.device)  # type: ignore[no-untyped-call]
        # One core is left to the thread that launches the steps.
        self.pool = HostPool(context.library, min(MOST_THREADS, max(1, usable_cores() - 1)), pinned=True)
        # Not at exit, because a step may still be running then, and the end of the process ends the threads anyway.
        weakref.finalize(self, self.pool.close).atexit = False

    def targets(self) -> dict[str, int]:
        """Return the addresses of the buffers for StepArguments."""
        names = ("recalled", "counts", "queries", "slots")
        return {f"host_{name}": getattr(self, name).data_ptr() for name in names}


class HostCoreAttention:
    """Attention of one layer with host cores. It keeps its HostSteps alive, because graphs hold their addresses."""

    def __init__(self, index: ReferenceIndex, written: Tensor, most: int, rows: LayerRows) -> None:
        context = index.context
        check_supported(context)
        assert context.library is not None, "Traits.cpu_library_on_gpu asks for it"
        assert context.cuda is not None, "the index of a GPU made it"
        self.buffers = context.share("ctkvr.host", lambda: HostBuffers(index, most))
        self._index, self._written, self._rows, self._kernels = index, written, rows, context.cuda
        self._function = host_function(context.library)
        self._steps: dict[int, ctypes.Structure] = {}  # by batch size
        self._error = ctypes.c_int32(0)

    def attend(self, queries: Tensor, batch: Batch, selection: Selection | None, attention: LayerAttention) -> Tensor:
        """See Index.attend. The recall of the same queries must have been launched before."""
        current, lse = torch.cuda.current_stream(queries.device), self.buffers.window_lse[: batch.size]
        self.buffers.stream.wait_stream(current)
        self._launch_host(batch.size)
        out = attention(queries, batch, selection, lse=lse)
        current.wait_stream(self.buffers.stream)
        self._merge(queries, batch, out, lse)
        return out

    def check(self) -> None:
        """Raise KernelError if host cores failed in a step that has ended."""
        raise_error(self._error.value)

    def _launch_host(self, batch: int) -> None:
        if batch not in self._steps:
            self._steps[batch] = self._describe(batch)
        stream, step = self.buffers.stream.cuda_stream, ctypes.addressof(self._steps[batch])
        status = launch_host_function()(stream, self._function, step)
        if status:
            raise KernelError(
                f"cuLaunchHostFunc returned {status}: host cores could not be launched from the stream; set execution to "
                "'codes' to do without"
            )

    def _describe(self, batch: int) -> ctypes.Structure:
        buffers = self.buffers
        return describe_step(
            self._index,
            self._rows,
            batch,
            pool=buffers.pool.pointer,
            queries=buffers.queries.data_ptr(),
            recalled=buffers.recalled.data_ptr(),
            recalled_count=buffers.counts.data_ptr(),
            slots=buffers.slots.data_ptr(),
            out=buffers.out.data_ptr(),
            lse=buffers.lse.data_ptr(),
            best=address(buffers.best),
            error=ctypes.addressof(self._error),
            threads=buffers.pool.threads,
        )

    def _merge(self, queries: Tensor, batch: Batch, out: Tensor, lse: Tensor) -> None:
        index, buffers, kv_heads = self._index, self.buffers, self._index.context.num_kv_heads
        arguments = MergeArguments(
            **pointers(index, "centroids", "means", "offsets", "lists"),
            queries=queries.data_ptr(),
            requests=batch.requests.data_ptr(),
            out=out.data_ptr(),
            lse=lse.data_ptr(),
            host_out=buffers.out.data_ptr(),
            host_lse=buffers.lse.data_ptr(),
            host_best=address(buffers.best),
            written=self._written.data_ptr(),
            kv_heads=kv_heads,
            ring=index.ring,
            width=index.width,
            top_k=index.config.top_k,
        )
        # Without overlap, because this kernel also follows the host function.
        self._kernels.launch("kvseek_ctkvr_merge", (1, kv_heads, batch.size), MERGE_THREADS, arguments)


@lru_cache(maxsize=1)
def launch_host_function() -> Callable[[int, int, int], int]:
    """Find the driver's own cuLaunchHostFunc(stream, function, data).

    The function of that name in cuda.bindings wraps the host function into one that takes Python's lock, calls it and frees
    the wrapper, so a graph would call freed memory at its second replay.
    """
    from cuda.bindings import driver  # only engines of the GPU need the package

    first_version, flags = 10000, 0  # CUDA 10.0 introduced it
    status, address_of, _ = driver.cuGetProcAddress(b"cuLaunchHostFunc", first_version, flags)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise KernelError(f"cuGetProcAddress found no cuLaunchHostFunc: {status.name}; update the driver")
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return prototype(address_of)
