"""Attention of one decode step by the compiled CPU kernel: rows are read where they lie, in the window and the row pool."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.cpu_library import CpuLibrary, pointer
from kvseek.core.errors import KernelError
from kvseek.plugins.layer_cache import LayerCache
from kvseek.plugins.selection import Selection

MAX_HEAD_DIM = 256
MAX_GROUP_SIZE = 16
REMEDY = "build the engine with --kernels reference"


class AttendArguments(ctypes.Structure):
    """Arguments of kvseek_attend, as in rows.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("queries", "out", "slots", "window", "window_tokens", "rows", "table")),
        *((name, c_void_p) for name in ("lengths", "selected")),
        *((name, c_int64) for name in ("batch", "kv_heads", "group", "dim")),
        *((name, c_int64) for name in ("window_rows", "window_stride", "sink", "extent_stride", "max_extents")),
        *((name, c_int64) for name in ("entries", "block", "bfloat16", "threads")),
        ("scaling", c_double),
    )


@lru_cache(maxsize=8)
def kernel(library: CpuLibrary) -> ctypes._NamedFuncPointer:
    """kvseek_attend of a library, declared once."""
    return library.function("kvseek_attend", c_void_p)


def attend_native(
    queries: Tensor, selection: Selection, cache: LayerCache, scaling: float, library: CpuLibrary
) -> Tensor:
    """Attend over the window and the selected retrieval rows: what attention.attend_reference computes.

    Scores, softmax and sums are float32. The result of a request does not depend on the rest of the batch nor on the
    number of threads, to the bit.

    Parameters
    ----------
    queries : Tensor [batch, H, D]
        float32 or bfloat16 as the cache, on the CPU. D is a multiple of 8 up to 256, H/G at most 16.

    Returns
    -------
    Tensor [batch, H, D], dtype of the queries

    Raises
    ------
    KernelError
        On a shape, dtype or device that the kernel does not support.
    """
    window, rows, selected = cache.window, cache.rows, selection.rows
    if not (queries.is_cpu and window.is_cpu and rows.is_cpu and selected.is_cpu):
        _refuse("device", queries.device, "the CPU, as are cache and selection")
    layout = _layout(
        (queries.shape, queries.dtype, selected.shape, selected.dtype),
        (window.shape, window.stride(), window.dtype, rows.stride(), rows.dtype),
    )
    queries, selected = queries.contiguous(), selected.contiguous()
    out = torch.empty_like(queries)
    slots = (ctypes.c_int32 * len(cache.slots))(*cache.slots)
    arguments = AttendArguments.from_buffer_copy(layout)
    arguments.queries = queries.data_ptr()
    arguments.out = out.data_ptr()
    arguments.slots = ctypes.addressof(slots)
    arguments.window = window.data_ptr()
    arguments.window_tokens = pointer(cache.window_tokens)
    arguments.rows = rows.data_ptr()
    arguments.table = pointer(cache.table)
    arguments.lengths = pointer(cache.lengths)
    arguments.selected = selected.data_ptr()
    arguments.sink = cache.sink
    arguments.max_extents = cache.table.shape[1]
    arguments.block = selection.block
    arguments.threads = torch.get_num_threads()
    arguments.scaling = scaling
    kernel(library)(ctypes.byref(arguments))
    return out


@lru_cache(maxsize=64)
def _layout(query: tuple[Any, ...], cache: tuple[Any, ...]) -> bytes:
    # Checked and laid out once for a combination of shapes: this runs in every layer of every step.
    (batch, heads, dim), dtype, (_, _, entries), entry_dtype = query
    (_, kv_heads, window_rows, _, _), window_stride, window_dtype, rows_stride, rows_dtype = cache
    group = heads // kv_heads
    if dtype not in (torch.float32, torch.bfloat16):
        _refuse("dtype", dtype, "float32 or bfloat16")
    if (window_dtype, rows_dtype) != (dtype, dtype):
        _refuse("cache dtype", (window_dtype, rows_dtype), f"{dtype} as the queries")
    if dim % 8 or dim > MAX_HEAD_DIM:
        _refuse("head_dim", dim, f"a multiple of 8 up to {MAX_HEAD_DIM}")
    if not 1 <= group <= MAX_GROUP_SIZE:
        _refuse("query heads per KV head", group, f"1 to {MAX_GROUP_SIZE}")
    if entry_dtype is not torch.int32:
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
            entries=entries,
            bfloat16=dtype is torch.bfloat16,
        )
    )


def _refuse(name: str, value: Any, limit: str) -> None:
    raise KernelError(f"native attention: {name} = {value}: must be {limit}; {REMEDY}")
