"""Nested key codes on the GPU, encoded by a kernel of each method that keeps them (cuda/encode.cuh)."""

from __future__ import annotations

from torch import Tensor

from kvseek.core.errors import KernelError
from kvseek.core.index_context import IndexContext
from kvseek.kernels.arguments import pointers, require_keys
from kvseek.kernels.reference.codes.key_codes import BITS
from kvseek.kernels.reference.codes.store import CodeStore
from kvseek.kernels.structs import c_struct

ENCODE_WARPS = 16
LEAST_BLOCK = 64  # neighbouring keys that share a mean at least, as in cuda/nested_codes.cuh
MIN_DIM, MAX_DIM = (
    64,
    256,
)  # head sizes whose rotated vectors kernels hold: two channels or more a lane (cuda/sizes.cuh)

EncodeArguments = c_struct("kernels/cuda/codes/encode.cuh", "EncodeArguments")


class CudaCodeStore(CodeStore):
    """The arrays of `CodeStore`, filled by a kernel.

    Codes equal the reference's but for channels that lie at the border of two cells up to rounding.
    """

    def __init__(self, context: IndexContext, signs: Tensor, bits: int = BITS) -> None:
        super().__init__(context, signs, bits)
        assert context.cuda is not None, "indexes make a CudaCodeStore only for CUDA kernels"
        self._kernels = context.cuda
        if self.block < LEAST_BLOCK:
            raise KernelError(
                f"cache.update = {context.update}: must be a multiple of {LEAST_BLOCK} with key codes on a GPU; "
                "256 is the default"
            )

    def arguments(self, *planes: str) -> dict[str, int]:
        """Return what kernels on these codes are given, by the names of their arguments; `planes` are those of the codes."""
        arrays = pointers(self, *planes, "scales", "means", "mean_steps", "signs")
        return {**arrays, "block_bits": self.block.bit_length() - 1}

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """See CodeStore.append. Runs on the current stream."""
        require_keys(keys, self.context)
        if not keys.shape[1]:
            return
        arguments = EncodeArguments(
            **self.arguments("high", "low"),
            keys=keys.data_ptr(),
            table=self.context.extents.device_table[slot].data_ptr(),
            head_stride=keys.stride(0),
            token_stride=keys.stride(1),
            kv_heads=self.context.num_kv_heads,
            tokens=keys.shape[1],
            first=start,
        )
        blocks = -(-(start + keys.shape[1]) // self.block) - start // self.block
        grid = (blocks, self.context.num_kv_heads, 1)
        self._kernels.launch("kvseek_codes_encode", grid, ENCODE_WARPS * 32, arguments)
