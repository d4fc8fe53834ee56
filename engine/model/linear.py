"""The matrix products of a model: with weights in the engine's dtype, or with weights of 8 bits and a scale for each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from .weight_only import dequantise

if TYPE_CHECKING:
    from .weight_only_kernels import WeightOnlyKernels


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


class WeightOnlyLinear(Linear):
    """A linear map on a GPU with a weight of 8 bits; x keeps its dtype.

    The few rows of a decode step are multiplied by a kernel that reads the weight as it is stored. For the many rows of a
    prompt the weight is first written out in the dtype of x, because cuBLAS then multiplies faster than a kernel that converts
    while it multiplies.

    Parameters
    ----------
    weight : Tensor, int8 or float8_e4m3fn [outputs, inputs]
    scale : Tensor, float32 [outputs]
    """

    def __init__(self, kernels: WeightOnlyKernels, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.scale, self._kernels = scale, kernels

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x with the weight and add the bias."""
        if x.shape[0] <= self._kernels.max_rows:
            return self._kernels.linear(x, self.weight, self.scale, self.bias)
        return F.linear(x, self._kernels.dequantise(self.weight, self.scale), self.bias)


def make_linear(weights: Mapping[str, Tensor], name: str, kernels: WeightOnlyKernels | None = None) -> Linear:
    """Make the product with the weight `name`, which is a name of engine/model/weights.py without ".weight".

    Without `kernels` a weight of 8 bits is dequantised now, to the dtype of the norms: the numbers are the same, but no memory
    is saved.
    """
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    scale = weights.get(f"{name}.weight_scale")
    if scale is None:
        return Linear(weight, bias)
    if kernels is None:
        return Linear(dequantise(weight, scale, weights["norm.weight"].dtype), bias)
    return WeightOnlyLinear(kernels, weight, scale, bias)
