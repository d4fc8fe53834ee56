"""Attention of one decode step on the CPU, by the compiled kernel or the reference: rows are read where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvseek.core.batch import Batch, Selection
from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.cpu_library import CpuLibrary, pointer
from kvseek.core.errors import KernelError
from kvseek.core.index_context import ShapeLimits
from kvseek.kernels.reference.attention import attend as reference
from kvseek.kernels.structs import c_struct

# Of all kernels of the CPU: MAX_DIM and MAX_GROUP of tile.h, MAX_PADDED_DIM and MAX_QUERIES of kernels/cpu/codes.
LIMITS = ShapeLimits(max_head_dim=256, max_group_size=16)
REMEDY = "build the engine with --kernels reference"

AttendArguments = c_struct("kernels/cpu/attention/rows.h", "AttendArguments")


def attend(
    queries: Tensor,
    batch: Batch,
    selection: Selection | None,
    window: Tensor,
    rows: Tensor,
    *,
    sink: int,
    scaling: float,
    library: CpuLibrary,
) -> Tensor:
    """Attend over the window and the selected retrieval rows, as reference.attend does.

    Scores, softmax and sums are float32. To the bit, the result of a request does not depend on the other requests of the
    batch or on the number of threads.

    Parameters
    ----------
    queries : Tensor [batch, H, D]
        float32 or bfloat16, like the rows, on the CPU. `LIMITS` bounds D and H/G.
    selection : Selection or None
        None: every row. With a selection no request may be dense.
    window, rows, sink
        See reference.attend.

    Returns
    -------
    Tensor [batch, H, D], dtype of the queries

    Raises
    ------
    KernelError
        On a shape, dtype or device that the kernel does not support.
    """
    selected = None if selection is None else selection.rows.contiguous()
    tensors = [queries, batch.requests, window, rows, *([] if selected is None else [selected])]
    if not all(tensor.is_cpu for tensor in tensors):
        _refuse("device", queries.device, "the CPU, as are batch, cache and selection")
    layout = _layout(
        (queries.shape, queries.dtype, *((None, None) if selected is None else (selected.shape, selected.dtype))),
        (window.shape, window.stride(), window.dtype, rows.stride(), rows.dtype),
    )
    queries = queries.contiguous()
    out = torch.empty_like(queries)
    arguments = AttendArguments.from_buffer_copy(layout)
    arguments.queries = queries.data_ptr()
    arguments.out = out.data_ptr()
    arguments.requests = pointer(batch.requests)
    arguments.window = window.data_ptr()
    arguments.rows = rows.data_ptr()
    arguments.table = pointer(batch.table)
    arguments.selected = None if selected is None else pointer(selected)
    arguments.sink = sink
    arguments.max_extents = batch.table.shape[1]
    arguments.threads = torch.get_num_threads()
    arguments.scaling = scaling
    library.function("kvseek_attend", AttendArguments)(arguments)
    return out


@dataclass(frozen=True)
class HostAttention:
    """Attention of one layer of a cache on the CPU; an Attention of plugins/contract.py.

    Attributes
    ----------
    window : Tensor [slots, G, window, 2, D]
        Window rows, K then V.
    rows : Tensor [extents, G, 1024, 2, D]
        The layer's part of the row pool (strided by extent).
    sink : int
        Capacity of the sink: the ring starts at window row `sink`.
    scaling : float
        Softmax scale.
    library : CpuLibrary or None
        Compiled kernels; None runs the reference.
    """

    window: Tensor
    rows: Tensor
    sink: int
    scaling: float
    library: CpuLibrary | None

    def __call__(self, queries: Tensor, batch: Batch, selection: Selection | None) -> Tensor:
        """See Attention. With a selection no request of the batch may be dense."""
        where = (queries, batch, selection, self.window, self.rows)
        if self.library is None:
            return reference.attend(*where, sink=self.sink, scaling=self.scaling)
        return attend(*where, sink=self.sink, scaling=self.scaling, library=self.library)


@lru_cache(maxsize=64)
def _layout(query: tuple[Any, ...], cache: tuple[Any, ...]) -> bytes:
    # The result is cached for each combination of shapes, because `attend` runs in every layer of every step.
    (batch, heads, dim), dtype, selected, entry_dtype = query
    (_, kv_heads, window_rows, _, _), window_stride, window_dtype, rows_stride, rows_dtype = cache
    group = heads // kv_heads
    if dtype not in (torch.float32, torch.bfloat16):
        _refuse("dtype", dtype, "float32 or bfloat16")
    if (window_dtype, rows_dtype) != (dtype, dtype):
        _refuse("cache dtype", (window_dtype, rows_dtype), f"{dtype} as the queries")
    if fault := LIMITS.fault(dim, group):
        raise KernelError(f"native attention: {fault}; {REMEDY}")
    if entry_dtype not in (None, torch.int32):
        _refuse("selection dtype", entry_dtype, "int32")
    for name, strides, tokens in (("window", window_stride, window_rows), ("rows", rows_stride, EXTENT_TOKENS)):
        if strides[1:] != (tokens * 2 * dim, 2 * dim, dim, 1):
            _refuse(f"{name} strides", strides, "contiguous but for the first dimension")
    return bytes(
        AttendArguments(
            batch=batch,
            kv_heads=kv_heads,
            group=group,
            dim=dim,
            window_rows=window_rows,
            window_stride=window_stride[0],
            extent_stride=rows_stride[0],
            entries=0 if selected is None else selected[2],
            bfloat16=dtype is torch.bfloat16,
        )
    )


def _refuse(name: str, value: Any, limit: str) -> None:
    raise KernelError(f"native attention: {name} = {value}: must be {limit}; {REMEDY}")
