"""The matrix products of a model: with weights in the engine's dtype, or with weights of 8 bits and a scale for each row.

`Products` makes them, and decides what multiplies. The same file of cpu/ and of cuda/ has faster ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvseek.core.weight_only import dequantise


class Product(Protocol):
    """A map from x [rows, inputs] to [rows, outputs], such as a Linear."""

    def __call__(self, x: Tensor, *, prompt: bool = False) -> Tensor:
        """Multiply x. What a row gives depends to the bit on neither the number nor the other rows of x, but on `prompt`.

        So a request's rows are the same in any batch of a decode step, and with `prompt` however its prompt is read: whole, in
        chunks, in a pack or behind a reused beginning. That holds for numbers of 16 bits; in float32, and with PyTorch's
        operator alone, last bits may differ.
        """
        ...


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

    def __call__(self, x: Tensor, *, prompt: bool = False) -> Tensor:
        """Multiply x with the weight and add the bias; see Product."""
        return F.linear(x, self.weight, self.bias)

    def gated(self, x: Tensor, silu_mul: Callable[[Tensor], Tensor], *, prompt: bool = False) -> Tensor:
        """Multiply, and take silu(gate) * up of the result [rows, gates and ups], as `silu_mul` computes it."""
        return silu_mul(self(x, prompt=prompt))


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
