"""Attention of one decode step by the CUDA kernel: rows are read where they lie, in device or in host memory.

The host's part of a launch depends only on shapes; all else is read from device memory, so that a CUDA graph can hold it.
"""

from __future__ import annotations

import copy
import ctypes
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvseek.core.batch import REQUEST_FIELDS, Batch, Selection
from kvseek.core.errors import KernelError
from kvseek.core.index_context import LayerRows, ShapeLimits
from kvseek.kernels.structs import c_struct

from .hot_rows import HotRows
from .splits import MAX_RETRIEVAL_SPLITS, THREADS, AttentionScratch, HeadTiles, ScratchSize, Splits, address

if TYPE_CHECKING:
    from kvseek.core.cuda import CudaKernels

LIMITS = ShapeLimits(max_head_dim=256, max_group_size=16, head_dim_step=32)  # static_assert of attend_arguments.cuh
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALIGNMENT = 16  # bytes that the kernel loads at once, to which tensors must be aligned
UNSUPPORTED = "run the model with --device cpu"

AttendArguments = c_struct("kernels/cuda/attention/attend_arguments.cuh", "AttendArguments")


class DeviceAttention:
    """Attention of one layer over window rows and retrieval rows, in one launch.

    Parameters
    ----------
    kernels : CudaKernels
        Kernels that were compiled for this dtype, head size and group size.
    window_rows, sink : int
        Rows of a slot's window, and the row where its ring starts.
    entries : int
        Entries of a selection per KV head; 0 if no selection is ever given.
    max_batch : int
        Largest batch of a launch.
    scaling : float
        Softmax scale.
    splits : int or None
        Most units that the dense rows of a request and KV head are cut into; None: `Splits.plan` chooses.
    hot : HotRows or None
        Copies of the rows that each slot's last steps selected. Of no use if the row pool lies on the device.
    scratch : AttentionScratch or None
        Scratch memory of another layer, which runs before or after this layer; None: memory of its own.

    Raises
    ------
    KernelError
        On a shape or dtype that the kernel does not support.
    """

    def __init__(
        self,
        kernels: CudaKernels,
        *,
        num_heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        window_rows: int,
        sink: int,
        entries: int,
        max_batch: int,
        scaling: float,
        device: torch.device,
        splits: int | None = None,
        hot: HotRows | None = None,
        scratch: AttentionScratch | None = None,
    ) -> None:
        _check_shape(num_heads, kv_heads, head_dim, dtype)
        _require(0 <= sink < window_rows, "sink", sink, f"in [0, window_rows = {window_rows})", "the ring needs a row")
        limit = f"between 1 and {MAX_RETRIEVAL_SPLITS}"
        _require(splits is None or 1 <= splits <= MAX_RETRIEVAL_SPLITS, "splits", splits, limit, "None chooses")
        self.kernels, self.dtype, self.hot = kernels, dtype, hot
        self.num_heads, self.kv_heads, self.head_dim = num_heads, kv_heads, head_dim
        self.window_rows, self.sink, self.entries, self.max_batch = window_rows, sink, entries, max_batch
        self.tiles = HeadTiles.of(dtype, head_dim, num_heads // kv_heads)
        self._scale = scaling * math.log2(math.e)  # the kernel's weights are powers of two
        self._lists = kv_heads * self.tiles.tiles  # of a request
        self._resident = kernels.multiprocessors * self.tiles.resident_ctas
        self.splits = Splits.plan(self._lists, window_rows, entries, self._resident, splits)
        size = self._scratch_size()
        fits = scratch is None or scratch.holds(size)
        _require(fits, "scratch", scratch and scratch.size, f"at least {size}", "share that of a layer of this shape")
        self.scratch = scratch or AttentionScratch(size, device)
        if hot is not None:
            wanted, found = (kv_heads, entries, 2, head_dim), hot.rows.shape
            fits = (found[1], *found[3:]) == wanted and hot.rows.dtype == dtype
            limit = f"{dtype} [slots, {kv_heads}, buffers, {entries}, 2, {head_dim}]"
            _require(fits, "hot.rows", (hot.rows.dtype, tuple(found)), limit, "make hot rows of the layer's shape")

    def without_hot_rows(self) -> DeviceAttention:
        """Return the same attention, with the same scratch memory, that neither reads nor writes hot rows."""
        other = copy.copy(self)
        other.hot = None
        return other

    def launch(
        self,
        queries: Tensor,
        batch: Batch,
        window: Tensor,
        rows_pointer: int,
        extent_stride: int,
        selection: Selection | None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        on_host: bool = False,
    ) -> Tensor:
        """Attend on the current stream; a graph may capture it.

        Parameters
        ----------
        queries : Tensor [batch, H, D]
            Contiguous, like every tensor here.
        window : Tensor [slots, G, window_rows, 2, D]
        rows_pointer : int
            Address, as the GPU sees it, of the layer's rows. The row of extent e, KV head j and place p starts
            e · extent_stride + (j · 1024 + p mod 1024) · 2D numbers after it: the key, then the value.
        extent_stride : int
            Numbers from one extent to the next.
        selection : Selection or None
            A selection of `entries` entries per KV head; its part for requests with `dense` set is not read. None: all requests
            are dense. Entries without a row may stand anywhere; if no entry has a row, the window alone is attended to.
        out : Tensor [batch, H, D], optional
            Receives the result.
        lse : Tensor, float32 [batch, H], optional
            Receives the natural logarithm of the sum of the exponentials of all scaled scores, -infinity without rows. With it
            two parts of an attention can be merged.
        on_host : bool
            Whether the rows lie in host memory; they are then read in the order that is fastest over PCIe.

        Returns
        -------
        Tensor [batch, H, D], dtype of the queries
            Zeros for a request that has no rows at all.

        Raises
        ------
        KernelError
            On a shape, dtype or alignment that the kernel does not support.
        """
        out = torch.empty_like(queries) if out is None else out
        self._check_launch(queries, batch, window, out, lse)
        if selection is not None:
            self._check_selection(selection, batch.size)
        stride_bytes = extent_stride * self.dtype.itemsize
        aligned = rows_pointer % ALIGNMENT == 0 and stride_bytes % ALIGNMENT == 0
        where = (rows_pointer, extent_stride)
        _require(aligned, "rows_pointer, extent_stride", where, f"multiples of {ALIGNMENT} bytes", "align the pool")
        arguments = AttendArguments(
            queries=queries.data_ptr(),
            out=out.data_ptr(),
            requests=batch.requests.data_ptr(),
            table=batch.table.data_ptr(),
            window=window.data_ptr(),
            rows=rows_pointer,
            lse=address(lse),
            partials=self.scratch.partials.data_ptr(),
            statistics=self.scratch.statistics.data_ptr(),
            arrivals=self.scratch.arrivals.data_ptr(),
            extent_stride=extent_stride,
            window_stride=window.stride(0),
            kv_heads=self.kv_heads,
            table_stride=batch.table.shape[1],
            window_rows=self.window_rows,
            sink=self.sink,
            entries=self.entries,
            rows_on_host=on_host,
            batch=batch.size,
            most_units=batch.size * self.splits.most,
            dense_splits=self.splits.dense,
            dense_rows=self.splits.dense_rows,
            selected_rows=self.splits.selected_rows,
            scale=self._scale,
        )
        if selection is not None:
            arguments.selected = selection.rows.data_ptr()
            self._describe_hot_rows(arguments)
        grid = (min(max(1, self._resident // self._lists), arguments.most_units), self._lists, 1)
        self.kernels.launch("kvseek_attend", grid, THREADS, arguments, self.tiles.shared_bytes, overlap=True)
        return out

    def _scratch_size(self) -> ScratchSize:
        units, heads = self.max_batch * self._lists * self.splits.most, self.tiles.heads
        kept = min(heads, self.num_heads // self.kv_heads)
        return ScratchSize(units * kept * self.head_dim, 2 * units * heads, self._lists * self.max_batch)

    def _describe_hot_rows(self, arguments: ctypes.Structure) -> None:
        hot = self.hot
        if hot is not None:
            arguments.hot_rows, arguments.hot_places = hot.rows.data_ptr(), hot.places.data_ptr()
            arguments.frames, arguments.hits = hot.frames.data_ptr(), hot.hits.data_ptr()
            arguments.hot_buffers = hot.rows.shape[2]
            arguments.frame_count, arguments.frame_step = hot.frames.numel(), hot.frame_step

    def _check_launch(self, queries: Tensor, batch: Batch, window: Tensor, out: Tensor, lse: Tensor | None) -> None:
        _require(1 <= batch.size <= self.max_batch, "batch", batch.size, f"1 to {self.max_batch}", "raise max_batch")
        shape = (batch.size, self.num_heads, self.head_dim)
        _check_tensor("queries", queries, self.dtype, shape)
        _check_tensor("out", out, self.dtype, shape)
        if lse is not None:
            _check_tensor("lse", lse, torch.float32, shape[:2])
        _check_tensor("requests", batch.requests, torch.int32, (batch.size, REQUEST_FIELDS))
        _check_tensor("table", batch.table, torch.int32, tuple(batch.table.shape[:2]))
        rows = (window.shape[0], self.kv_heads, self.window_rows, 2, self.head_dim)
        _check_tensor("window", window, self.dtype, rows)

    def _check_selection(self, selection: Selection, batch: int) -> None:
        shape = (batch, self.kv_heads, self.entries)
        _check_tensor("selection.rows", selection.rows, torch.int32, shape)


@dataclass(frozen=True)
class LayerAttention:
    """Attention of one layer over its window and its rows; an Attention of plugins/contract.py.

    Attributes
    ----------
    kernel : DeviceAttention
    window : Tensor [slots, G, window, 2, D], on the device
    rows : LayerRows
    """

    kernel: DeviceAttention
    window: Tensor
    rows: LayerRows

    def __call__(self, queries: Tensor, batch: Batch, selection: Selection | None, lse: Tensor | None = None) -> Tensor:
        """See Attention; for `lse` see DeviceAttention.launch."""
        where = (self.window, self.rows.pointer, self.rows.extent_stride)
        return self.kernel.launch(queries, batch, *where, selection, lse=lse, on_host=self.rows.on_host)


def _check_shape(num_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    _require(dtype in DTYPES, "dtype", dtype, f"one of {DTYPES}", UNSUPPORTED)
    _require(num_heads % kv_heads == 0, "num_heads", num_heads, f"a multiple of kv_heads = {kv_heads}", UNSUPPORTED)
    if fault := LIMITS.fault(head_dim, num_heads // kv_heads):
        raise KernelError(f"attention on the GPU: {fault}; {UNSUPPORTED}")


def _check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    found = (tensor.dtype, tuple(tensor.shape), tensor.is_contiguous(), tensor.data_ptr() % ALIGNMENT)
    limit = f"{dtype} {shape}, contiguous, from a multiple of {ALIGNMENT} bytes on"
    _require(found == (dtype, shape, True, 0), name, found, limit, "see DeviceAttention.launch")


def _require(condition: bool, name: str, value: object, limit: str, remedy: str) -> None:
    if not condition:
        raise KernelError(f"attention on the GPU: {name} = {value}: must be {limit}; {remedy}")
