"""ParisKV on the CPU with compiled kernels: the reference's index, encoded and searched in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.core.batch import Batch, Selection
from kvseek.core.cpu_library import pointer
from kvseek.core.index_context import IndexContext
from kvseek.kernels.arguments import require_fit
from kvseek.kernels.cpu.selection import NativeSelection, require_native
from kvseek.kernels.structs import c_struct

from .reference import ReferenceIndex

INT32_BYTES = 4

EncodeArguments = c_struct("plugins/pariskv/cpu/encode.cpp", "EncodeArguments")
SelectArguments = c_struct("plugins/pariskv/cpu/select.cpp", "SelectArguments")


class NativeIndex(ReferenceIndex):
    """The reference's arrays, filled and searched by compiled kernels.

    Centroid ids, counts, votes and candidates equal the reference's to the bit. Magnitudes that are equal to a threshold up to
    rounding may get the neighbouring level, and estimates differ by rounding.
    """

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        assert context.library is not None, "create() makes a NativeIndex only for a compiled library"
        require_native("native ParisKV", context)
        self._encode = context.library.function("kvseek_pariskv_encode", EncodeArguments)
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
        self._selection = NativeSelection("kvseek_pariskv_select", arguments, context)

    def append(self, slot: int, start: int, keys: Tensor) -> None:
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
        self._encode(arguments)

    def select(self, queries: Tensor, batch: Batch) -> Selection:
        return self._selection(queries, batch)
