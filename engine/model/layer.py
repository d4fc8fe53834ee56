"""One decoder layer and the head, without a cache: the products that Llama, Qwen2 and Qwen3 compute around attention.

What stands between the products is in operations.py. Models differ in biases and QK-norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from .linear import make_linear
from .weight_only import QUANTISED

if TYPE_CHECKING:
    from kvseek.core.config import ModelConfig

    from .operations import LayerOperations
    from .weight_only_kernels import WeightOnlyKernels


class Layer:
    """Products and norms of one decoder layer; absent norms are None.

    Parameters
    ----------
    weights : mapping of str to Tensor
        Weights of this layer under the names of engine/model/weights.py, and norm.weight; others are not looked at.
    number : int
        Number of the layer, from 0.
    kernels : WeightOnlyKernels, optional
        Kernels that multiply with weights of 8 bits; without them such weights are dequantised when the layer is made.
    """

    def __init__(
        self,
        model: ModelConfig,
        weights: Mapping[str, Tensor],
        number: int,
        kernels: WeightOnlyKernels | None = None,
    ) -> None:
        prefix = f"layers.{number}."
        self.attention_norm, self.mlp_norm = (weights[f"{prefix}{name}_norm.weight"] for name in ("attention", "mlp"))
        self.q_norm, self.k_norm = (weights.get(f"{prefix}{name}_norm.weight") for name in ("q", "k"))
        self.qkv, self.o, self.gate_up, self.down = (make_linear(weights, prefix + name, kernels) for name in QUANTISED)

    def project(self, ops: LayerOperations, x: Tensor, delta: Tensor | None) -> Tensor:
        """Add `delta`, unless it is None, to x [tokens, hidden] in place; normalise and project: [tokens, (H + 2G) * D]."""
        return self.qkv(ops.add_rms_norm(x, delta, self.attention_norm))

    def finish(self, ops: LayerOperations, x: Tensor, attended: Tensor) -> Tensor:
        """Project `attended` [tokens, H * D] and add it to x [tokens, hidden] in place; apply the MLP.

        Returns the MLP's output [tokens, hidden], which is still to be added to x.
        """
        normed = ops.add_rms_norm(x, self.o(attended), self.mlp_norm)
        return self.down(ops.silu_mul(self.gate_up(normed)))


class Head:
    """The last norm and the projection to the vocabulary.

    Parameters
    ----------
    norm : Tensor [hidden]
    weight : Tensor [vocabulary, hidden]
    """

    def __init__(self, model: ModelConfig, norm: Tensor, weight: Tensor) -> None:
        self.model, self.norm, self.weight = model, norm, weight

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the logits, float32 [tokens, vocabulary], of x [tokens, hidden]."""
        normed = F.rms_norm(x, (self.model.hidden_size,), self.norm, self.model.rms_norm_eps)
        return F.linear(normed, self.weight).float()
