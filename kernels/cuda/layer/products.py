"""Launches the kernels of kernels/cuda/layer/products.cu: products of decode steps, with weights of 16, 8 or 4 bits.

Functions launch on the current stream, can be captured in a CUDA graph and read nothing back. Tensors are contiguous and on
the kernels' GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvseek.core.config import WEIGHT_GROUP, group_inputs
from kvseek.core.errors import KernelError
from kvseek.core.weight_only import INT4, INT8_ASYMMETRIC, INT8_GROUPS, NONE, layout
from kvseek.kernels.arguments import aligned_address, checked_address
from kvseek.kernels.structs import c_struct

if TYPE_CHECKING:
    from kvseek.core.config import EngineConfig
    from kvseek.core.cuda import CudaKernels

# As in products.cu.
DEQUANTISE_THREADS, QUANTISE_THREADS = 256, 256
WARP = 32
ALIGNMENT = 16  # bytes: alignment of x, weights and products, because lanes load and store so many bytes at once


@dataclass(frozen=True)
class Shape:
    """A kernel kvseek_[gated_]<name>_<rows>_<split>_<row_tiles>, for up to `rows` rows of x.

    Its thread blocks multiply 16 × `row_tiles` rows of a weight each, with `split` warps that each take a part of every sum. A
    warp has shared memory for `stages` blocks of weights.
    """

    rows: int
    split: int
    row_tiles: int
    stages: int = 2

    @property
    def name(self) -> str:
        """End of the name of the kernel."""
        return f"{self.rows}_{self.split}_{self.row_tiles}"

    @property
    def weight_rows(self) -> int:
        """Rows of the weight that a thread block multiplies."""
        return 16 * self.row_tiles

    def shared_bytes(self, scale_words: int) -> int:
        """Bytes of shared memory: the blocks of weights of each warp, and at the end the sums of all.

        A block has 128 bytes of each row and, of weights in groups, `scale_words` words of 4 bytes of scales.
        """
        blocks = self.stages * 16 * self.row_tiles * (128 + 4 * scale_words)
        sums = self.row_tiles * self.rows // 8 * WARP * 16
        return self.split * max(blocks, sums)


@dataclass(frozen=True)
class Format:
    """How weights are stored, and the kernels kvseek_[gated_]<kernel>_... that read them; core/weight_only.py has the layouts.

    Attributes
    ----------
    precision : str
        NONE, of PRECISIONS or GROUPED, or FP8_GROUPS.
    group : int
        Inputs of a group; 1: a scale a row, or none.
    weight, scale : torch.dtype
    """

    kernel: str
    precision: str
    group: int
    weight: torch.dtype
    scale: torch.dtype

    @classmethod
    def of(cls, precision: str, weight_group: int, dtype: torch.dtype) -> Format:
        """The format of an engine's weights of this precision, and dtype if that is NONE."""
        if precision == NONE:
            return cls("linear", precision, 1, dtype, torch.float32)
        group = group_inputs(precision, weight_group)
        kernel = f"{precision}_linear" if group > 1 else "weight_only_linear"
        (_, weight), (_, scale) = layout((1, 128), precision, weight_group)
        return cls(kernel, precision, group, weight, scale)

    @property
    def scale_axes(self) -> int:
        """Of the scales; 0 if there are none."""
        return 0 if self.precision == NONE else len(layout((1, 128), self.precision, WEIGHT_GROUP)[1][0])

    def inputs(self, weight: Tensor) -> int:
        """Inputs of a stored weight."""
        return weight.shape[1] * (2 if self.precision == INT4 else 1)

    @property
    def scale_words(self) -> int:
        """Words of 4 bytes of the scales of a row and 128 bytes of its weights, if they are in groups."""
        if self.group == 1:
            return 0
        (_, numbers), (scales, dtype) = layout((1, 256), self.precision, self.group)
        inputs = 128 * (2 if numbers is torch.uint8 else 1)
        return torch.Size(scales).numel() * dtype.itemsize * inputs // 256 // 4

    def scale_shape(self, weight: Tensor) -> tuple[int, ...]:
        """Of the scales of a stored weight."""
        return layout((weight.shape[0], self.inputs(weight)), self.precision, self.group)[1][0]


class Formats:
    """Formats of weights that kernels have been compiled for; a stored weight's type and its scales tell which it is of."""

    def __init__(self, precision: str, weight_group: int, dtype: torch.dtype, beside: Sequence[str]) -> None:
        formats = [Format.of(one, weight_group, dtype) for one in (*beside, precision)]
        self._formats = {(one.weight, one.scale_axes): one for one in formats}

    def __iter__(self) -> Iterator[Format]:
        return iter(self._formats.values())

    def of(self, weight: Tensor, scale: Tensor | None) -> Format:
        """The format of a stored weight; raises KernelError."""
        key = weight.dtype, 0 if scale is None else scale.ndim
        if key not in self._formats:
            groups = " in groups" * (key[1] > 1)
            known = " or ".join(f"{dtype}{' in groups' * (axes > 1)}" for dtype, axes in self._formats)
            raise KernelError(f"weight: {weight.dtype}{groups}: must be {known}; compile the kernels for its precision")
        return self._formats[key]


