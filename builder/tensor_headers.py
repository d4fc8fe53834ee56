"""What checkpoint files say of their tensors, compared with what the decoder needs before any tensor is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvseek.engine.config import ModelConfig
from kvseek.engine.errors import ConfigError

if TYPE_CHECKING:
    from .checkpoint import Checkpoint


@dataclass(frozen=True)
class Header:
    """A tensor of a checkpoint, unread.

    Attributes
    ----------
    place : str
        The file and the tensor's name there, for messages.
    shape : tuple of int
        Of the tensor under its Hugging Face name.
    dtype : torch.dtype
        Floating-point type that `Checkpoint.tensor` gives.
    """

    place: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def source_shape(model: ModelConfig, name: str) -> tuple[int, ...]:
    """Shape that a tensor of this Hugging Face name has in a model; raises KeyError if the decoder has no such tensor."""
    *_, module, kind = name.split(".")
    hidden, queries = model.hidden_size, model.num_heads * model.head_dim
    keys, vocabulary = model.num_kv_heads * model.head_dim, (model.vocab_size, hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": vocabulary,
        "input_layernorm": (hidden,),
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "q_norm": (model.head_dim,),
        "k_norm": (model.head_dim,),
        "o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "gate_proj": (model.intermediate_size, hidden),
        "up_proj": (model.intermediate_size, hidden),
        "down_proj": (hidden, model.intermediate_size),
        "norm": (hidden,),
        "lm_head": vocabulary,
    }
    return shapes[module] if kind == "weight" else shapes[module][:1]


def check_headers(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Raise ConfigError unless the checkpoint has every tensor, in the shape of its configuration and a float type."""
    for name in names:
        header, expected = checkpoint.header(name), source_shape(checkpoint.config, name)
        if header.shape != expected:
            raise ConfigError(
                f"{header.place}: shape {header.shape}: must be {expected} by the model's configuration; config and "
                "weights are of different models"
            )
