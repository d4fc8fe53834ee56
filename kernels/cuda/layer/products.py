"""Launches the kernels of kernels/cuda/layer/products.cu: products of decode steps, with weights of 16 or 8 bits.

Functions launch on the current stream, can be captured in a CUDA graph and read nothing back. Tensors are contiguous and on
the kernels' GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvseek.core.errors import KernelError
from kvseek.core.weight_only import NONE, PRECISIONS
from kvseek.kernels.arguments import checked_address
from kvseek.kernels.structs import c_struct

if TYPE_CHECKING:
    from kvseek.core.config import EngineConfig
    from kvseek.core.cuda import CudaKernels

# As in products.cu.
DEQUANTISE_THREADS = 256
WARP = 32
ALIGNMENT = 16  # bytes: alignment of x, weights and products, because lanes load and store so many bytes at once


@dataclass(frozen=True)
class Shape:
    """A kernel kvseek_[gated_]<name>_<rows>_<split>_<row_tiles>, for up to `rows` rows of x.

    Its thread blocks multiply 16 × `row_tiles` rows of a weight each, with `split` warps that each take a part of every sum.
    """

    rows: int
    split: int
    row_tiles: int

    @property
    def weight_rows(self) -> int:
        """Rows of the weight that a thread block multiplies."""
        return 16 * self.row_tiles

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory: two blocks of weights of each warp, and at the end the sums of all."""
        return self.split * self.row_tiles * WARP * 16 * max(2 * 4, self.rows // 8)


# By the bits of a weight. For weights in descending order of their rows per multiprocessor, each with the fewest: kernels for
# ever more rows of x. The bits of a sum depend on `split`, which is therefore the same for any number of rows of x. Measured on
# an H200 with the matrices of Llama-3.1-8B and Llama-3.2-1B.
SHAPES: dict[int, tuple[tuple[int, tuple[Shape, ...]], ...]] = {
    16: (
        (128, (Shape(8, 4, 1), Shape(16, 4, 2), Shape(32, 4, 2), Shape(64, 4, 3))),
        (40, (Shape(8, 8, 1), Shape(16, 8, 1), Shape(32, 8, 2), Shape(64, 8, 3))),
        (24, (Shape(8, 8, 1), Shape(16, 8, 1), Shape(32, 8, 1), Shape(64, 8, 2))),
        (0, (Shape(8, 16, 1), Shape(16, 16, 1), Shape(32, 16, 1), Shape(64, 16, 1))),
    ),
    8: (
        (128, (Shape(8, 4, 1), Shape(16, 4, 2), Shape(32, 4, 2), Shape(64, 4, 3))),
        (40, (Shape(8, 8, 1), Shape(16, 8, 2), Shape(32, 8, 3), Shape(64, 8, 3))),
        (0, (Shape(8, 8, 1), Shape(16, 8, 1), Shape(32, 8, 2), Shape(64, 8, 2))),
    ),
}
MOST_ROWS = 64  # of x: those of the largest decode step


def choose_shape(bits: int, rows: int, weight_rows: float) -> Shape:
    """Choose the kernel for `rows` of x and so many rows of a weight per multiprocessor; raises KernelError on too many rows."""
    if rows > MOST_ROWS:
        raise KernelError(f"rows = {rows}: must be <= {MOST_ROWS}; leave more to cuBLAS")
    shapes = next(shapes for fewest, shapes in SHAPES[bits] if weight_rows >= fewest)
    return next(shape for shape in shapes if rows <= shape.rows)


LinearArguments = c_struct("kernels/cuda/layer/products.cu", "LinearArguments")
DequantiseArguments = c_struct("kernels/cuda/layer/products.cu", "DequantiseArguments")


class ProductKernels:
    """Products with weights in the engine's dtype, and with weights of one 8-bit precision if there is one.

    Parameters
    ----------
    kernels : CudaKernels
        Compiled for `precision` and `dtype`.
    precision : str
        "int8", "fp8" or "none".
    dtype : torch.dtype
        Dtype of x and of the products: bfloat16 or float16.
    """

    def __init__(self, kernels: CudaKernels, precision: str, dtype: torch.dtype) -> None:
        self._kernels, self.dtype = kernels, dtype
        self._bytes = None if precision == NONE else PRECISIONS[precision][0]

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        *,
        gated: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Multiply x [rows, inputs] with a weight [outputs, inputs]: (x weightᵀ) scale + bias, [rows, outputs].

        Sums are in float32 and rounded once. A row's result depends to the bit on neither the number nor the other rows of x.

        Parameters
        ----------
        scale : Tensor, float32 [outputs], or None
            Of a weight of 8 bits.
        bias : Tensor [outputs] or None
        gated : bool
            The result is silu(first half of the outputs) times the second half, [rows, outputs / 2].
        out : Tensor [rows, outputs], optional
            Receives the result, and is returned; None: a new tensor.

        Raises
        ------
        KernelError
            If there are more than MOST_ROWS rows, or the kernels cannot read a tensor.
        """
        (rows, inputs), outputs = x.shape, weight.shape[0] // (2 if gated else 1)
        shape = choose_shape(8 * weight.itemsize, rows, weight.shape[0] / self._kernels.multiprocessors)
        if out is None:
            out = x.new_empty(rows, outputs)
        elif out.shape != (rows, outputs):
            raise KernelError(f"out {tuple(out.shape)}: must be {(rows, outputs)}; make it of this shape")
        arguments = LinearArguments(
            x=self._aligned("x", x, self.dtype),
            weight=self._weight(weight, inputs),
            scale=self._address("scale", scale, torch.float32),
            bias=self._address("bias", bias, self.dtype),
            out=self._address("out", out, self.dtype),
            rows=rows,
            outputs=outputs,
            inputs=inputs,
        )
        kind = "gated_" * gated + "weight_only_" * (weight.itemsize == 1)
        name = f"kvseek_{kind}linear_{shape.rows}_{shape.split}_{shape.row_tiles}"
        blocks = -(-weight.shape[0] // shape.weight_rows)
        # Measured with two and three blocks a multiprocessor. A single one would wait for more than half of the shared memory.
        even = blocks > self._kernels.multiprocessors
        threads, shared_bytes = shape.split * WARP, shape.shared_bytes
        self._kernels.launch(name, (blocks, 1, 1), threads, arguments, shared_bytes, overlap=True, even=even)
        return out

    def dequantise(self, weight: Tensor, scale: Tensor) -> Tensor:
        """Multiply a weight of 8 bits [outputs, inputs] with its scale, float32 [outputs]; the result has the products' dtype."""
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

    def _address(self, name: str, tensor: Tensor | None, dtype: torch.dtype) -> int:
        return checked_address(name, tensor, dtype, self._kernels.device)

    def _weight(self, weight: Tensor, inputs: int) -> int:
        multiple = ALIGNMENT // weight.itemsize
        if weight.shape[1] != inputs or inputs % multiple:
            raise KernelError(
                f"weight {tuple(weight.shape)} for x of {inputs} channels: must have as many, a multiple of "
                f"{multiple}; build with --device cpu"
            )
        return self._aligned("weight", weight, self._bytes if weight.itemsize == 1 and self._bytes else self.dtype)

    def _aligned(self, name: str, tensor: Tensor, dtype: torch.dtype) -> int:
        address = self._address(name, tensor, dtype)
        if address % ALIGNMENT:  # a kernel's fault would end every request of the process
            raise KernelError(
                f"{name}: address {address:#x}: must be a multiple of {ALIGNMENT}; copy the tensor before the launch"
            )
        return address


def product_kernels(config: EngineConfig, kernels: CudaKernels) -> ProductKernels | None:
    """Make the kernels for an engine's products; None for float32, which cuBLAS multiplies."""
    dtype = getattr(torch, config.dtype)
    return None if dtype is torch.float32 else ProductKernels(kernels, config.weight_only_precision, dtype)
