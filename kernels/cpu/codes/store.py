"""Nested key codes on the CPU, encoded by a compiled kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.core.cpu_library import pointer
from kvseek.core.index_context import IndexContext
from kvseek.kernels.arguments import require_fit
from kvseek.kernels.cpu.selection import require_native
from kvseek.kernels.reference.codes.key_codes import BITS, STEPS
from kvseek.kernels.reference.codes.store import CodeStore
from kvseek.kernels.structs import c_struct

INT32_BYTES = 4

CodesEncodeArguments = c_struct("kernels/cpu/codes/encode.cpp", "CodesEncodeArguments")


class NativeCodeStore(CodeStore):
    """The arrays of `CodeStore`, filled by the compiled kernel.

    A channel within rounding of the border of two cells may get the other cell's code, and scales differ by rounding.
    """

    def __init__(self, context: IndexContext, signs: Tensor, bits: int = BITS) -> None:
        super().__init__(context, signs, bits)
        require_native("native key codes", context)
        assert context.library is not None, "indexes make a NativeCodeStore only for a compiled library"
        self._encode = context.library.function("kvseek_codes_encode", CodesEncodeArguments)

    @property
    def arguments(self) -> dict[str, int]:
        """Addresses and sizes that every kernel on these codes is given, by the names of its arguments.

        There is no `low` if codes have 2 bits.
        """
        return {
            "high": pointer(self.high),
            **({"low": pointer(self.low)} if self.bits == BITS else {}),
            "scales": pointer(self.scales),
            "means": pointer(self.means),
            "mean_steps": pointer(self.mean_steps),
            "block": self.block,
            "signs": pointer(self.signs),
            "kv_heads": self.context.num_kv_heads,
            "dim": self.context.head_dim,
            "padded_dim": self.signs.shape[0],
            "bfloat16": self.context.dtype is torch.bfloat16,
        }

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        require_fit("keys", keys, self.context)
        keys, table = keys.contiguous(), self.context.extents.table
        arguments = CodesEncodeArguments(
            **self.arguments,
            keys=pointer(keys),
            extents=pointer(table) + slot * table.shape[1] * INT32_BYTES,
            tokens=keys.shape[1],
            first=start,
            threads=torch.get_num_threads(),
            bits=self.bits,
            step=STEPS[self.bits],
        )
        self._encode(arguments)
