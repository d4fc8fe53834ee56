"""The config.json of a TensorRT-LLM checkpoint: the model in Hugging Face's terms, and how many ranks share it.

Names and defaults are those of TensorRT-LLM's PretrainedConfig, LLaMAConfig, QWenConfig and Mapping.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvseek.builder.checkpoints.known_keys import TENSORRT_LLM, USE_ANOTHER
from kvseek.core.config import require
from kvseek.core.errors import ConfigError

LLAMA_LIKE = ("LlamaForCausalLM", "MistralForCausalLM")
QWEN = "QWenForCausalLM"  # Qwen of any generation; qwen_type tells which
QWEN_TYPES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SAME_NAMES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "hidden_act",
)
# Hugging Face field → TensorRT-LLM's name for it
OTHER_NAMES = {"rms_norm_eps": "norm_epsilon", "rope_theta": "rotary_base"}
# Defaults of `rotary_scaling` of type llama3; conversions of Meta's own files do not state these fields.
LLAMA3_DEFAULTS = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CHECK = "check the checkpoint's config.json"


@dataclass(frozen=True)
class Mapping:
    """The division of a checkpoint over files, one a rank: rank = pipeline rank × tp_size + tensor-parallel rank."""

    tp_size: int
    pp_size: int
    embedding_axis: int | None  # axis along which tensor-parallel ranks share the embedding; None: each holds all of it

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp_size * self.pp_size


def read_mapping(values: dict[str, Any]) -> Mapping:
    """Read `mapping` and the sharding of the embedding; raises ConfigError on values that contradict each other."""
    stated = _object(values, "mapping")
    tp_size, pp_size, cp_size = (_size(stated, name) for name in ("tp_size", "pp_size", "cp_size"))
    require(cp_size == 1, "mapping.cp_size", cp_size, "1", "convert the model without context parallelism")
    world_size, limit = stated.get("world_size", tp_size * pp_size), f"tp_size × pp_size = {tp_size * pp_size}"
    require(world_size == tp_size * pp_size, "mapping.world_size", world_size, limit, CHECK)
    axis = None
    if values.get("use_parallel_embedding") and tp_size > 1:
        axis = values.get("embedding_sharding_dim", 0)
        require(axis in (0, 1), "embedding_sharding_dim", axis, "0 or 1", CHECK)
    return Mapping(tp_size, pp_size, axis)


def hugging_face_values(values: dict[str, Any]) -> dict[str, Any]:
    """Translate the fields that describe the model to those that `model_config` takes, special tokens left out.

    Raises
    ------
    ConfigError
        If a field is missing or unknown, or asks for weights or parts that kvseek does not have: quantised weights, experts,
        other architectures, other positional embeddings.
    """
    architecture = _architecture(values)
    for name in (*SAME_NAMES, *OTHER_NAMES.values(), *(["head_size"] if architecture == QWEN_TYPES["qwen3"] else [])):
        if values.get(name) is None:
            raise ConfigError(f"{name} is missing; convert the model again")
    _refuse_unsupported(values, architecture)
    heads = values["num_attention_heads"]
    return {
        "architectures": [architecture],
        **{name: values[name] for name in SAME_NAMES},
        **{name: values[theirs] for name, theirs in OTHER_NAMES.items()},
        "num_key_value_heads": heads if values.get("num_key_value_heads") is None else values["num_key_value_heads"],
        "head_dim": values.get("head_size"),
        "attention_bias": architecture in LLAMA_LIKE and bool(values.get("attn_bias")),
        "tie_word_embeddings": bool(values.get("tie_word_embeddings") or values.get("share_embedding_table")),
        "rope_scaling": _rope_scaling(values),
        "sliding_window": values.get("sliding_window"),  # conversions leave it out: attention is full then
    }


def _architecture(values: dict[str, Any]) -> str:
    """Find the Hugging Face name of `architecture`, which `qwen_type` completes or confirms."""
    found, qwen_type = values.get("architecture"), values.get("qwen_type")
    if found in LLAMA_LIKE:
        return str(found)
    known = (*LLAMA_LIKE, QWEN, *QWEN_TYPES.values())
    require(found in known, "architecture", found, f"one of {', '.join(known)}", "convert the model or choose another")
    if found != QWEN and qwen_type is None:
        return str(found)
    expected = [name for name, architecture in QWEN_TYPES.items() if found in (QWEN, architecture)]
    limit = f"{' or '.join(map(repr, expected))} with architecture = {found!r}"
    require(qwen_type in expected, "qwen_type", qwen_type, limit, "use another checkpoint")
    return QWEN_TYPES[str(qwen_type)]


def _refuse_unsupported(values: dict[str, Any], architecture: str) -> None:
    TENSORRT_LLM.check(values)
    # How TensorRT-LLM stores its KV cache (kv_cache_quant_algo) is no property of the weights.
    algorithm = _object(values, "quantization").get("quant_algo")
    remedy = "convert the model without quantisation"
    require(algorithm is None, "quantization.quant_algo", algorithm, "null", remedy)
    experts = _object(values, "moe").get("num_experts") or 0
    require(experts == 0, "moe.num_experts", experts, "0: no mixture of experts", USE_ANOTHER)
    window = _object(values, "runtime_defaults").get("max_attention_window")
    require(window is None, "runtime_defaults.max_attention_window", window, "null", USE_ANOTHER)
    for name in ("attn_bias", "tie_word_embeddings", "share_embedding_table", "use_parallel_embedding", "qk_layernorm"):
        require(values.get(name) in (None, True, False), name, values.get(name), "true, false or null", CHECK)
    stated, expected = values.get("qk_layernorm"), architecture == QWEN_TYPES["qwen3"]
    require(stated in (None, expected), "qk_layernorm", stated, f"{expected} for {architecture}", CHECK)
    rotated, head_size = values.get("rotary_embedding_dim"), values.get("head_size")
    limit = f"head_size = {head_size}"
    require(rotated in (None, head_size), "rotary_embedding_dim", rotated, limit, USE_ANOTHER)


def _rope_scaling(values: dict[str, Any]) -> dict[str, Any]:
    stated = _object(values, "rotary_scaling")
    kind = stated.get("rope_type") or stated.get("type")
    if kind == "longrope":
        # A conversion leaves out the length if Hugging Face's config.json states it beside the scaling, as Phi-3's does.
        length, limit = stated.get("original_max_position_embeddings"), "stated with rotary_scaling of type longrope"
        remedy = "add it to rotary_scaling from the model's own config.json"
        require(length is not None, "rotary_scaling.original_max_position_embeddings", length, limit, remedy)
    return {**LLAMA3_DEFAULTS, **stated} if kind == "llama3" else stated


def _object(values: dict[str, Any], name: str) -> dict[str, Any]:
    value = values.get(name)
    require(value is None or isinstance(value, dict), name, value, "an object or null", CHECK)
    return dict(value or {})


def _size(mapping: dict[str, Any], name: str) -> int:
    value = mapping.get(name, 1)
    valid = isinstance(value, int) and not isinstance(value, bool) and value > 0
    require(valid, f"mapping.{name}", value, "an integer > 0", CHECK)
    return int(value)
