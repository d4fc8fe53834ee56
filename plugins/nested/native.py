"""The nested method on the CPU with compiled kernels: the reference's index, encoded and searched in C++."""

from __future__ import annotations

from torch import Tensor

from kvseek.core.batch import Batch, Selection
from kvseek.core.index_context import IndexContext
from kvseek.kernels.cpu.codes.store import NativeCodeStore
from kvseek.kernels.cpu.selection import NativeSelection
from kvseek.kernels.reference.codes.key_codes import BITS, STEPS
from kvseek.kernels.structs import c_struct

from .reference import ReferenceIndex

NestedSelectArguments = c_struct("plugins/nested/cpu/select.cpp", "NestedSelectArguments")


class NativeIndex(ReferenceIndex):
    """The reference's arrays, filled and searched by compiled kernels.

    From equal codes, candidates and estimates equal the reference's to the bit; only softmax weights differ by rounding.
    """

    codes: NativeCodeStore

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        arguments = NestedSelectArguments(
            **self.codes.arguments,
            group=context.group_size,
            top_k=self.config.top_k,
            scaling=context.scaling,
            step=STEPS[BITS],
        )
        self._selection = NativeSelection("kvseek_nested_select", arguments, context)

    def select(self, queries: Tensor, batch: Batch) -> Selection:
        return self._selection(queries, batch)