# By the kernel of a format. For weights in descending order of their rows per multiprocessor, each with the fewest: kernels for
# ever more rows of x. The bits of a sum depend on `split`, which is therefore the same for any number of rows of x. Measured on
# an H200 with the matrices of Llama-3.1-8B and Llama-3.2-1B.
SHAPES: dict[str, tuple[tuple[int, tuple[Shape, ...]], ...]] = {
    "linear": (
        (128, (Shape(8, 4, 1), Shape(16, 4, 2), Shape(32, 4, 2), Shape(64, 4, 3))),
        (40, (Shape(8, 8, 1), Shape(16, 8, 1), Shape(32, 8, 2), Shape(64, 8, 3))),
        (24, (Shape(8, 8, 1), Shape(16, 8, 1), Shape(32, 8, 1), Shape(64, 8, 2))),
        (0, (Shape(8, 16, 1), Shape(16, 16, 1), Shape(32, 16, 1), Shape(64, 16, 1))),
    ),
    "weight_only_linear": (
        (128, (Shape(8, 4, 1), Shape(16, 4, 2), Shape(32, 4, 2), Shape(64, 4, 3))),
        (40, (Shape(8, 8, 1), Shape(16, 8, 2), Shape(32, 8, 3), Shape(64, 8, 3))),
        (0, (Shape(8, 8, 1), Shape(16, 8, 1), Shape(32, 8, 2), Shape(64, 8, 2))),
    ),
    "int4_linear": (
        (64, (Shape(8, 4, 2), Shape(16, 4, 4), Shape(32, 4, 4), Shape(64, 4, 2))),
        (40, (Shape(8, 4, 1, 3), Shape(16, 4, 1), Shape(32, 4, 2), Shape(64, 4, 2))),
        (0, (Shape(8, 8, 1), Shape(16, 8, 1), Shape(32, 8, 2), Shape(64, 8, 2))),
    ),
    "int8_groups_linear": ((0, (Shape(8, 4, 2), Shape(16, 4, 2), Shape(32, 4, 2), Shape(64, 4, 2))),),
    # Not measured, as a layer's.
    "int8_asymmetric_linear": ((0, (Shape(8, 4, 2), Shape(16, 4, 2), Shape(32, 4, 2), Shape(64, 4, 2))),),
    "fp8_groups_linear": (
        (64, (Shape(8, 4, 2), Shape(16, 4, 2), Shape(32, 4, 2), Shape(64, 4, 2))),
        (0, (Shape(8, 8, 1), Shape(16, 8, 1), Shape(32, 8, 2), Shape(64, 8, 2))),
    ),
}
MOST_ROWS = 64  # of x: those of the largest decode step


def choose_shape(kernel: str, rows: int, weight_rows: float) -> Shape:
    """Choose that for `rows` of x and so many rows of a weight per multiprocessor; raises KernelError on too many rows."""
    if rows > MOST_ROWS:
        raise KernelError(f"rows = {rows}: must be <= {MOST_ROWS}; leave more to cuBLAS")
    shapes = next(shapes for fewest, shapes in SHAPES[kernel] if weight_rows >= fewest)
    return next(shape for shape in shapes if rows <= shape.rows)


LinearArguments = c_struct("kernels/cuda/layer/products.cu", "LinearArguments")
QuantiseArguments = c_struct("kernels/cuda/layer/products.cu", "QuantiseArguments")
DequantiseArguments = c_struct("kernels/cuda/layer/products.cu", "DequantiseArguments")


