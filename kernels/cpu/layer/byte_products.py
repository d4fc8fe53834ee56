"""Products of bfloat16 rows with int8 weights by the compiled CPU kernels, kernels/cpu/layer/byte_products.cpp."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvseek.core.cpu_library import CpuLibrary, pointer
from kvseek.core.errors import KernelError
from kvseek.core.weight_only import INPUTS_MULTIPLE
from kvseek.kernels.structs import c_struct

MOST_INPUTS = 1 << 16  # of a prompt's product: sums of 255 * 127 fit 32 bits
ByteProductArguments = c_struct("kernels/cpu/layer/byte_products.cpp", "ByteProductArguments")


class ByteProduct:
    """x (scale · weight)ᵀ + bias, rounded once; sums are float32.

    `of_prompt` is faster for more than a few rows where the processor has VNNI, and slow elsewhere. It rounds the numbers of a
    row of x to multiples of the largest / 32,767; sums are exact integers.

    To the bit, a row's result depends neither on the other rows nor on the number of threads, but on which of the two it is.

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
        self._prompt_kernel = library.function("kvseek_byte_product_prompt", ByteProductArguments)
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
        return self._run(self._kernel, x)

    def of_prompt(self, x: Tensor) -> Tensor:
        """Multiply as a call does, with x rounded to 16 bits a row; `inputs` is at most MOST_INPUTS."""
        return self._run(self._prompt_kernel, x)

    def _run(self, kernel: ctypes._NamedFuncPointer, x: Tensor) -> Tensor:
        if x.dtype is not torch.bfloat16 or x.shape[1] != self._inputs:
            raise KernelError(f"x: {x.dtype} {tuple(x.shape)}: must be bfloat16 [rows, {self._inputs}]")
        x = x.contiguous()
        out = torch.empty((x.shape[0], self._outputs), dtype=torch.bfloat16)
        arguments = ByteProductArguments.from_buffer_copy(self._fixed)
        arguments.x = pointer(x)
        arguments.out = out.data_ptr()
        arguments.rows = x.shape[0]
        arguments.threads = torch.get_num_threads()
        kernel(arguments)
        return out
