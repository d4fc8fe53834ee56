"""A decoder's matrix products: with weights in the engine's dtype, or of 8 bits with a scale for each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from .weight_only import dequantise

if TYPE_CHECKING:
    from .weight_only_kernels import WeightOnlyKernels


class Linear:
    """x [rows, inputs] to x Wᵀ + b [rows, outputs].

    Parameters
    ----------
    weight : Tensor [outputs, inputs]
        In the dtype of x.
    bias : Tensor [outputs], optional
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        return F.linear(x, self.weight, self.bias)


class WeightOnlyLinear(Linear):
    """The same on a GPU with a weight of 8 bits; x keeps its dtype.

    Few rows, those of a decode step, are multiplied by a kernel that reads the weight as it is stored. More rows, those of a
    prompt, are worth writing the weight out in the dtype of x first: cuBLAS multiplies faster than any conversion on the way.

    Parameters
    ----------
    weight : Tensor, int8 or float8_e4m3fn [outputs, inputs]
    scale : Tensor, float32 [outputs]
    """

    def __init__(self, kernels: WeightOnlyKernels, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.scale, self._kernels = scale, kernels

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        if x.shape[0] <= self._kernels.max_rows:
            return self._kernels.linear(x, self.weight, self.scale, self.bias)
        return F.linear(x, self._kernels.dequantise(self.weight, self.scale), self.bias)


def make_linear(weights: Mapping[str, Tensor], name: str, kernels: WeightOnlyKernels | None = None) -> Linear:
    """The product with the weight `name` of engine/model/weights.py, without ".weight".

    Without `kernels` a weight of 8 bits is dequantised now, to the dtype of the norms: the same numbers, but no less memory.
    """
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    scale = weights.get(f"{name}.weight_scale")
    if scale is None:
        return Linear(weight, bias)
    if kernels is None:
        return Linear(dequantise(weight, scale, weights["norm.weight"].dtype), bias)
    return WeightOnlyLinear(kernels, weight, scale, bias)
