"""Divides the weights of an engine among ranks, after they have been converted: core/ranks.py says by what."""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.core.config import ModelConfig
from kvseek.core.ranks import first_kv_head, rank_model, vocabulary_rows

Shape = tuple[int, ...]


def rank_shape(name: str, shape: Shape, model: ModelConfig, tp_size: int) -> Shape:
    """Return the shape of each rank's part of a stored tensor, whose shape in an engine of one rank is `shape`."""
    return tuple(rank_part(name, torch.empty(shape, device="meta"), model, tp_size, 0).shape)


def rank_part(name: str, tensor: Tensor, model: ModelConfig, tp_size: int, rank: int) -> Tensor:
    """Cut a rank's part out of a stored tensor.

    Biases of products whose outputs the ranks sum up are rank 0's, zeros on the others. Rows beyond the vocabulary are zeros.
    """
    if tp_size == 1:
        return tensor
    part, kind = _kind(name)
    if part in ("embed", "lm_head"):
        rows = vocabulary_rows(model, tp_size)
        own = tensor[rank * rows : (rank + 1) * rows]
        return torch.cat((own, own.new_zeros(rows - own.shape[0], *own.shape[1:])))
    if part in ("o", "down"):
        if kind == "bias":
            return tensor if rank == 0 else torch.zeros_like(tensor)
        return tensor.tensor_split(tp_size, dim=1)[rank] if kind == "weight" else tensor
    if part == "gate_up":
        return torch.cat([half.tensor_split(tp_size)[rank] for half in tensor.tensor_split(2)])
    if part == "qkv":
        return _heads(tensor, model, tp_size, rank)
    return tensor


def _heads(tensor: Tensor, model: ModelConfig, tp_size: int, rank: int) -> Tensor:
    """Cut a rank's query, key and value heads out of the rows of qkv."""
    own, dim = rank_model(model, tp_size), model.head_dim
    queries, keys, values = torch.split(
        tensor, [heads * dim for heads in (model.num_heads, *2 * (model.num_kv_heads,))]
    )
    first = first_kv_head(model, tp_size, rank) * dim
    parts = [part[first : first + own.num_kv_heads * dim] for part in (keys, values)]
    return torch.cat((queries.tensor_split(tp_size)[rank], *parts))


def _kind(name: str) -> tuple[str, str]:
    """Split the name of a stored tensor: what it is a part of, and `weight`, `bias` or `weight_scale`."""
    *_, part, kind = name.split(".")
    return part, kind
