"""Shapes of public models whose decode speed is worth knowing: no checkpoint is needed to time a step."""

from __future__ import annotations

import dataclasses

import torch

from kvseek.core.config import FP8_GROUP, FP8_GROUPS, GROUPED, EngineConfig
from kvseek.core.errors import ConfigError
from kvseek.core.model_config import DeltaNetConfig, ExpertsConfig, ModelConfig, RopeScaling
from kvseek.core.weight_only import INPUTS_MULTIPLE, INT4, INT8_ASYMMETRIC, INT8_GROUPS, NONE
from kvseek.engine.model.block_sparse import attended_pairs

# Source: config.json of meta-llama/Llama-3.1-8B.
LLAMA_3_1_8B = ModelConfig(
    architecture="llama",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    max_position_embeddings=131_072,
    rope_scaling=RopeScaling("llama3", 8.0, original_max_position_embeddings=8192),
)

# Source: config.json of Qwen/Qwen3-8B; longer contexts than it states come with YaRN, which costs a step nothing.
QWEN3_8B = ModelConfig(
    architecture="qwen3",
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1_000_000.0,
    max_position_embeddings=40_960,
    qk_norm=True,
)

# Source: config.json of Qwen/Qwen2.5-72B.
QWEN2_5_72B = ModelConfig(
    architecture="qwen2",
    vocab_size=152_064,
    hidden_size=8192,
    intermediate_size=29_568,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=1_000_000.0,
    max_position_embeddings=131_072,
    qkv_bias=True,
)

# Source: config.json of HuggingFaceTB/SmolLM2-135M.
SMOLLM2_135M = ModelConfig(
    architecture="llama",
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=100_000.0,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)

# Source: config.json of Qwen/Qwen3-30B-A3B.
QWEN3_30B_A3B = dataclasses.replace(
    QWEN3_8B,
    architecture="qwen3_moe",
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_kv_heads=4,
    experts=ExpertsConfig(num_experts=128, num_experts_per_tok=8, intermediate_size=768, norm_topk_prob=True),
)


def _three_of_four(layers: int, value_heads: int) -> DeltaNetConfig:
    """The states of three in four layers of the Qwens here, which share all sizes but the heads of values."""
    return DeltaNetConfig(tuple(n for n in range(layers) if n % 4 < 3), 16, value_heads, 128, 128, 4)


# Source: config.json of Qwen/Qwen3-Next-80B-A3B-Instruct.
QWEN3_NEXT_80B_A3B = ModelConfig(
    architecture="qwen3_next",
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=5120,
    num_layers=48,
    num_heads=16,
    num_kv_heads=2,
    head_dim=256,
    rms_norm_eps=1e-6,
    rope_theta=10_000_000.0,
    max_position_embeddings=262_144,
    qk_norm=True,
    experts=ExpertsConfig(512, 10, 512, norm_topk_prob=True, shared_intermediate_size=512),
    rotary_dim=64,
    gated_attention=True,
    centred_norms=True,
    delta_net=_three_of_four(48, value_heads=32),
)

# Source: text_config in config.json of Qwen/Qwen3.5-27B.
QWEN3_5_27B = dataclasses.replace(
    QWEN3_NEXT_80B_A3B,
    architecture="qwen3_5",
    vocab_size=248_320,
    hidden_size=5120,
    intermediate_size=17_408,
    num_layers=64,
    num_heads=24,
    num_kv_heads=4,
    experts=None,
    delta_net=_three_of_four(64, value_heads=48),
)

# Source: text_config in config.json of Qwen/Qwen3.5-35B-A3B.
QWEN3_5_35B_A3B = dataclasses.replace(
    QWEN3_NEXT_80B_A3B,
    architecture="qwen3_5_moe",
    vocab_size=248_320,
    intermediate_size=512,
    num_layers=40,
    experts=ExpertsConfig(256, 8, 512, norm_topk_prob=True, shared_intermediate_size=512),
    delta_net=_three_of_four(40, value_heads=32),
)

SHAPES = {
    "smollm2-135m": SMOLLM2_135M,
    "llama-3.1-8b": LLAMA_3_1_8B,
    "qwen3-8b": QWEN3_8B,
    "qwen2.5-72b": QWEN2_5_72B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen3-next-80b-a3b": QWEN3_NEXT_80B_A3B,
    "qwen3.5-27b": QWEN3_5_27B,
    "qwen3.5-35b-a3b": QWEN3_5_35B_A3B,
}


