"""How many plans an engine has, for which sizes, and how many bytes they hold. Needs no TensorRT."""

from __future__ import annotations

import math

from kvseek.builder.checkpoints.weights import WeightFormat, list_weights, total_size
from kvseek.core.batch import buckets_for
from kvseek.core.config import EngineConfig
from kvseek.engine.tensorrt.plan_files import PlanLimits, Sizes


def limits_of(config: EngineConfig) -> PlanLimits:
    """Calls of an engine: decode steps of up to the largest bucket (core/batch.py), which come first, and prompts.

    Segments read a prompt in chunks, layer by layer. One plan goes through all layers in a call, so it reads prompts whole:
    the attention of a layer wants all of the prompt's keys before the next layer may begin.
    """
    batch, prompt = buckets_for(config.max_batch_size)[-1], config.max_input_len
    most = prompt if config.tensorrt.form == "engine" else min(config.prefill_chunk_tokens, prompt)
    return PlanLimits(tokens=Sizes(1, batch, max(batch, most)), rows=Sizes(1, batch, batch))


def plan_count(config: EngineConfig) -> int:
    """Number of plans of an engine."""
    return 1 if config.tensorrt.form == "engine" else config.model.num_layers + 1


def weight_bytes(config: EngineConfig) -> int:
    """Bytes of the weights of all plans: a tied head's are in the first segment and in the last."""
    own = total_size(config.model, WeightFormat.of(config))
    if not config.model.tie_word_embeddings or plan_count(config) == 1:
        return own
    (embedding,) = (weight for weight in list_weights(config.model) if weight.name == "embed.weight")
    return own + math.prod(embedding.shape) * WeightFormat.of(config).dtype.itemsize


def angle_bytes(config: EngineConfig) -> int:
    """Bytes of the table of cosines and sines, which one plan holds (network.py)."""
    return config.max_seq_len * config.model.head_dim * WeightFormat.of(config).dtype.itemsize


def largest_plan(config: EngineConfig) -> int:
    """Most bytes of constants in one plan: of segments, the embedding or the head, a layer, and the table of angles."""
    if plan_count(config) == 1:
        return weight_bytes(config) + angle_bytes(config)
    model, itemsize = config.model, WeightFormat.of(config).dtype.itemsize
    ends = model.vocab_size * model.hidden_size * itemsize
    whole = total_size(model, WeightFormat.of(config))
    layer = (whole - ends * (1 if model.tie_word_embeddings else 2)) // model.num_layers
    return ends + layer + angle_bytes(config)
