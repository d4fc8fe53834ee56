"""Launches the kernels of engine/model/cuda/weight_only.cu: products with weights of 8 bits.

Functions launch on the current stream, can be captured in a CUDA graph and read nothing back. Tensors are contiguous and on
the kernels' GPU.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvseek.core.errors import KernelError

from .weight_only import INPUTS_MULTIPLE, NONE, PRECISIONS

if TYPE_CHECKING:
    from kvseek.core.config import EngineConfig
    from kvseek.core.cuda import CudaKernels

# As in weight_only.cu.
DEQUANTISE_THREADS = 256
WARP = 32
DEPTH = 2
ALIGNMENT = 16  # bytes: alignment of x, weights and products, because lanes load and store so many bytes at once


@dataclass(frozen=True)
class Shape:
    """A kernel kvseek_weight_only_linear_<rows>_<warps>: its thread blocks compute 16 × `row_tiles` output channels each."""

    rows: int
    warps: int
    row_tiles: int

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return f"kvseek_weight_only_linear_{self.rows}_{self.warps}"

    @property
    def channels(self) -> int:
        """Output channels of a thread block."""
        return 16 * self.row_tiles

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory: blocks of weights that are being loaded, and the sums of all warps but one."""
        ring = self.warps * DEPTH * self.row_tiles * 4 * WARP * 16
        return ring + (self.warps - 1) * self.row_tiles * self.rows // 8 * 4 * WARP * 4


# Measured on an H200 with the matrices of Llama-3.1-8B. For each largest number of rows: shapes in descending order of output
# channels per multiprocessor, each with the fewest channels per multiprocessor for which it is chosen.
SHAPES = {
    8: ((128, Shape(8, 4, 1)), (40, Shape(8, 8, 1)), (0, Shape(8, 16, 1))),
    16: ((40, Shape(16, 4, 2)), (0, Shape(16, 8, 1))),
    32: ((40, Shape(32, 4, 2)), (0, Shape(32, 8, 2))),
    64: ((0, Shape(64, 4, 2)),),
}
MAX_ROWS = max(SHAPES)


def choose_shape(rows: int, channels: float) -> Shape:
    """Choose the kernel for `rows` of x and `channels` outputs per multiprocessor; raises KernelError above MAX_ROWS."""
    for most, shapes in SHAPES.items():
        if rows <= most:
            return next(shape for fewest, shape in shapes if channels >= fewest)
    raise KernelError(f"rows = {rows}: must be <= {MAX_ROWS}; dequantise the weight to multiply more")


class WeightOnlyLinearArguments(ctypes.Structure):
    """Arguments of kvseek_weight_only_linear_8_4 and its kind."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight", "scale", "bias", "out")),
        *((name, c_int32) for name in ("rows", "outputs", "inputs")),
    )


class DequantiseArguments(ctypes.Structure):
    """Arguments of kvseek_dequantise."""

    _fields_ = (*((name, c_void_p) for name in ("weight", "scale", "out")), ("inputs", c_int32))


class WeightOnlyKernels:
    """Products with weights of one precision.

    Parameters
    ----------
    kernels : CudaKernels
        Compiled for `precision` and `dtype`.
    precision : str
        "int8" or "fp8".
    dtype : torch.dtype
        Dtype of x and of the products: bfloat16 or float16.

    Attributes
    ----------
    max_rows : int
        Most rows that `linear` multiplies.
    """

    max_rows = MAX_ROWS

    def __init__(self, kernels: CudaKernels, precision: str, dtype: torch.dtype) -> None:
        self._kernels, self.dtype, self.weight_dtype = kernels, dtype, PRECISIONS[precision][0]

    def linear(self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x [rows, inputs] with a weight [outputs, inputs]: (x weightᵀ) scale + bias, [rows, outputs].

        Sums are in float32 and rounded once.

        Parameters
        ----------
        scale : Tensor, float32 [outputs]
        bias : Tensor [outputs] or None

        Raises
        ------
        KernelError
            If there are more than `max_rows` rows, or the kernels cannot read a tensor.
        """
        (rows, inputs), outputs = x.shape, weight.shape[0]
        shape = choose_shape(rows, outputs / self._kernels.multiprocessors)
        out = x.new_empty(rows, outputs)
        arguments = WeightOnlyLinearArguments(
            x=self._aligned("x", x, self.dtype),
            weight=self._weight(weight, inputs),
            scale=self._address("scale", scale, torch.float32),
            bias=0 if bias is None else self._address("bias", bias, self.dtype),
            out=out.data_ptr(),
            rows=rows,
            outputs=outputs,
            inputs=inputs,
        )
        grid = -(-outputs // shape.channels), 1, 1
        self._kernels.launch(shape.name, grid, shape.warps * WARP, arguments, shape.shared_bytes, overlap=True)
        return out

    def dequantise(self, weight: Tensor, scale: Tensor) -> Tensor:
        """Multiply a weight [outputs, inputs] with its scale, float32 [outputs]; the result has the products' dtype."""
        outputs, inputs = weight.shape
        out = torch.empty(outputs, inputs, dtype=self.dtype, device=weight.device)
        arguments = DequantiseArguments(
            weight=self._weight(weight, inputs),
            scale=self._address("scale", scale, torch.float32),
            out=out.data_ptr(),
            inputs=inputs,
        )
        self._kernels.launch("kvseek_dequantise", (outputs, 1, 1), DEQUANTISE_THREADS, arguments, overlap=True)
        return out

    def _weight(self, weight: Tensor, inputs: int) -> int:
        if weight.shape[1] != inputs or inputs % INPUTS_MULTIPLE:
            raise KernelError(
                f"weight {tuple(weight.shape)} for x of {inputs} channels: must have as many, a multiple of "
                f"{INPUTS_MULTIPLE}; build with weight_only_precision none"
            )
        return self._aligned("weight", weight, self.weight_dtype)

    def _aligned(self, name: str, tensor: Tensor, dtype: torch.dtype) -> int:
        address = self._address(name, tensor, dtype)
        if address % ALIGNMENT:  # a kernel's fault would end every request of the process
            raise KernelError(
                f"{name}: address {address:#x}: must be a multiple of {ALIGNMENT}; copy the tensor before the launch"
            )
        return address

    def _address(self, name: str, tensor: Tensor, dtype: torch.dtype) -> int:
        if tensor.dtype is not dtype or tensor.device != self._kernels.device or not tensor.is_contiguous():
            raise KernelError(
                f"{name}: {tensor.dtype} on {tensor.device}, strides {tensor.stride()}: must be contiguous {dtype} on "
                f"{self._kernels.device}; convert it before the launch"
            )
        return tensor.data_ptr()


def weight_only_kernels(config: EngineConfig, kernels: CudaKernels) -> WeightOnlyKernels | None:
    """Make the kernels for an engine's weights of 8 bits; None if its weights are in its dtype."""
    precision = config.weight_only_precision
    return None if precision == NONE else WeightOnlyKernels(kernels, precision, getattr(torch, config.dtype))
