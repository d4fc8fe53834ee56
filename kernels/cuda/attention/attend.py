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
from kvseek.kernels.cuda.attention.hot_rows import HotRows
from kvseek.kernels.structs import c_struct

# As in attend_arguments.cuh and attend.cu.
WARPS = 4
THREADS = 32 * WARPS
TILE_ROWS = 16  # rows that a warp takes at once
MAX_SPLITS = 128
SCALAR_SHARED_BYTES = 4224  # float32 rows stay in registers

WINDOW_ROWS = 128  # of a unit: two tiles of 16 rows a warp
MAX_WINDOW_SPLITS = 32
MAX_RETRIEVAL_SPLITS = MAX_SPLITS - MAX_WINDOW_SPLITS

DENSE_ROWS = 512  # least rows of a unit of dense rows
FEW_ENTRIES = 512  # up to so many, a unit is a tile for each of a CTA's warps: more of them read from the host at once
FEW_SELECTED_ROWS, SELECTED_ROWS = 64, 128  # least rows of a unit of selected rows

LIMITS = ShapeLimits(max_head_dim=256, max_group_size=16, head_dim_step=32)  # static_assert of attend_arguments.cuh
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALIGNMENT = 16  # bytes that the kernel loads at once, to which tensors must be aligned
UNSUPPORTED = "run the model with --device cpu"
AttendArguments = c_struct("kernels/cuda/attention/attend_arguments.cuh", "AttendArguments")


