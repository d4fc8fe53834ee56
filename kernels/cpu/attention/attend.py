"""Attention on the CPU: of a decode step, by the compiled kernel or the reference, which read rows in place, and of prompts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from kvseek.core.batch import Batch, Selection
from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.cpu_library import CpuLibrary, pointer
from kvseek.core.errors import KernelError
from kvseek.core.index_context import ShapeLimits
from kvseek.kernels.reference.attention import attend as reference
from kvseek.kernels.reference.attention.rounded_rows import SCALE_DTYPE
from kvseek.kernels.structs import c_struct

# Of all kernels of the CPU: MAX_DIM and MAX_GROUP of tile.h, MAX_PADDED_DIM and MAX_QUERIES of kernels/cpu/codes.
LIMITS = ShapeLimits(max_head_dim=256, max_group_size=16)
REMEDY = "build the engine with --kernels reference"

AttendArguments = c_struct("kernels/cpu/attention/rows.h", "AttendArguments")
CausalAttentionArguments = c_struct("kernels/cpu/attention/causal_attention.cpp", "CausalAttentionArguments")


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
    scales: Tensor | None = None,
) -> Tensor:
    """Attend over the window and the selected retrieval rows, as reference.attend does.

    Scores, softmax and sums are float32. To the bit, the result of a request does not depend on the other requests of the
    batch or on the number of threads.

    Parameters
    ----------
    queries : Tensor [batch, H, D]
        float32 or bfloat16, like the window and, without `scales`, the rows, on the CPU. `LIMITS` bounds D and H/G.
    selection : Selection or None
        None: every row. With a selection no request may be dense.
    window, rows, sink, scales
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
    tensors = [queries, batch.requests, window, rows, *(one for one in (selected, scales) if one is not None)]
    if not all(tensor.is_cpu for tensor in tensors):
        _refuse("device", queries.device, "the CPU, as are batch, cache and selection")
    layout = _layout(
        (queries.shape, queries.dtype, *((None, None) if selected is None else (selected.shape, selected.dtype))),
        (window.shape, window.stride(), window.dtype, rows.stride(), rows.dtype),
        None if scales is None else (scales.data_ptr() - rows.data_ptr(), scales.stride(), scales.dtype),
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
    scales : Tensor or None
        See LayerRows.
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
    scales: Tensor | None = None

    def __call__(self, queries: Tensor, batch: Batch, selection: Selection | None) -> Tensor:
        """See Attention. With a selection no request of the batch may be dense."""
        where = (queries, batch, selection, self.window, self.rows)
        if self.library is None:
            return reference.attend(*where, sink=self.sink, scaling=self.scaling, scales=self.scales)
        return attend(*where, sink=self.sink, scaling=self.scaling, library=self.library, scales=self.scales)


@lru_cache(maxsize=64)
def _layout(query: tuple[Any, ...], cache: tuple[Any, ...], scales: tuple[Any, ...] | None) -> bytes:
    # The result is cached for each combination of shapes, because `attend` runs in every layer of every step.
    (batch, heads, dim), dtype, selected, entry_dtype = query
    (_, kv_heads, window_rows, _, _), window_stride, window_dtype, rows_stride, rows_dtype = cache
    group = heads // kv_heads
    if dtype not in (torch.float32, torch.bfloat16):
        _refuse("dtype", dtype, "float32 or bfloat16")
    if (window_dtype, rows_dtype) != (dtype, dtype if scales is None else torch.int8):
        limit = f"{dtype} as the queries{'' if scales is None else ', and int8 with scales'}"
        _refuse("cache dtype", (window_dtype, rows_dtype), limit)
    if fault := LIMITS.fault(dim, group):
        raise KernelError(f"native attention: {fault}; {REMEDY}")
    if entry_dtype not in (None, torch.int32):
        _refuse("selection dtype", entry_dtype, "int32")
    block = EXTENT_TOKENS * 2 * (dim if scales is None else dim + SCALE_DTYPE.itemsize)
    for name, strides, head in (("window", window_stride, window_rows * 2 * dim), ("rows", rows_stride, block)):
        if strides[1:] != (head, 2 * dim, dim, 1):
            _refuse(f"{name} strides", strides, f"{(head, 2 * dim, dim, 1)} but for the first dimension")
    if scales is not None:
        outer = [stride // SCALE_DTYPE.itemsize for stride in rows_stride[:2]]
        behind = EXTENT_TOKENS * 2 * dim, (*outer, 2, 1)
        if scales != (*behind, SCALE_DTYPE):
            _refuse("scales' offset, strides, dtype", scales, f"{behind}, {SCALE_DTYPE}: behind a block's rows")
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
            rounded=scales is not None,
        )
    )


