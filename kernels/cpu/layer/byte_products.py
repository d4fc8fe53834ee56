"""Products of few rows with int8 weights by the compiled CPU kernel, kernels/cpu/layer/byte_products.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.core.cpu_library import CpuLibrary, pointer
from kvseek.core.errors import KernelError
from kvseek.core.weight_only import INPUTS_MULTIPLE
from kvseek.kernels.structs import c_struct

ByteProductArguments = c_struct("kernels/cpu/layer/byte_products.cpp", "ByteProductArguments")


class ByteProduct:
    """x (scale · weight)ᵀ + bias, rounded once; sums are float32.

    To the bit, a row's result depends neither on the other rows nor on the number of threads.

    Parameters
    ----------
    weight : Tensor, int8 [outputs, inputs], contiguous
        `inputs` is a multiple of INPUTS_MULTIPLE.
    scale : Tensor, bfloat16 [outputs]
    bias : Tensor, bfloat16 [outputs], or None

    Raises
    ------
    KernelError
        On tensors that the kernel does not support.
    """

    def __init__(self, library: CpuLibrary, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        if weight.dtype is not torch.int8 or weight.shape[1] % INPUTS_MULTIPLE:
            raise KernelError(
                f"weight: {weight.dtype} {tuple(weight.shape)}: must be int8 with a multiple of {INPUTS_MULTIPLE} inputs"
            )
        for name, part in (("scale", scale), ("bias", bias)):
            if part is not None and part.dtype is not torch.bfloat16:
                raise KernelError(f"{name}: {part.dtype}: must be bfloat16; convert it before")
        self._kernel = library.function("kvseek_byte_product", ByteProductArguments)
        self._kept = weight, scale, bias  # the kernel reads them where they lie
        self._outputs, self._inputs = weight.shape
        fixed = ByteProductArguments(
            weight=pointer(weight),
            scale=pointer(scale),
            bias=None if bias is None else pointer(bias),
            outputs=self._outputs,
            inputs=self._inputs,
        )
        self._fixed = bytes(fixed)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x bfloat16 [rows, inputs]: bfloat16 [rows, outputs]. Raises KernelError for another x."""
        if x.dtype is not torch.bfloat16 or x.shape[1] != self._inputs:
            raise KernelError(f"x: {x.dtype} {tuple(x.shape)}: must be bfloat16 [rows, {self._inputs}]")
        x = x.contiguous()
        out = torch.empty((x.shape[0], self._outputs), dtype=torch.bfloat16)
        arguments = ByteProductArguments.from_buffer_copy(self._fixed)
        arguments.x = pointer(x)
        arguments.out = out.data_ptr()
        arguments.rows = x.shape[0]
        arguments.threads = torch.get_num_threads()
        self._kernel(arguments)
        return out
