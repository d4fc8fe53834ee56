"""ParisKV on the CPU with compiled kernels: the reference's index, encoded and searched in C++."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from functools import lru_cache

import torch
from torch import Tensor

from kvseek.core.cpu_library import CpuLibrary, pointer
from kvseek.core.errors import KernelError
from kvseek.plugins.batch import Batch
from kvseek.plugins.contract import IndexContext, ShapeLimits
from kvseek.plugins.selection import Selection
from kvseek.plugins.shared.arguments import require_fit
from kvseek.plugins.shared.group import GROUP_REDUCTIONS

from .reference import ReferenceIndex

LIMITS = ShapeLimits(max_head_dim=256, max_group_size=16)  # MAX_PADDED_DIM of rotation.h, lanes of byte_votes.h
REMEDY = "build the engine with --kernels reference"
INT32_BYTES = 4


class EncodeArguments(ctypes.Structure):
    """Arguments of kvseek_pariskv_encode, as in encode.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "ids", "codes", "weights")),
        *((name, c_void_p) for name in ("extents", "signs", "levels", "thresholds")),
        *((name, c_int64) for name in ("kv_heads", "tokens", "dim", "padded_dim")),
        *((name, c_int64) for name in ("first", "alpha", "bfloat16", "threads")),
    )


class SelectArguments(ctypes.Structure):
    """Arguments of kvseek_pariskv_select, as in select.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("queries", "rows", "requests")),
        *((name, c_void_p) for name in ("ids", "codes", "weights", "counts", "table", "signs", "levels")),
        *((name, c_int64) for name in ("batch", "kv_heads", "group", "dim", "padded_dim", "max_extents", "top_k")),
        *((name, c_int64) for name in ("reduction", "bfloat16", "threads")),
        ("scaling", c_double),
    )


@lru_cache(maxsize=8)
def kernels(library: CpuLibrary) -> tuple[ctypes._NamedFuncPointer, ctypes._NamedFuncPointer]:
    """Return kvseek_pariskv_encode and kvseek_pariskv_select of a library, declared once."""
    encode = library.function("kvseek_pariskv_encode", c_void_p)
    return encode, library.function("kvseek_pariskv_select", c_void_p)


class NativeIndex(ReferenceIndex):
    """The reference's arrays, filled and searched by compiled kernels.

    Centroid ids, counts, votes and candidates equal the reference's to the bit. Magnitudes that are equal to a threshold up to
    rounding may get the neighbouring level, and estimates differ by rounding.
    """

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        assert context.library is not None, "create() makes a NativeIndex only for a compiled library"
        _check(context)
        self._encode, self._select = kernels(context.library)
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
        self._select_layout = bytes(
            SelectArguments(
                **self._shared,
                counts=pointer(self.counts),
                group=context.group_size,
                top_k=self.config.top_k,
                reduction=GROUP_REDUCTIONS.index(self.config.group_reduce),
                scaling=context.scaling,
            )
        )

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
            alpha=self.config.alpha_correction,
            threads=torch.get_num_threads(),
        )
        self._encode(ctypes.byref(arguments))

    def select(self, queries: Tensor, batch: Batch) -> Selection:
        """See ReferenceIndex.select."""
        require_fit("queries", queries, self.context)
        queries = queries.contiguous()
        rows = torch.empty((batch.size, self.context.num_kv_heads, self.config.top_k), dtype=torch.int32)
        arguments = SelectArguments.from_buffer_copy(self._select_layout)
        arguments.queries = queries.data_ptr()
        arguments.rows = rows.data_ptr()
        arguments.requests = pointer(batch.requests)
        arguments.table = pointer(batch.table)
        arguments.max_extents = batch.table.shape[1]
        arguments.batch = batch.size
        arguments.threads = torch.get_num_threads()
        self._select(ctypes.byref(arguments))
        return Selection(rows)


def _check(context: IndexContext) -> None:
    limits = (
        ("dtype", context.dtype, context.dtype in (torch.float32, torch.bfloat16), "float32 or bfloat16"),
        ("device", context.device, context.device.type == "cpu", "the CPU"),
    )
    for name, value, holds, limit in limits:
        if not holds:
            raise KernelError(f"native ParisKV: {name} = {value}: must be {limit}; {REMEDY}")
    if fault := LIMITS.fault(context.head_dim, context.group_size):
        raise KernelError(f"native ParisKV: {fault}; {REMEDY}")
