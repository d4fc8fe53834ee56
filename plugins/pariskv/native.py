"""ParisKV on the CPU with compiled kernels: the reference's index, encoded and searched in C++."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p

import torch
from torch import Tensor

from kvseek.core.batch import Batch
from kvseek.core.cpu_library import pointer
from kvseek.core.index_context import IndexContext, ShapeLimits
from kvseek.core.selection import Selection
from kvseek.kernels.arguments import require_fit
from kvseek.kernels.cpu.selection import NativeSelection, require_native

from .reference import ReferenceIndex

LIMITS = ShapeLimits(max_head_dim=256, max_group_size=16)  # MAX_PADDED_DIM of rotation.h, lanes of byte_votes.h
INT32_BYTES = 4


class EncodeArguments(ctypes.Structure):
    """Arguments of kvseek_pariskv_encode, as in encode.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "ids", "codes", "weights")),
        *((name, c_void_p) for name in ("extents", "signs", "levels", "thresholds")),
        *((name, c_int64) for name in ("kv_heads", "tokens", "dim", "padded_dim")),
        *((name, c_int64) for name in ("first", "bfloat16", "threads")),
    )


class SelectArguments(ctypes.Structure):
    """Arguments of kvseek_pariskv_select, as in select.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("queries", "rows", "requests")),
        *((name, c_void_p) for name in ("ids", "codes", "weights", "counts", "table", "signs", "levels")),
        *((name, c_int64) for name in ("batch", "kv_heads", "group", "dim", "padded_dim", "max_extents", "top_k")),
        *((name, c_int64) for name in ("mean", "bfloat16", "threads")),
        ("scaling", c_double),
    )


class NativeIndex(ReferenceIndex):
    """The reference's arrays, filled and searched by compiled kernels.

    Centroid ids, counts, votes and candidates equal the reference's to the bit. Magnitudes that are equal to a threshold up to
    rounding may get the neighbouring level, and estimates differ by rounding.
    """

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        assert context.library is not None, "create() makes a NativeIndex only for a compiled library"
        require_native("native ParisKV", context, LIMITS)
        self._encode = context.library.function("kvseek_pariskv_encode", c_void_p)
        self._shared = {
            "ids": pointer(self.ids),
            "codes": pointer(self.codes),
            "weights": pointer(self.weights),
            "signs": pointer(self.signs),
            "levels": pointer(self.levels),
            "kv_heads": context.num_kv_heads,
            "dim": context.head_dim,
            "padded_dim": self.padded_dim,
            "bfloat16": context.dtype is torch.bfloat16,
        }
        arguments = SelectArguments(
            **self._shared,
            counts=pointer(self.counts),
            group=context.group_size,
            top_k=self.config.top_k,
            mean=self.config.group_reduce == "mean",
            scaling=context.scaling,
        )
        select = context.library.function("kvseek_pariskv_select", c_void_p)
        self._selection = NativeSelection(select, arguments, context)

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """See ReferenceIndex.append."""
        require_fit("keys", keys, self.context)
        keys, table = keys.contiguous(), self.context.extents.table
        arguments = EncodeArguments(
            **self._shared,
            keys=pointer(keys),
            extents=pointer(table) + slot * table.shape[1] * INT32_BYTES,
            thresholds=pointer(self.thresholds),
            tokens=keys.shape[1],
            first=start,
            threads=torch.get_num_threads(),
        )
        self._encode(ctypes.byref(arguments))

    def select(self, queries: Tensor, batch: Batch) -> Selection:
        """See ReferenceIndex.select."""
        return self._selection(queries, batch)