def get_shape(name: str, positions: int) -> ModelConfig:
    """The shape of a model, allowed `positions` positions or its own limit, whichever is more.

    Speed does not depend on what a model was trained on, so a benchmark may go beyond it. Large letters in the name count as
    small ones. Raises ConfigError.
    """
    if name.lower() not in SHAPES:
        raise ConfigError(
            f"--shape = {name!r}: must be one of {', '.join(SHAPES)}; other models: --engine_dirs, on the CPU"
        )
    shape = SHAPES[name.lower()]
    return dataclasses.replace(shape, max_position_embeddings=max(positions, shape.max_position_embeddings))


def matrix_bytes(config: EngineConfig, requests: int | None = None) -> int:
    """Bytes of the matrices that a decode step multiplies with, as it reads them: every layer's and the output head.

    `requests` is that of `matrix_numbers`. Scales of rows, a thousandth, do not count; those of groups do.
    """
    model = config.model
    plain = 8 * getattr(torch, config.dtype).itemsize  # bits
    head = model.vocab_size * model.hidden_size
    quantised = config.weight_only_precision != NONE if config.device == "cuda" else _kept_on_host(config)
    by_format = {
        INT4: (4 + 2 * 16 / config.weight_group, 8.5),
        INT8_GROUPS: (8.5, 8.5),
        INT8_ASYMMETRIC: (10.0, 10.0),
        FP8_GROUPS: (8 + 32 / FP8_GROUP, plain),
    }
    narrow = by_format.get(config.weight_only_precision, (8.0, 8.0))
    layers_bits, head_bits = narrow if quantised else (plain, plain)
    head_bits = head_bits if config.quantize_lm_head else plain
    kept = _kept_numbers(model)
    layers = (matrix_numbers(model, requests) - kept) * layers_bits + kept * plain
    return int(layers + head * head_bits) // 8


def matrix_numbers(model: ModelConfig, requests: int | None = None) -> int:
    """Weights of all layers' matrices; with `requests`, those that a step of so many reads.

    Of experts it reads those that are chosen: so many as are expected if each is as likely.
    """
    heads = (2 + model.gated_attention) * model.num_heads + 2 * model.num_kv_heads
    attention = len(model.row_layers) * heads * model.head_dim * model.hidden_size
    if (states := model.delta_net) is not None:
        outputs = states.channels + states.values + 2 * states.num_value_heads
        attention += len(states.layers) * (outputs + states.values) * model.hidden_size
    experts, plain = model.experts, 3 * model.intermediate_size * model.hidden_size
    if experts is None:
        return attention + model.num_layers * plain
    count, mixed = float(experts.num_experts), model.num_layers - len(experts.dense_layers)
    if requests is not None:
        count *= 1 - (1 - experts.num_experts_per_tok / experts.num_experts) ** requests
    wide = count * experts.intermediate_size + (experts.shared_intermediate_size or 0)
    mixtures = mixed * round(3 * wide * model.hidden_size)
    return attention + len(experts.dense_layers) * plain + mixtures + _router_numbers(model)


def _kept_numbers(model: ModelConfig) -> int:
    """Weights of all layers' matrices that are not quantised."""
    states = model.delta_net
    gates = 0 if states is None else len(states.layers) * 2 * states.num_value_heads * model.hidden_size
    return _router_numbers(model) + gates


def _router_numbers(model: ModelConfig) -> int:
    """Weights of all layers' routers and gates of shared experts."""
    experts = model.experts
    if experts is None:
        return 0
    each = experts.num_experts + (experts.shared_intermediate_size is not None)
    return (model.num_layers - len(experts.dense_layers)) * each * model.hidden_size


def prompt_operations(config: EngineConfig, tokens: int) -> dict[str, int]:
    """Additions and multiplications for a prompt: of causal attention to what it reads, and of the layers' matrix products."""
    model = config.model
    attention = 4 * model.num_heads * model.head_dim * attended_pairs(config, tokens)
    return {"attention": attention, "products": 2 * tokens * matrix_numbers(model, requests=1)}


def _kept_on_host(config: EngineConfig) -> bool:
    """Whether an engine on the CPU multiplies with 8 or 4 bits a weight (engine/model/cpu.py), or dequantises when loaded."""
    read = all(size % INPUTS_MULTIPLE == 0 for size in config.model.matrix_inputs().values())
    kept = config.weight_only_precision in ("int8", *GROUPED)
    return kept and (config.dtype, config.kernels) == ("bfloat16", "native") and read


def row_numbers(model: ModelConfig) -> int:
    """Numbers of one cached token: its key and value rows of all layers and KV heads."""
    return len(model.row_layers) * model.num_kv_heads * 2 * model.head_dim
