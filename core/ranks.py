"""Tensor parallelism: which part of a model each rank has.

As in Megatron-LM (arXiv:1909.08053, section 3): heads, also those of Gated DeltaNet layers, and the MLPs' channels are divided,
also those of each expert. So the products `qkv`, `qkvz`, `ba` and `gate_up` are divided by outputs, and `o` and `down` by inputs,
whose outputs the ranks sum up. Embedding and head are divided by the vocabulary. Rank r has the KV heads that its query heads
need; with more ranks than KV heads, several ranks have the same one.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import EngineConfig
    from .model_config import ModelConfig


BOUNDS = ("kv_cache_host_memory_bytes", "kv_cache_device_memory_bytes", "reuse_host_bytes")  # of memory, in CacheConfig


def rank_model(model: ModelConfig, tp_size: int) -> ModelConfig:
    """Return the shape of what each rank computes; the vocabulary stays, as its ids do."""
    experts = model.experts
    if experts is not None:
        shared = experts.shared_intermediate_size
        experts = dataclasses.replace(
            experts,
            intermediate_size=experts.intermediate_size // tp_size,
            shared_intermediate_size=None if shared is None else shared // tp_size,
        )
    states = model.delta_net
    if states is not None:
        keys, values = states.num_key_heads // tp_size, states.num_value_heads // tp_size
        states = dataclasses.replace(states, num_key_heads=keys, num_value_heads=values)
    return dataclasses.replace(
        model,
        num_heads=model.num_heads // tp_size,
        num_kv_heads=max(1, model.num_kv_heads // tp_size),
        intermediate_size=max(1, model.intermediate_size // tp_size),
        experts=experts,
        delta_net=states,
    )


def rank_config(config: EngineConfig) -> EngineConfig:
    """Return the configuration of each rank's part of an engine."""
    return divided(config, config.tp_size)


def divided(config: EngineConfig, tp_size: int) -> EngineConfig:
    """Return the configuration of each part of an engine that `tp_size` ranks would have, whatever its own `tp_size` says.

    Bounds of memory are those of all ranks together, divided alike.
    """
    if tp_size == 1:
        return config
    bounds: dict[str, Any] = {name: getattr(config.cache, name) for name in BOUNDS}
    bounds = {name: None if bound is None else max(1, bound // tp_size) for name, bound in bounds.items()}
    cache = dataclasses.replace(config.cache, **bounds)
    if config.model.delta_net is not None:  # ranks keep no states for later requests
        cache = dataclasses.replace(cache, reuse=False)
    return dataclasses.replace(config, model=rank_model(config.model, tp_size), cache=cache, tp_size=1)


def vocabulary_rows(model: ModelConfig, tp_size: int) -> int:
    """Return the rows of embedding and head that each rank has; the last rank's may reach beyond the vocabulary."""
    return -(-model.vocab_size // tp_size)


def first_kv_head(model: ModelConfig, tp_size: int, rank: int) -> int:
    """Return the first KV head of a rank."""
    return rank * model.num_kv_heads // tp_size
