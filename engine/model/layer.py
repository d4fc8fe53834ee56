"""One decoder layer and the head, without a cache: all that Llama, Qwen2 and Qwen3 compute around attention.

Models differ in biases and QK-norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import Linear, Products
from .rope import rotate
from .weight_only import QUANTISED

if TYPE_CHECKING:
    from kvseek.core.config import ModelConfig


class Layer:
    """Products and norms of one decoder layer; absent norms are None.

    Parameters
    ----------
    weights : mapping of str to Tensor
        Weights of this layer under the names of engine/model/weights.py; others are not looked at.
    number : int
        Number of the layer, from 0.
    products : Products, optional
        Makes the layer's products; None: with PyTorch's operator, in the dtype of the norms.
    """

    def __init__(
        self,
        model: ModelConfig,
        weights: Mapping[str, Tensor],
        number: int,
        products: Products | None = None,
    ) -> None:
        self.model, prefix = model, f"layers.{number}."
        self.attention_norm, self.mlp_norm = (weights[f"{prefix}{name}_norm.weight"] for name in ("attention", "mlp"))
        self.q_norm, self.k_norm = (weights.get(f"{prefix}{name}_norm.weight") for name in ("q", "k"))
        products = products or Products(self.attention_norm.dtype)

        def product(name: str) -> Linear:
            weight, bias, scale = (weights.get(f"{prefix}{name}.{part}") for part in ("weight", "bias", "weight_scale"))
            assert weight is not None, f"{prefix}{name}.weight is in every engine directory"
            return products.linear(weight, bias, scale)

        self.qkv, self.o, self.gate_up, self.down = map(product, QUANTISED)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normalise, project and rotate x [tokens, hidden]: queries [tokens, H, D], keys and values [tokens, G, D]."""
        model = self.model
        normed = F.rms_norm(x, (model.hidden_size,), self.attention_norm, model.rms_norm_eps)
        qkv = self.qkv(normed).view(x.shape[0], -1, model.head_dim)
        heads, kv_heads = model.num_heads, model.num_kv_heads
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
            q = F.rms_norm(q, (model.head_dim,), self.q_norm, model.rms_norm_eps)
            k = F.rms_norm(k, (model.head_dim,), self.k_norm, model.rms_norm_eps)
            qk = torch.cat((q, k), dim=1)
        else:
            qk = qkv[:, : heads + kv_heads]
        qk = rotate(qk, cos, sin)
        return qk[:, :heads], qk[:, heads:], qkv[:, heads + kv_heads :]

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Apply output projection and MLP, each with a residual: x [tokens, hidden], attended [tokens, H*D]."""
        x = x + self.o(attended)
        normed = F.rms_norm(x, (self.model.hidden_size,), self.mlp_norm, self.model.rms_norm_eps)
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Head:
    """The last norm and the projection to the vocabulary.

    Parameters
    ----------
    norm : Tensor [hidden]
    weight : Tensor [vocabulary, hidden]
    products : Products, optional
        See Layer.
    """

    def __init__(self, model: ModelConfig, norm: Tensor, weight: Tensor, products: Products | None = None) -> None:
        self.model, self.norm = model, norm
        self._project = (products or Products(norm.dtype)).linear(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the logits, float32 [tokens, vocabulary], of x [tokens, hidden]."""
        normed = F.rms_norm(x, (self.model.hidden_size,), self.norm, self.model.rms_norm_eps)
        return self._project(normed).float()
