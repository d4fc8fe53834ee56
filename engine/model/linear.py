"""The matrix products of a model: with weights in the engine's dtype, or with weights of 8 bits and a scale for each row.

`Products` makes them, and decides what multiplies. host_products.py has those of engines on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .weight_only import dequantise

if TYPE_CHECKING:
    from .product_kernels import ProductKernels


Product = Callable[[Tensor], Tensor]
"""A map from x [rows, inputs] to [rows, outputs], such as a Linear."""


class Linear:
    """A linear map from x [rows, inputs] to x Wᵀ + b [rows, outputs].

    Parameters
    ----------
    weight : Tensor [outputs, inputs]
        In the dtype of x.
    bias : Tensor [outputs], optional
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x with the weight and add the bias."""
        return F.linear(x, self.weight, self.bias)

    def gated(self, x: Tensor, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
        """Multiply, and take silu(gate) * up of the result [rows, gates and ups], as `silu_mul` computes it."""
        return silu_mul(self(x))


class Embedding:
    """The map from token ids, int64 or int32 [tokens], to their rows of the vocabulary [tokens, hidden].

    Parameters
    ----------
    weight : Tensor [vocabulary, hidden]
        One of several ranks has some rows of the vocabulary.
    first : int
        The token of the first row.
    """

    def __init__(self, weight: Tensor, first: int = 0) -> None:
        self.weight, self.first = weight, first

    def __call__(self, tokens: Tensor) -> Tensor:
        """Copy the rows of tokens."""
        return F.embedding(tokens, self.weight)

    def complete(self, rows: Tensor) -> Tensor:
        """Make the rows [tokens, hidden] of all tokens of those that this rank has, which are zeros for other ranks' tokens."""
        return rows


class KernelLinear(Linear):
    """A linear map on a GPU, with a weight in the dtype of x or of 8 bits.

    The few rows of a decode step are multiplied by a kernel that reads the weight as it is stored. Many rows, which prompts and
    large batches have, are multiplied by cuBLAS, for which a weight of 8 bits is first written out in the dtype of x: cuBLAS
    then multiplies faster than a kernel that converts while it multiplies.

    Parameters
    ----------
    weight : Tensor [outputs, inputs]
        In the dtype of x, or int8 or float8_e4m3fn.
    scale : Tensor, float32 [outputs], or None
        Of a weight of 8 bits.
    """

    def __init__(self, kernels: ProductKernels, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.scale, self._kernels, self._few = scale, kernels, kernels.most_rows(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        if x.shape[0] <= self._few:
            return self._kernels.linear(x, self.weight, self.scale, self.bias)
        weight = self.weight if self.scale is None else self._kernels.dequantise(self.weight, self.scale)
        return F.linear(x, weight, self.bias)

    def gated(self, x: Tensor, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
        """See Linear.gated. The kernel does both."""
        if x.shape[0] <= self._few:
            return self._kernels.linear(x, self.weight, self.scale, self.bias, gated=True)
        return super().gated(x, silu_mul)


class KernelHead(KernelLinear):
    """The head of 8 bits on a GPU, which is never written out: it is the largest matrix, and mostly multiplied with few rows.

    More rows, such as logits of whole prompts of a small vocabulary, are multiplied in groups.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        out = x.new_empty(x.shape[0], self.weight.shape[0])
        for start in range(0, x.shape[0], self._few):
            rows = slice(start, start + self._few)
            self._kernels.linear(x[rows], self.weight, self.scale, self.bias, out=out[rows])
        return out


class Products:
    """Makes a model's products with PyTorch's operator, which is the reference of all others.

    Weights of 8 bits are dequantised to `dtype`, that of x, when a product is made: the numbers are the same, but no memory
    is saved.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def linear(self, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Linear:
        """Make the product with a weight [outputs, inputs]; `scale`, float32 [outputs], is that of a weight of 8 bits."""
        return Linear(weight if scale is None else dequantise(weight, scale, self.dtype), bias)

    # An engine of several ranks has parts of weights (engine/parallel/ranks.py). Here there is one rank.

    def row_parallel(self, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Product:
        """Make a product as `linear`, whose inputs are divided among the ranks: each gets the sum of all ranks' outputs."""
        return self.linear(weight, bias, scale)

    def head(self, weight: Tensor, scale: Tensor | None = None) -> Product:
        """Make the product with the rows of the vocabulary that this rank has; rank 0 gets the outputs of all ranks."""
        return self.linear(weight, None, scale)

    def embedding(self, weight: Tensor) -> Embedding:
        """Make the embedding with the rows of the vocabulary that this rank has."""
        return Embedding(weight)


class KernelProducts(Products):
    """Makes products on a GPU; weights of 8 bits stay so."""

    def __init__(self, kernels: ProductKernels) -> None:
        super().__init__(kernels.dtype)
        self._kernels = kernels

    def linear(self, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Linear:
        """See Products.linear."""
        return KernelLinear(self._kernels, weight, scale, bias)

    def head(self, weight: Tensor, scale: Tensor | None = None) -> Product:
        """See Products.head."""
        return (KernelLinear if scale is None else KernelHead)(self._kernels, weight, scale, None)
