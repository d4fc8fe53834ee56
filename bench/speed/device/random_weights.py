"""Random weights of any shape in one allocation, and the same in other precisions (engine/model/random_weights.py)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvseek.core.config import ModelConfig
from kvseek.core.weight_only import HEAD, stored_weight
from kvseek.engine.model.random_weights import fill_weight, weight_shapes

ALIGNMENT = 128  # numbers: every matrix begins on a boundary that any kernel is content with


class RandomWeights:
    """Weights [as `weight_shapes`] in one allocation.

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
            fill_weight(tensor, name, model.num_layers, generator)
            self.tensors[name] = tensor


def quantised(tensors: dict[str, Tensor], precision: str, *, quantize_lm_head: bool = False) -> dict[str, Tensor]:
    """Weights as an engine of these fields of EngineConfig stores them; those that stay in their dtype are shared."""
    stored: dict[str, Tensor] = {}
    own_head = {HEAD: tensors["embed.weight"]} if quantize_lm_head else {}  # of a tied model
    for name, tensor in (own_head | tensors).items():
        stored |= stored_weight(name, tensor, precision, quantize_lm_head=quantize_lm_head)
    return stored