class ProductKernels:
    """Products with weights in the engine's dtype, and with weights of a precision of fewer bits if there is one.

    Parameters
    ----------
    kernels : CudaKernels
        Compiled for `precision`, `weight_group` and `dtype`.
    precision : str
        One of EngineConfig's weight_only_precision. Beside int4, heads may be of int8_groups.
    dtype : torch.dtype
        Dtype of x and of the products: bfloat16 or float16.
    weight_group : int
        Inputs of a group of int4.
    asymmetric : bool
        Whether there are weights of int8_asymmetric beside them.
    """

    def __init__(
        self,
        kernels: CudaKernels,
        precision: str,
        dtype: torch.dtype,
        weight_group: int = WEIGHT_GROUP,
        *,
        asymmetric: bool = False,
    ) -> None:
        self._kernels, self.dtype = kernels, dtype
        beside = (NONE, *((INT8_GROUPS,) if precision == INT4 else ()), *((INT8_ASYMMETRIC,) if asymmetric else ()))
        self.formats = Formats(precision, weight_group, dtype, beside)

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
        weight, scale : Tensor, Tensor or None
            As they are stored, see core/weight_only.py.
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
        form = self.formats.of(weight, scale)
        shape = choose_shape(form.kernel, rows, weight.shape[0] / self._kernels.multiprocessors)
        if out is None:
            out = x.new_empty(rows, outputs)
        elif out.shape != (rows, outputs):
            raise KernelError(f"out {tuple(out.shape)}: must be {(rows, outputs)}; make it of this shape")
        arguments = LinearArguments(
            x=self._aligned("x", x, self.dtype),
            weight=self._weight(form, weight, inputs),
            scale=self._scale(form, weight, scale),
            bias=self._address("bias", bias, self.dtype),
            out=self._address("out", out, self.dtype),
            rows=rows,
            outputs=outputs,
            inputs=inputs,
        )
        name = f"kvseek_{'gated_' * gated}{form.kernel}_{shape.name}"
        blocks = -(-weight.shape[0] // shape.weight_rows)
        # Measured with two and three blocks a multiprocessor. A single one would wait for more than half of the shared memory.
        even = blocks > self._kernels.multiprocessors
        threads, shared_bytes = shape.split * WARP, shape.shared_bytes(form.scale_words)
        self._kernels.launch(name, (blocks, 1, 1), threads, arguments, shared_bytes, overlap=True, even=even)
        return out

    def dequantise(self, weight: Tensor, scale: Tensor) -> Tensor:
        """Compute a stored weight [outputs, inputs] of 8 or 4 bits; the result has the products' dtype."""
        form = self.formats.of(weight, scale)
        outputs, inputs = weight.shape[0], form.inputs(weight)
        out = torch.empty(outputs, inputs, dtype=self.dtype, device=weight.device)
        arguments = DequantiseArguments(
            weight=self._weight(form, weight, inputs),
            scale=self._scale(form, weight, scale),
            out=out.data_ptr(),
            inputs=inputs,
        )
        name = f"kvseek_dequantise{f'_{form.precision}' * (form.group > 1)}"
        self._kernels.launch(name, (outputs, 1, 1), DEQUANTISE_THREADS, arguments, overlap=True)
        return out

    def quantise_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Round x [rows, inputs] to float8_e4m3fn, with kernels for weights of fp8 and compute capability 8.9 or later.

        Returns the numbers [rows, inputs] and scales, float32 [rows], by which they are multiplied. The largest of a row becomes
        448; a row of zeros, or of less than 2^-100, becomes zeros with the scale 1.
        """
        rows, inputs = x.shape
        numbers = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
        scales = x.new_empty(rows, dtype=torch.float32)
        if inputs % ALIGNMENT:
            raise KernelError(f"x of {inputs} channels: must be a multiple of {ALIGNMENT}; leave prefill_precision out")
        arguments = QuantiseArguments(
            x=self._aligned("x", x, self.dtype), numbers=numbers.data_ptr(), scales=scales.data_ptr(), inputs=inputs
        )
        self._kernels.launch("kvseek_quantise_rows", (rows, 1, 1), QUANTISE_THREADS, arguments, overlap=True)
        return numbers, scales

    def _address(self, name: str, tensor: Tensor | None, dtype: torch.dtype) -> int:
        return checked_address(name, tensor, dtype, self._kernels.device)

    def _weight(self, form: Format, weight: Tensor, inputs: int) -> int:
        multiple = max(form.group, ALIGNMENT // weight.itemsize)
        if form.inputs(weight) != inputs or inputs % multiple:
            raise KernelError(
                f"weight {tuple(weight.shape)} for x of {inputs} channels: must have as many, a multiple of "
                f"{multiple}; build with --device cpu"
            )
        return self._aligned("weight", weight, form.weight)

    def _scale(self, form: Format, weight: Tensor, scale: Tensor | None) -> int:
        address = self._address("scale", scale, form.scale)
        if form.group > 1 and scale is not None:
            expected = form.scale_shape(weight)
            if scale.shape != expected:
                raise KernelError(f"scale {tuple(scale.shape)}: must be {expected}; give that of the weight")
            if scale[0].nbytes % 4:
                raise KernelError(
                    f"scale {tuple(scale.shape)}: must have an even number of groups; build with --device cpu"
                )
        return address

    def _aligned(self, name: str, tensor: Tensor, dtype: torch.dtype) -> int:
        return aligned_address(name, tensor, dtype, self._kernels.device, ALIGNMENT)


def product_kernels(config: EngineConfig, kernels: CudaKernels) -> ProductKernels | None:
    """Make the kernels for an engine's products; None for float32, which cuBLAS multiplies."""
    dtype = getattr(torch, config.dtype)
    if dtype is torch.float32:
        return None
    precision, group = config.weight_only_precision, config.weight_group
    return ProductKernels(
        kernels, precision, dtype, group, asymmetric=INT8_ASYMMETRIC in config.weight_formats.values()
    )