def causal_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    library: CpuLibrary,
    window: int | None = None,
) -> Tensor:
    """Attend from the last q tokens of a sequence to the whole sequence, causally; the reference is in engine/model/reference.py.

    Sums are float32. To the bit, the result of a query does not depend on the other queries of the call, on keys and values
    of later blocks, or on the number of threads.

    Parameters
    ----------
    queries : Tensor [H, q, D]
        float32 or bfloat16, on the CPU; D is even. Only the last dimension need be contiguous, here and below.
    keys, values : Tensor [G, n, D], n >= q >= 1, H a multiple of G
        dtype and device of the queries.
    scaling : float
        Factor of the scores, > 0.
    window : int, optional
        Latest tokens that each attends to, itself included; None: all.

    Returns
    -------
    Tensor [q, H, D], contiguous

    Raises
    ------
    KernelError
        On a shape, dtype, device or stride that the kernel does not support.
    """
    heads, q, dim = queries.shape
    kv_heads, n = keys.shape[:2]
    _check_prompt(queries, keys, values, scaling)
    out = queries.new_empty(q, heads, dim)
    arguments = CausalAttentionArguments(
        queries=queries.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        out=out.data_ptr(),
        query_head_stride=queries.stride(0),
        query_stride=queries.stride(1),
        key_head_stride=keys.stride(0),
        key_stride=keys.stride(1),
        value_head_stride=values.stride(0),
        value_stride=values.stride(1),
        kv_heads=kv_heads,
        group=heads // kv_heads,
        q=q,
        n=n,
        dim=dim,
        window=window or 0,
        bfloat16=queries.dtype is torch.bfloat16,
        threads=torch.get_num_threads(),
        scaling=scaling,
    )
    library.function("kvseek_causal_attention", CausalAttentionArguments)(arguments)
    return out


def _check_prompt(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
    refuse = partial(_refuse, kernel="native causal attention")
    heads, q, dim = queries.shape
    kv_heads, n = keys.shape[:2]
    if queries.dtype not in (torch.float32, torch.bfloat16):
        refuse("dtype", queries.dtype, "float32 or bfloat16")
    if dim % 2:
        refuse("head_dim", dim, "even")
    if heads % kv_heads:
        refuse("num_heads", heads, f"a multiple of num_kv_heads = {kv_heads}")
    if not 1 <= q <= n:
        refuse("queries", q, f"1 to {n}, the number of keys")
    if not scaling > 0:
        refuse("scaling", scaling, "> 0")
    for name, part in (("keys", keys), ("values", values)):
        if (part.shape, part.dtype) != ((kv_heads, n, dim), queries.dtype):
            refuse(name, (tuple(part.shape), part.dtype), f"{(kv_heads, n, dim)}, {queries.dtype}")
    for name, part in (("queries", queries), ("keys", keys), ("values", values)):
        if not part.is_cpu or part.stride(2) != 1:
            refuse(f"{name}' device and strides", (part.device, part.stride()), "the CPU, and 1 in the last dimension")


def _refuse(name: str, value: Any, limit: str, kernel: str = "native attention") -> None:
    raise KernelError(f"{kernel}: {name} = {value}: must be {limit}; {REMEDY}")
