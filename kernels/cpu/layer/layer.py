"""Calls the kernels of this folder: what a layer computes on the CPU besides selection, attention and oneDNN's products."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvseek.core.config import WEIGHT_GROUP, WEIGHT_GROUPS
from kvseek.core.cpu_library import CpuLibrary, pointer
from kvseek.core.errors import KernelError
from kvseek.core.weight_only import INPUTS_MULTIPLE, INT4, INT8_ASYMMETRIC, INT8_GROUPS, layout
from kvseek.kernels.layer import CompiledOperations
from kvseek.kernels.structs import c_struct

if TYPE_CHECKING:
    from kvseek.core.model_config import ModelConfig

ARGUMENTS = {
    "add_rms_norm": c_struct("kernels/cpu/layer/layer.cpp", "AddRmsNormArguments"),
    "rope_append": c_struct("kernels/cpu/layer/layer.cpp", "RopeAppendArguments"),
    "rope_prompt": c_struct("kernels/cpu/layer/layer.cpp", "RopePromptArguments"),
    "silu_mul": c_struct("kernels/cpu/layer/layer.cpp", "SiluMulArguments"),
}
ByteProductArguments = c_struct("kernels/cpu/layer/byte_products.cpp", "ByteProductArguments")
GroupProductArguments = c_struct("kernels/cpu/layer/group_products.cpp", "GroupProductArguments")
MOST_INPUTS = 1 << 16  # of a prompt's product: sums of 255 * 127 fit 32 bits


class NativeOperations(CompiledOperations):
    """The compiled operations of one model on the CPU.

    To the bit, a row's results depend neither on the other rows nor on the number of threads.

    Parameters
    ----------
    dtype : torch.dtype
        float32 or bfloat16.
    """

    def __init__(self, library: CpuLibrary, model: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(model, dtype, torch.device("cpu"))
        self._head_sizes["dim"] = model.head_dim
        self._functions = {name: library.function(f"kvseek_{name}", kind) for name, kind in ARGUMENTS.items()}

    def _run(self, kernel: str, rows: int, **arguments: float) -> None:
        bfloat16, threads = self.dtype is torch.bfloat16, torch.get_num_threads()
        self._functions[kernel](ARGUMENTS[kernel](rows=rows, bfloat16=bfloat16, threads=threads, **arguments))


class _Product:
    """Calls kernels of one struct of arguments with a weight, its scale and its bias, which they read where they lie."""

    def __init__(
        self,
        struct: type[ctypes.Structure],
        kernels: list[ctypes._NamedFuncPointer],
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        inputs: int,
        **other: int,
    ) -> None:
        if bias is not None and bias.dtype is not torch.bfloat16:
            raise KernelError(f"bias: {bias.dtype}: must be bfloat16; convert it before")
        self._struct, self._kernels, self._kept = struct, kernels, (weight, scale, bias)
        self._outputs, self.inputs = weight.shape[0], inputs
        self._fixed = bytes(
            struct(
                weight=pointer(weight),
                scale=pointer(scale),
                bias=None if bias is None else pointer(bias),
                outputs=self._outputs,
                inputs=inputs,
                **other,
            )
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x bfloat16 [rows, inputs]: bfloat16 [rows, outputs]. Raises KernelError for another x."""
        return self._run(self._kernels[0], x)

    def _run(self, kernel: ctypes._NamedFuncPointer, x: Tensor) -> Tensor:
        if x.dtype is not torch.bfloat16 or x.shape[1] != self.inputs:
            raise KernelError(f"x: {x.dtype} {tuple(x.shape)}: must be bfloat16 [rows, {self.inputs}]")
        x = x.contiguous()
        out = torch.empty((x.shape[0], self._outputs), dtype=torch.bfloat16)
        arguments = self._struct.from_buffer_copy(self._fixed)
        arguments.x = pointer(x)
        arguments.out = out.data_ptr()
        arguments.rows = x.shape[0]
        arguments.threads = torch.get_num_threads()
        kernel(arguments)
        return out


class ByteProduct(_Product):
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
        if scale.dtype is not torch.bfloat16:
            raise KernelError(f"scale: {scale.dtype}: must be bfloat16; convert it before")
        kernels = [library.function(f"kvseek_byte_product{kind}", ByteProductArguments) for kind in ("", "_prompt")]
        super().__init__(ByteProductArguments, kernels, weight, scale, bias, weight.shape[1])

    def of_prompt(self, x: Tensor) -> Tensor:
        """Multiply as a call does, with x rounded to 16 bits a row; `inputs` is at most MOST_INPUTS."""
        return self._run(self._kernels[1], x)


class GroupProduct(_Product):
    """ByteProduct for weights whose numbers are scaled in groups of inputs: one of GROUPED.

    Parameters
    ----------
    weight, scale : Tensor, contiguous
        As `quantise` makes them.
    bias : Tensor, bfloat16 [outputs], or None

    Raises
    ------
    KernelError
        On tensors that the kernel does not support.
    """

    def __init__(self, library: CpuLibrary, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        nibbles = weight.dtype is torch.uint8
        inputs = weight.shape[1] * (2 if nibbles else 1)
        group = inputs // max(1, scale.shape[1]) if nibbles else WEIGHT_GROUP
        group = group if group in WEIGHT_GROUPS else WEIGHT_GROUP
        zeros = not nibbles and scale.ndim == 3
        precision = INT4 if nibbles else INT8_ASYMMETRIC if zeros else INT8_GROUPS
        numbers, scales = layout((weight.shape[0], inputs), precision, group)
        for name, part, expected in (("weight", weight, numbers), ("scale", scale, scales)):
            if (tuple(part.shape), part.dtype) != expected or not part.is_contiguous():
                raise KernelError(
                    f"{name}: {part.dtype} {tuple(part.shape)}: must be {expected[1]} {expected[0]}, contiguous; "
                    "quantise it as core/weight_only.py does"
                )
        name = f"kvseek_{'nibble' if nibbles else 'zero_byte' if zeros else 'group_byte'}_product"
        kernels = [library.function(name + kind, GroupProductArguments) for kind in ("", "_prompt", "_values")]
        super().__init__(GroupProductArguments, kernels, weight, scale, bias, inputs, group=group)

    def of_prompt(self, x: Tensor) -> Tensor:
        """See ByteProduct.of_prompt."""
        return self._run(self._kernels[1], x)

    def values(self, dtype: torch.dtype) -> Tensor:
        """Dequantise the weight to bfloat16 or float32, [outputs, inputs]."""
        out = torch.empty((self._outputs, self.inputs), dtype=dtype)
        arguments = GroupProductArguments.from_buffer_copy(self._fixed)
        arguments.out, arguments.rows = out.data_ptr(), int(dtype is torch.bfloat16)
        arguments.threads = torch.get_num_threads()
        self._kernels[2](arguments)
        return out
