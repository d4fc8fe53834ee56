"""PRKV with codes on the CPU, with compiled kernels: the reference's index, encoded and searched in C++."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from functools import partial

from torch import Tensor

from kvseek.core.cpu_library import pointer
from kvseek.plugins.batch import Batch
from kvseek.plugins.codes.key_codes import STEPS
from kvseek.plugins.codes.native import NativeCodeStore
from kvseek.plugins.contract import IndexContext
from kvseek.plugins.selection import Selection
from kvseek.plugins.shared.native_selection import NativeSelection

from .native_observe import observe
from .reference import ReferenceIndex
from .summaries import CODE_BITS, Codes


class PrkvSelectArguments(ctypes.Structure):
    """Arguments of kvseek_prkv_select, as in select.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("queries", "rows", "requests")),
        *((name, c_void_p) for name in ("high", "scales", "means", "mean_steps", "table", "signs")),
        *((name, c_void_p) for name in ("static_rows", "picked", "recent", "received")),
        *((name, c_int64) for name in ("batch", "kv_heads", "group", "dim", "padded_dim", "max_extents", "top_k")),
        *((name, c_int64) for name in ("page", "window_queries", "block", "bfloat16", "threads")),
        *((name, c_double) for name in ("scaling", "step")),
    )


class NativeCodes(Codes):
    """The codes of `Codes`, made by the compiled kernel."""

    store_type = NativeCodeStore
    store: NativeCodeStore


class NativeIndex(ReferenceIndex):
    """The reference's arrays, filled and searched by compiled kernels.

    From equal codes, estimates equal the reference's to the bit; pages' scores and softmax weights differ by rounding, and so do
    the scores that a static set is chosen by.
    """

    summaries: NativeCodes

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context, NativeCodes(context))
        assert context.library is not None, "create() makes a NativeIndex only for a compiled library"
        self.observe = partial(observe, context.library)
        arguments = PrkvSelectArguments(
            **self.summaries.store.arguments,
            static_rows=pointer(self.static_rows),
            picked=pointer(self.picked),
            recent=pointer(self.recent),
            received=self.received.buffer_info()[0],
            group=context.group_size,
            top_k=self.config.top_k,
            page=self.config.page,
            window_queries=self.config.window_queries,
            scaling=context.scaling,
            step=STEPS[CODE_BITS],
        )
        select = context.library.function("kvseek_prkv_select", c_void_p)
        self._selection = NativeSelection(select, arguments, context, self.config.page)

    def select(self, queries: Tensor, batch: Batch) -> Selection:
        """See ReferenceIndex.select."""
        return self._selection(queries, batch)
