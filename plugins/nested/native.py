"""The nested method on the CPU with compiled kernels: the reference's index, encoded and searched in C++."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p

from torch import Tensor

from kvseek.core.batch import Batch
from kvseek.core.index_context import IndexContext
from kvseek.core.selection import Selection
from kvseek.kernels.cpu.codes.store import NativeCodeStore
from kvseek.kernels.cpu.selection import NativeSelection
from kvseek.kernels.reference.codes.key_codes import BITS, STEPS

from .reference import ReferenceIndex


class NestedSelectArguments(ctypes.Structure):
    """Arguments of kvseek_nested_select, as in select.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("queries", "rows", "requests")),
        *((name, c_void_p) for name in ("high", "low", "scales", "means", "mean_steps", "table", "signs")),
        *((name, c_int64) for name in ("batch", "kv_heads", "group", "dim", "padded_dim", "max_extents", "top_k")),
        *((name, c_int64) for name in ("block", "bfloat16", "threads")),
        *((name, c_double) for name in ("scaling", "step")),
    )


class NativeIndex(ReferenceIndex):
    """The reference's arrays, filled and searched by compiled kernels.

    From equal codes, candidates and estimates equal the reference's to the bit; only softmax weights differ by rounding.
    """

    codes: NativeCodeStore

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        assert context.library is not None, "create() makes a NativeIndex only for a compiled library"
        arguments = NestedSelectArguments(
            **self.codes.arguments,
            group=context.group_size,
            top_k=self.config.top_k,
            scaling=context.scaling,
            step=STEPS[BITS],
        )
        select = context.library.function("kvseek_nested_select", c_void_p)
        self._selection = NativeSelection(select, arguments, context)

    def select(self, queries: Tensor, batch: Batch) -> Selection:
        """See ReferenceIndex.select."""
        return self._selection(queries, batch)
