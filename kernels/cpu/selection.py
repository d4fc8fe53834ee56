"""Selections on the CPU by a compiled kernel: what every call is given, whatever the method."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from kvseek.core.batch import Batch, Selection
from kvseek.core.cpu_library import pointer
from kvseek.core.errors import KernelError
from kvseek.core.index_context import IndexContext
from kvseek.kernels.arguments import require_fit
from kvseek.kernels.cpu.attention.attend import LIMITS, REMEDY


class NativeSelection:
    """A kernel that chooses rows for the queries of a batch.

    Parameters
    ----------
    kernel : str
        Name of the function of the compiled library.
    arguments : ctypes.Structure
        What stays the same for an index. A call fills in queries, rows, requests, table, batch, max_extents and threads.
    """

    def __init__(self, kernel: str, arguments: ctypes.Structure, context: IndexContext) -> None:
        assert context.library is not None, "create() makes an index of compiled kernels only for a compiled library"
        self._function, self._context = context.library.function(kernel, type(arguments)), context
        self._shape = (context.num_kv_heads, context.config.top_k)
        self._type, self._fixed = type(arguments), bytes(arguments)

    def __call__(self, queries: Tensor, batch: Batch, **more: int) -> Selection:
        """Select for queries [batch, H, D]: rows int32 [batch, G, top_k]. Raises KernelError for another dtype.

        `more` are arguments of this call that other methods do not have.
        """
        require_fit("queries", queries, self._context)
        queries = queries.contiguous()
        rows = torch.empty((batch.size, *self._shape), dtype=torch.int32)
        arguments: Any = self._type.from_buffer_copy(self._fixed)
        arguments.queries = queries.data_ptr()
        arguments.rows = rows.data_ptr()
        arguments.requests = pointer(batch.requests)
        arguments.table = pointer(batch.table)
        arguments.max_extents = batch.table.shape[1]
        arguments.batch = batch.size
        arguments.threads = torch.get_num_threads()
        for name, value in more.items():
            setattr(arguments, name, value)
        self._function(arguments)
        return Selection(rows)


def require_native(kernels: str, context: IndexContext) -> None:
    """Raise KernelError, with the name of the kernels, unless they support an index's dtype, device and shape."""
    limits = (
        ("dtype", context.dtype, context.dtype in (torch.float32, torch.bfloat16), "float32 or bfloat16"),
        ("device", context.device, context.device.type == "cpu", "the CPU"),
    )
    for name, value, holds, limit in limits:
        if not holds:
            raise KernelError(f"{kernels}: {name} = {value}: must be {limit}; {REMEDY}")
    if fault := LIMITS.fault(context.head_dim, context.group_size):
        raise KernelError(f"{kernels}: {fault}; {REMEDY}")
