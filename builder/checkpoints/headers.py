"""Compares the headers of checkpoint files with the tensors that the decoder needs, before any tensor is read."""

from __future__ import annotations

from collections.abc import Iterable

from kvseek.core.config import ModelConfig
from kvseek.core.errors import ConfigError

from .checkpoint import Checkpoint


def source_shape(model: ModelConfig, name: str) -> tuple[int, ...]:
    """Return the shape of a model's tensor with this Hugging Face name; raises KeyError if the decoder has no such tensor."""
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
    """Raise ConfigError unless the checkpoint has every tensor of `names`, in the configured shape and of a float type."""
    for name in names:
        header, expected = checkpoint.header(name), source_shape(checkpoint.config, name)
        if header.shape != expected:
            raise ConfigError(
                f"{header.place}: shape {header.shape}: must be {expected} by the model's configuration; config and "
                "weights are of different models"
            )