@dataclass(frozen=True)
class HeadTiles:
    """Tiles of the query heads of a KV head, one for each CTA, cut as in attend_arguments.cuh."""

    heads: int  # query heads of a tile, some of them unused
    tiles: int
    resident_ctas: int  # CTAs that a multiprocessor is meant to hold at once
    shared_bytes: int  # dynamic shared memory of a CTA

    @classmethod
    def of(cls, dtype: torch.dtype, head_dim: int, group_size: int) -> HeadTiles:
        """Compute the tiles of the kernel that is compiled for these sizes."""
        stride = 2 * head_dim * dtype.itemsize + 16  # bytes of a row in shared memory
        if dtype is torch.float32:
            most = min(group_size, 8 if head_dim <= 128 else 4)
            heads = next(size for size in (1, 2, 4, 8) if size >= most)
            return cls(heads, -(-group_size // heads), 2, SCALAR_SHARED_BYTES)
        heads = 16 if group_size > 8 and head_dim <= 128 else 8
        stages = 3 if head_dim <= 64 else 2 if head_dim <= 128 else 1  # tiles of 16 rows that each warp copies ahead
        return cls(heads, -(-group_size // heads), 3 if head_dim <= 128 else 2, WARPS * stages * TILE_ROWS * stride)


@dataclass(frozen=True)
class Splits:
    """How the rows of a list, a (request, KV head) and a tile of its query heads, are cut into units (attend.cu).

    A unit is a CTA's work. The units of a request follow from its own numbers and from the GPU, not from the batch, and so does
    the order in which its rows are summed. The window has a unit per 128 rows.

    Attributes
    ----------
    dense : int
        Most units of dense rows: with the window's as many as the GPU holds at once for one request.
    dense_rows : int
        Least rows of such a unit.
    selected_rows : int
        Rows of a unit of selected rows.
    most : int
        Most units of a list.
    """

    dense: int
    dense_rows: int
    selected_rows: int
    most: int

    @classmethod
    def plan(cls, lists: int, window_rows: int, entries: int, resident_ctas: int, dense: int | None) -> Splits:
        """Choose the units.

        Parameters
        ----------
        lists : int
            Lists of one request.
        entries : int
            Selected rows of a KV head; 0: all requests are dense.
        resident_ctas : int
            CTAs that the whole GPU holds at once.
        dense : int or None
            Most units of dense rows, instead of the chosen number; None: choose.
        """
        window = min(-(-window_rows // WINDOW_ROWS), MAX_WINDOW_SPLITS)
        if dense is None:
            dense = min(max(1, resident_ctas // lists - window), MAX_RETRIEVAL_SPLITS)
        few = FEW_SELECTED_ROWS if entries <= FEW_ENTRIES else SELECTED_ROWS
        selected_rows = max(few, -(-entries // MAX_RETRIEVAL_SPLITS // TILE_ROWS) * TILE_ROWS)
        return cls(dense, DENSE_ROWS, selected_rows, window + max(dense, -(-entries // selected_rows)))


class AttentionScratch:
    """Scratch memory for the partial results of one launch. Layers run one after the other, so they may share it.

    Attributes
    ----------
    partials : Tensor, float32
        Unnormalised outputs of every unit.
    statistics : Tensor, float32
        Largest score and sum of weights of every unit and head.
    arrivals : Tensor, int32
        Number of units of each list that are done; zeros between launches.
    """

    def __init__(self, sizes: tuple[int, int, int], device: torch.device) -> None:
        self.sizes, (partials, statistics, arrivals) = sizes, sizes
        self.partials = torch.empty(partials, dtype=torch.float32, device=device)
        self.statistics = torch.empty(statistics, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(arrivals, dtype=torch.int32, device=device)


def address(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's data for a kernel argument; None is the null pointer."""
    return None if tensor is None else tensor.data_ptr()


if TYPE_CHECKING:
    from kvseek.core.cuda import CudaKernels


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
    rounded_rows : bool
        Whether the rows of the pool, and hot rows, have 8 bits; the kernels were compiled for that.
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
        rounded_rows: bool = False,
        scratch: AttentionScratch | None = None,
    ) -> None:
        _check_shape(num_heads, kv_heads, head_dim, dtype)
        _require(0 <= sink < window_rows, "sink", sink, f"in [0, window_rows = {window_rows})", "the ring needs a row")
        limit = f"between 1 and {MAX_RETRIEVAL_SPLITS}"
        _require(splits is None or 1 <= splits <= MAX_RETRIEVAL_SPLITS, "splits", splits, limit, "None chooses")
        self.kernels, self.dtype, self.hot = kernels, dtype, hot
        fits = not rounded_rows or dtype is not torch.float32
        _require(fits, "dtype", dtype, "bfloat16 or float16 with rows of 8 bits", "build with --dtype bfloat16")
        self.row_dtype = torch.int8 if rounded_rows else dtype
        self.num_heads, self.kv_heads, self.head_dim = num_heads, kv_heads, head_dim
        self.window_rows, self.sink, self.entries, self.max_batch = window_rows, sink, entries, max_batch
        self.tiles = HeadTiles.of(dtype, head_dim, num_heads // kv_heads)
        self._scale = scaling * math.log2(math.e)  # the kernel's weights are powers of two
        self._lists = kv_heads * self.tiles.tiles  # of a request
        self._resident = kernels.multiprocessors * self.tiles.resident_ctas
        self.splits = Splits.plan(self._lists, window_rows, entries, self._resident, splits)
        sizes = self._scratch_sizes()
        own = sizes if scratch is None else scratch.sizes
        fits = all(numbers >= wanted for numbers, wanted in zip(own, sizes, strict=True))
        _require(fits, "scratch", own, f"at least {sizes}", "share that of a layer of this shape")
        self.scratch = scratch or AttentionScratch(sizes, device)
        if hot is not None:
            wanted, found = (kv_heads, entries, 2, head_dim), hot.rows.shape
            fits = (found[1], *found[3:]) == wanted and hot.rows.dtype == self.row_dtype
            limit = f"{self.row_dtype} [slots, {kv_heads}, buffers, {entries}, 2, {head_dim}]"
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
            e · extent_stride + (j · 1024 + p mod 1024) · 2D numbers after it: the key, then the value. In 8 bits it starts
            e · extent_stride + j · 1024 · (2D + 4) + p mod 1024 · 2D bytes after it, with scales behind the 1,024 rows.
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
        stride_bytes = extent_stride * self.row_dtype.itemsize
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

    def _scratch_sizes(self) -> tuple[int, int, int]:
        """Numbers in the arrays of AttentionScratch that a launch needs at most."""
        units, heads = self.max_batch * self._lists * self.splits.most, self.tiles.heads
        kept = min(heads, self.num_heads // self.kv_heads)
        return units * kept * self.head_dim, 2 * units * heads, self._lists * self.max_batch

    def _describe_hot_rows(self, arguments: ctypes.Structure) -> None:
        hot = self.hot
        if hot is not None:
            arguments.hot_rows, arguments.hot_places = hot.rows.data_ptr(), hot.places.data_ptr()
            arguments.frames, arguments.hits = hot.frames.data_ptr(), hot.hits.data_ptr()
            arguments.hot_scales = address(hot.scales)
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
