"""Random weights of any shape, made where they are needed: a decode step costs the same whatever the weights say."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvseek.core.config import ModelConfig
from kvseek.engine.model.weight_only import HEAD, NONE, is_quantised, quantise

ALIGNMENT = 128  # numbers: every matrix begins on a boundary that any kernel is content with


def weight_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that a decoder of `model` reads, in the engine's naming."""
    hidden, dim = model.hidden_size, model.head_dim
    qkv = (model.num_heads + 2 * model.num_kv_heads) * dim
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (model.vocab_size, hidden), "norm.weight": (hidden,)}
    if not model.tie_word_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "attention_norm.weight": (hidden,),
        "qkv.weight": (qkv, hidden),
        "o.weight": (hidden, model.num_heads * dim),
        "mlp_norm.weight": (hidden,),
        "gate_up.weight": (2 * model.intermediate_size, hidden),
        "down.weight": (hidden, model.intermediate_size),
    }
    if model.qkv_bias:
        layer["qkv.bias"] = (qkv,)
    if model.output_bias:
        layer["o.bias"] = (hidden,)
    if model.mlp_bias:
        layer |= {"gate_up.bias": (2 * model.intermediate_size,), "down.bias": (hidden,)}
    if model.qk_norm:
        layer |= {"q_norm.weight": (dim,), "k_norm.weight": (dim,)}
    for number in range(model.num_layers):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes


class RandomWeights:
    """Weights [as `weight_shapes`] in one allocation.

    Matrices are normal with variance 1/fan-in, so that products keep the size of what they multiply; those that write to the
    residual stream are smaller by √(2 layers), so that activations stay of order one through all layers. Norms are one,
    biases zero, embeddings of variance one.

    Attributes
    ----------
    flat : Tensor [numbers]
        All of them, e.g. to measure how fast they can be read.
    tensors : dict of Tensor
        Views of it, by name.
    """

    def __init__(self, model: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        shapes = weight_shapes(model)
        starts, total = {}, 0
        for name, shape in shapes.items():
            starts[name] = total
            total += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
        self.flat = torch.zeros(total, dtype=dtype, device=device)
        generator = torch.Generator(device).manual_seed(seed)
        self.tensors: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            tensor = self.flat[starts[name] : starts[name] + math.prod(shape)].view(shape)
            _fill(tensor, name, model.num_layers, generator)
            self.tensors[name] = tensor


def _fill(tensor: Tensor, name: str, layers: int, generator: torch.Generator) -> None:
    if name.endswith("bias"):
        tensor.zero_()
    elif tensor.dim() == 1:
        tensor.fill_(1)
    elif name == "embed.weight":
        tensor.normal_(generator=generator)
    else:
        residual = name.endswith((".o.weight", ".down.weight"))
        deviation = tensor.shape[1] ** -0.5 * ((2 * layers) ** -0.5 if residual else 1.0)
        tensor.normal_(std=deviation, generator=generator)


def quantised(tensors: dict[str, Tensor], precision: str, *, quantize_lm_head: bool = False) -> dict[str, Tensor]:
    """Weights as an engine of these fields of EngineConfig stores them; those that stay in their dtype are shared."""
    if precision == NONE:
        return tensors
    stored: dict[str, Tensor] = {}
    own_head = {HEAD: tensors["embed.weight"]} if quantize_lm_head else {}  # of a tied model
    for name, tensor in (own_head | tensors).items():
        if is_quantised(name, quantize_lm_head=quantize_lm_head):
            stored[name], stored[f"{name}_scale"] = quantise(tensor, precision)
        else:
            stored[name] = tensor
    return stored
