"""The part of a CTkvr decode step on host cores: rerank and attention beside the GPU's window attention (section 3.2).

The recall kernel writes places and queries to pinned memory. A second branch of the stream, or of the graph that captures it,
runs a host function on them while the GPU attends to the window; then a kernel merges both results. No Python runs in a replay.
It takes as many threads as the process can keep busy, by its affinity mask and the limits of its control groups.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from kvseek.core.batch import Batch, Selection
from kvseek.core.cpu_library import pointer
from kvseek.core.errors import KernelError
from kvseek.core.index_context import LayerRows
from kvseek.kernels.arguments import pointers
from kvseek.kernels.cpu.attention.attend import AttendArguments
from kvseek.kernels.cuda.attention.attend import LayerAttention, address
from kvseek.kernels.structs import c_struct
from kvseek.plugins.ctkvr.native import HostStep, SelectArguments, selection_sizes
from kvseek.plugins.ctkvr.reference import ReferenceIndex

GROUPS = Path("/sys/fs/cgroup")  # control groups of version 2; version 1 has a folder for each resource there
MEMBERSHIP = Path("/proc/self/cgroup")

MERGE_THREADS = 256
MergeArguments = c_struct("plugins/ctkvr/cuda/merge.cu", "MergeArguments")


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

    All but the last three attributes lie in pinned memory, which both sides see at the same address.

    Attributes
    ----------
    recalled : Tensor, int32 [most, G, capacity]
    counts : Tensor, int32 [most, G]
    slots : Tensor, int32 [most]
    queries : Tensor [most, H, D]
    out : Tensor, float32 [most, H, D]
    lse : Tensor, float32 [most, H]
    best : Tensor, int32 [most, G, width], or None if centroids are not updated
    selected : Tensor, int32 [most, G, top_k]
        For host cores alone.
    window_lse : Tensor, float32 [most, H], on the device
    no_rows : Tensor, int32 [most, G, 1], on the device
        The rows of an empty selection.
    """

    def __init__(self, index: ReferenceIndex, most: int) -> None:
        context = index.context
        heads, kv_heads, dim = context.num_heads, context.num_kv_heads, context.head_dim

        def pinned(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros((most, *shape), dtype=dtype, pin_memory=True)

        self.recalled, self.counts, self.slots = pinned(kv_heads, index.capacity), pinned(kv_heads), pinned()
        self.queries = pinned(heads, dim, dtype=context.dtype)
        self.out, self.lse = pinned(heads, dim, dtype=torch.float32), pinned(heads, dtype=torch.float32)
        self.best = pinned(kv_heads, index.width) if index.config.update else None
        self.selected = torch.empty((most, kv_heads, index.config.top_k), dtype=torch.int32)
        self.window_lse = torch.empty((most, heads), dtype=torch.float32, device=context.device)
        self.no_rows = torch.full((most, kv_heads, 1), -1, dtype=torch.int32, device=context.device)
        self.stream = torch.cuda.Stream(context.device)  # type: ignore[no-untyped-call]
        self.threads = max(1, usable_cores() - 1)  # one core is left to the thread that launches the steps

    def targets(self) -> dict[str, int]:
        """Return the addresses of the buffers for StepArguments."""
        names = ("recalled", "counts", "queries", "slots")
        return {f"host_{name}": getattr(self, name).data_ptr() for name in names}


def describe_step(index: ReferenceIndex, rows: LayerRows, buffers: HostBuffers, batch: int) -> ctypes.Structure:
    """Describe what host cores do in a step of `batch` requests, as a HostStep over the buffers that the recall kernel fills."""
    context, table = index.context, index.context.extents.table
    shared = {
        "queries": buffers.queries.data_ptr(),
        "table": pointer(table),
        "max_extents": table.shape[1],
        "extent_stride": rows.extent_stride,
        "batch": batch,
        "threads": buffers.threads,
        "float16": context.dtype is torch.float16,
    }
    select = SelectArguments(
        **shared,
        **selection_sizes(index),
        rows=pointer(buffers.selected),
        best=address(buffers.best),
        pool=rows.pool.data_ptr(),
        recalled=buffers.recalled.data_ptr(),
        counts=buffers.counts.data_ptr(),
    )
    attend = AttendArguments(
        **shared,
        **{name: getattr(select, name) for name in ("kv_heads", "group", "dim", "bfloat16", "scaling")},
        out=buffers.out.data_ptr(),
        lse=buffers.lse.data_ptr(),
        rows=select.pool,
        selected=select.rows,
        entries=select.top_k,
    )
    return HostStep(select=select, attend=attend, slots=buffers.slots.data_ptr())


class HostCoreAttention:
    """Attention of one layer with host cores. It keeps its HostSteps alive, because graphs hold their addresses."""

    def __init__(self, index: ReferenceIndex, written: Tensor, most: int, rows: LayerRows) -> None:
        context = index.context
        assert context.library is not None, "Traits.cpu_library_on_gpu asks for it"
        assert context.cuda is not None, "the index of a GPU made it"
        self.buffers = context.share("ctkvr.host", lambda: HostBuffers(index, most))
        self._index, self._written, self._rows, self._kernels = index, written, rows, context.cuda
        # It has the signature of a CUDA host function (CUhostFn).
        function = ctypes.cast(context.library.function("kvseek_ctkvr_host_step", HostStep), ctypes.c_void_p).value
        assert function is not None, "a symbol that was found has an address"
        self._function = function
        self._steps: dict[int, ctypes.Structure] = {}  # by batch size

    def attend(self, queries: Tensor, batch: Batch, selection: Selection | None, attention: LayerAttention) -> Tensor:
        """See Index.attend. The recall of the same queries must have been launched before."""
        current, lse = torch.cuda.current_stream(queries.device), self.buffers.window_lse[: batch.size]
        self.buffers.stream.wait_stream(current)
        self._launch_host(batch.size)
        out = attention(queries, batch, selection, lse=lse)
        current.wait_stream(self.buffers.stream)
        self._merge(queries, batch, out, lse)
        return out

    def _launch_host(self, batch: int) -> None:
        if batch not in self._steps:
            self._steps[batch] = describe_step(self._index, self._rows, self.buffers, batch)
        stream, step = self.buffers.stream.cuda_stream, ctypes.addressof(self._steps[batch])
        status = launch_host_function()(stream, self._function, step)
        if status:
            raise KernelError(
                f"cuLaunchHostFunc returned {status}: host cores could not be launched from the stream; set execution to "
                "'codes' to do without"
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
