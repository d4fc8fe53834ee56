"""Makes a ModelConfig from the config.json of a Hugging Face checkpoint. What the decoder lacks is refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from kvseek.core.errors import ConfigError, from_dict, require
from kvseek.core.model_config import CHECK_CONFIG, HYBRIDS, ModelConfig, RopeScaling

from .known_keys import CONFIG, IDLE_ROPE_KEYS, ROPE_KINDS, USE_ANOTHER, KnownKeys

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",  # the same decoder, with a sliding window in its first versions
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
}
# Of models that also read images, whose text part is one of ARCHITECTURES.
WITH_IMAGES = {f"{name}ForConditionalGeneration": f"{name}ForCausalLM" for name in ("Qwen3_5", "Qwen3_5Moe")}
DEFAULT_MISTRAL_WINDOW = 4096  # tokens; transformers' default for a Mistral config.json without the field
QK_NORM = ("qwen3", "qwen3_moe", *HYBRIDS)
SHARED_EXPERT = ("qwen2_moe", "qwen3_next", "qwen3_5_moe")
HYBRID_ROTARY_FACTOR = 0.25  # transformers' default for hybrids
FULL_ATTENTION_INTERVAL = 4  # likewise: every fourth layer attends
KINDS = {"linear_attention": True, "full_attention": False}  # of layer_types: whether a layer keeps a state
DELTA_KEYS = {
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_head_dim": "linear_key_head_dim",
    "value_head_dim": "linear_value_head_dim",
    "conv_kernel": "linear_conv_kernel_dim",
}
EXPERT_KEYS = (
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "shared_expert_intermediate_size",
    "decoder_sparse_step",
    "mlp_only_layers",
    "qkv_bias",
)
MOST_LAYERS = (
    1024  # many times more than any published model has; with a damaged number the weights would be listed for ever
)
DEFAULT_ROPE_THETA = 10_000.0  # of checkpoints that are older than the field (RoFormer, section 3.2.2)
NO_PADDING = -1  # in the first Llama checkpoints
MAY_BE_NULL = {  # keys of a scaling whose null means the default
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    "longrope": ("factor", "attention_factor"),
}


def model_config(values: dict[str, Any], eos_token_ids: Iterable[int] = ()) -> ModelConfig:
    """Translate the fields of a Hugging Face config.json, as transformers 4 or 5 write it.

    Parameters
    ----------
    values : dict
        The parsed config.json.
    eos_token_ids : iterable of int
        End ids from elsewhere (generation_config.json); the end ids of `values` are put behind them.

    Raises
    ------
    ConfigError
        If a field is missing, malformed, unknown or asks for something that the decoder does not have; the message names the
        field.
    """
    CONFIG.check(values)
    architecture = _architecture(values)
    _refuse_unsupported(values, architecture)
    heads, hidden = _integer(values, "num_attention_heads"), _integer(values, "hidden_size")
    layers = _integer(values, "num_hidden_layers")
    require(layers <= MOST_LAYERS, "num_hidden_layers", layers, f"<= {MOST_LAYERS}", CHECK_CONFIG)
    attention_bias, hybrid = _boolean(values, "attention_bias"), architecture in HYBRIDS
    experts = _experts(values, architecture, layers)
    head_dim = _head_dim(values, architecture, hidden, heads)
    return from_dict(
        ModelConfig,
        {
            "architecture": architecture,
            "vocab_size": _integer(values, "vocab_size"),
            "hidden_size": hidden,
            # No layer of a qwen3_5_moe has one of this size, and no such config.json states it.
            "intermediate_size": _integer(values, f"{'moe_' * (architecture == 'qwen3_5_moe')}intermediate_size"),
            "num_layers": layers,
            "num_heads": heads,
            "num_kv_heads": _kv_heads(values, architecture, heads),
            "head_dim": head_dim,
            "rms_norm_eps": _required(values, "rms_norm_eps"),
            "max_position_embeddings": _integer(values, "max_position_embeddings"),
            **_rope(values, architecture, head_dim),
            "qkv_bias": attention_bias
            or architecture == "qwen2"
            or _boolean(values, "qkv_bias", architecture == "qwen2_moe"),
            "output_bias": attention_bias and not architecture.startswith("qwen2"),
            "mlp_bias": _boolean(values, "mlp_bias"),
            "qk_norm": architecture in QK_NORM,
            "tie_word_embeddings": _boolean(values, "tie_word_embeddings"),
            "bos_token_id": values.get("bos_token_id"),
            "eos_token_ids": list(dict.fromkeys([*eos_token_ids, *token_ids(values.get("eos_token_id"))])),
            "pad_token_id": None if values.get("pad_token_id") == NO_PADDING else values.get("pad_token_id"),
            "sliding_window": _sliding_window(values),
            "experts": experts,
            "gated_attention": hybrid,
            "centred_norms": hybrid,
            "delta_net": _delta_net(values, layers) if hybrid else None,
        },
        "model",
    )


def token_ids(value: Any) -> list[int]:
    """Turn an id, a list of ids or None, as configs hold them, into a list; raises ConfigError on anything else."""
    if value is None:
        return []
    ids = list(value) if isinstance(value, (list, tuple)) else [value]
    valid = all(isinstance(one, int) and not isinstance(one, bool) for one in ids)
    require(valid, "eos_token_id", value, "an integer, a list of integers or null", "check the model's JSON files")
    return ids


def _architecture(values: dict[str, Any]) -> str:
    stated = values.get("architectures") or ["none"]
    require(isinstance(stated, list), "architectures", stated, "a list", CHECK_CONFIG)
    found, limit = stated[0], f"one of {', '.join(ARCHITECTURES)}"
    known = isinstance(found, str) and found in ARCHITECTURES
    require(known, "architectures", found, limit, "convert the model or choose another")
    return ARCHITECTURES[found]


def text_part(values: dict[str, Any]) -> dict[str, Any] | None:
    """Return the config.json of the text part of a model that also reads images; None: it is of another kind.

    Raises ConfigError if it states no text part.
    """
    stated = values.get("architectures")
    name = stated[0] if isinstance(stated, list) and stated else None
    if not isinstance(name, str) or name not in WITH_IMAGES:
        return None
    text = values.get("text_config")
    require(isinstance(text, dict), "text_config", text, "an object", CHECK_CONFIG)
    assert isinstance(text, dict), "as it has just been found"
    tied = values.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return {**text, "architectures": [WITH_IMAGES[name]], "tie_word_embeddings": tied}


def _delta_net(values: dict[str, Any], layers: int) -> dict[str, Any]:
    """Read the fields of DeltaNetConfig."""
    kinds, name = values.get("layer_types"), "full_attention_interval"
    if kinds is None:
        interval = _integer({name: values.get(name, FULL_ATTENTION_INTERVAL)}, name)
        kinds = ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(layers)]
    limit = f"a list of {layers}, each one of {', '.join(KINDS)}"
    fits = (
        isinstance(kinds, list) and len(kinds) == layers and all(isinstance(one, str) and one in KINDS for one in kinds)
    )
    require(fits, "layer_types", kinds, limit, CHECK_CONFIG)
    sizes = {name: _integer(values, key) for name, key in DELTA_KEYS.items()}
    return {"layers": [layer for layer, kind in enumerate(kinds) if KINDS[kind]], **sizes}


def _experts(values: dict[str, Any], architecture: str, layers: int) -> dict[str, Any] | None:
    """Read the fields of ExpertsConfig; in a decoder without experts, the keys must ask for none."""
    if not architecture.endswith("_moe") and architecture != "qwen3_next":
        for name in EXPERT_KEYS:
            limit = f"absent with architectures = {values['architectures'][0]!r}"
            require(not values.get(name), name, values.get(name), limit, USE_ANOTHER)
        return None
    if architecture == "qwen3_next" and values.get("num_experts") == 0:
        return None  # transformers looks at no other key then
    shared, name = "shared_expert_intermediate_size", values["architectures"][0]
    # transformers 5 writes Qwen3-MoE's under another name.
    local = architecture == "qwen3_moe" and "num_local_experts" in values and "num_experts" not in values
    count = "num_local_experts" if local else "num_experts"
    ignored = {"num_experts", "num_local_experts"}  # by transformers
    ignored |= set() if architecture == "qwen2_moe" else {"qkv_bias"}
    ignored |= set() if architecture in SHARED_EXPERT else {shared}
    everywhere = architecture == "qwen3_5_moe"  # experts in all layers, normalised
    ignored |= {"decoder_sparse_step", "mlp_only_layers", "norm_topk_prob"} if everywhere else set()
    for key in sorted(ignored - {count}):
        require(not values.get(key), key, values.get(key), f"absent with architectures = {name!r}", USE_ANOTHER)
    step = _integer({"decoder_sparse_step": values.get("decoder_sparse_step", 1)}, "decoder_sparse_step")
    alone = values.get("mlp_only_layers") or []
    numbers = isinstance(alone, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in alone)
    require(numbers, "mlp_only_layers", alone, "a list of numbers of layers", CHECK_CONFIG)
    return {
        "num_experts": _integer(values, count),
        "num_experts_per_tok": _integer(values, "num_experts_per_tok"),
        "intermediate_size": _integer(values, "moe_intermediate_size"),
        "norm_topk_prob": everywhere or _boolean(values, "norm_topk_prob"),
        "shared_intermediate_size": _integer(values, shared) if architecture in SHARED_EXPERT else None,
        "dense_layers": dense_layers(layers, step, alone),
    }


def dense_layers(layers: int, step: int, alone: Sequence[int]) -> tuple[int, ...]:
    """Number the layers without experts, by decoder_sparse_step and mlp_only_layers."""
    return tuple(layer for layer in range(layers) if layer in alone or (layer + 1) % step)


def _refuse_unsupported(values: dict[str, Any], architecture: str) -> None:
    activation = values.get("hidden_act", "silu")
    require(activation == "silu", "hidden_act", activation, "'silu'", USE_ANOTHER)
    biased, name = values.get("mlp_bias", False), values["architectures"][0]
    limit = f"false, or absent, with architectures = {name!r}"  # transformers ignores the key there
    require(name == "LlamaForCausalLM" or biased is False, "mlp_bias", biased, limit, USE_ANOTHER)
    normed, limit = values.get("use_qk_norm", False), f"false, or absent, with architectures = {name!r}"
    fits = normed is False or (normed is True and ARCHITECTURES[name] in QK_NORM)
    require(fits, "use_qk_norm", normed, limit, USE_ANOTHER)
    if architecture in HYBRIDS:
        gated = values.get("attn_output_gate", True)
        require(gated is True, "attn_output_gate", gated, "true or absent", USE_ANOTHER)
        return
    for name in ("full_attention_interval", *DELTA_KEYS.values()):
        limit = f"absent with architectures = {values['architectures'][0]!r}"
        require(values.get(name) is None, name, values.get(name), limit, USE_ANOTHER)
    gated = values.get("attn_output_gate")
    require(not gated, "attn_output_gate", gated, "false or absent", USE_ANOTHER)
    kinds = values.get("layer_types")
    require(isinstance(kinds, list | None), "layer_types", kinds, "a list", CHECK_CONFIG)
    kinds = [kind for kind in dict.fromkeys(map(str, kinds or [])) if kind != "full_attention"]
    require(not kinds, "layer_types", kinds, "'full_attention' in every layer", USE_ANOTHER)


def _sliding_window(values: dict[str, Any]) -> int | None:
    """Read Mistral's window; Qwen's configurations also state a window, which use_sliding_window = false puts out of use."""
    architecture = values["architectures"][0]
    window = values.get("sliding_window", DEFAULT_MISTRAL_WINDOW if architecture == "MistralForCausalLM" else None)
    if window is None or architecture.startswith("Qwen"):
        return None
    # Llama has no window, but transformers' cache would cut the rows of a Llama whose config.json states one.
    require(architecture != "LlamaForCausalLM", "sliding_window", window, "null or absent", USE_ANOTHER)
    return _integer({"sliding_window": window}, "sliding_window")


def _kv_heads(values: dict[str, Any], architecture: str, heads: int) -> int:
    """Read the number of KV heads, which Llama checkpoints older than grouped-query attention do not state."""
    if architecture == "llama" and values.get("num_key_value_heads") is None:
        return heads
    return _integer(values, "num_key_value_heads")


def _head_dim(values: dict[str, Any], architecture: str, hidden: int, heads: int) -> int:
    """Read or compute the head size; Qwen3's must be stated, because it does not follow from other fields."""
    stated = architecture in ("qwen2", "qwen2_moe", "qwen3_moe", *HYBRIDS) and "head_dim" in values
    if stated:  # transformers computes nothing in its place
        return _integer(values, "head_dim")
    if architecture not in ("qwen3", *HYBRIDS) and values.get("head_dim") is None:
        limit = f"a multiple of num_attention_heads = {heads}"
        require(hidden % heads == 0, "hidden_size", hidden, limit, "or state head_dim")
        return hidden // heads
    return _integer(values, "head_dim")


def _rope(values: dict[str, Any], architecture: str, head_dim: int) -> dict[str, Any]:
    """Read the fields of ModelConfig for the rotation of positions, and for how far positions reach."""
    for name in ("rope_scaling", "rope_parameters"):
        valid = isinstance(values.get(name), dict | None)
        require(valid, name, values.get(name), "an object or null", CHECK_CONFIG)
    # Version 5 of transformers writes rope_parameters, but where rope_scaling is there too, it reads rope_scaling alone.
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    parameters = dict(values.get(name) or {})
    theta = parameters.pop("rope_theta", values.get("rope_theta", DEFAULT_ROPE_THETA))
    usual = HYBRID_ROTARY_FACTOR if architecture in HYBRIDS else None
    partial = parameters.pop("partial_rotary_factor", values.get("partial_rotary_factor", usual))
    if architecture in ("qwen3_5", "qwen3_5_moe"):  # a text's tokens have the same position in each section
        parameters.pop("mrope_section", None), parameters.pop("mrope_interleaved", None)
    if (original := "original_max_position_embeddings") in values:  # goes before the one among the parameters
        outer = _integer(values, original)
        if _kind(parameters) in [kind for kind, keys in ROPE_KINDS.items() if original in keys]:
            parameters[original] = outer
    reach = _integer(values, "max_position_embeddings")
    scaling = rope_scaling(parameters, reach, name)
    if scaling is not None and scaling.kind == "yarn":
        reach = max(reach, int(scaling.factor * scaling.original_max_position_embeddings))
    return {
        "rotary_dim": _rotary_dim(partial, architecture, head_dim),
        "rope_theta": theta,
        "rope_scaling": None if scaling is None else dataclasses.asdict(scaling),
        "max_position_embeddings": min([reach, *_dual_chunks(values)]),
    }


def _rotary_dim(factor: Any, architecture: str, head_dim: int) -> int | None:
    if architecture not in HYBRIDS:
        require(factor in (None, 1, 1.0), "partial_rotary_factor", factor, "1", USE_ANOTHER)
        return None
    number = isinstance(factor, int | float) and not isinstance(factor, bool) and 0 < factor <= 1
    require(number, "partial_rotary_factor", factor, "a number > 0, <= 1", CHECK_CONFIG)
    return None if factor == 1 else int(head_dim * factor)


def _dual_chunks(values: dict[str, Any]) -> list[int]:
    """Tell how far dual chunk attention (Qwen2.5-1M) is ordinary attention: to the end of the first chunk."""
    name = "dual_chunk_attention_config"
    stated = values.get(name)
    if stated is None:
        return []
    require(isinstance(stated, dict), name, stated, "an object or null", CHECK_CONFIG)
    approximations = {"an approximation, beside the whole attention that is served": "sparse_attention_*"}
    KnownKeys(name, "chunk_size local_size original_max_position_embeddings", {}, approximations).check(stated)
    first = _integer(stated, "chunk_size") - _integer(stated, "local_size")
    require(first > 0, f"{name}.local_size", stated["local_size"], "< chunk_size", CHECK_CONFIG)
    return [first]


def _kind(parameters: dict[str, Any]) -> Any:
    """Return the kind of a scaling; version 4 of transformers called the key `type`."""
    return parameters.get("rope_type", parameters.get("type", "default"))


def rope_scaling(parameters: dict[str, Any], max_position_embeddings: int, where: str) -> RopeScaling | None:
    """Translate `rope_scaling` or `rope_parameters` without its rope_theta; None when frequencies are not scaled.

    A yarn or longrope scaling that does not state original_max_position_embeddings means max_position_embeddings, and a
    longrope scaling without a factor means the ratio of the two, as in transformers. Raises ConfigError on an unsupported kind or
    on a key that the kind does not have.
    """
    fields, kind = dict(parameters), _kind(parameters)
    known = isinstance(kind, str) and kind in ROPE_KINDS
    require(known, f"{where}.rope_type", kind, f"one of {', '.join(ROPE_KINDS)}", USE_ANOTHER)
    # "finetuned" tells how the scaling was made, without effect on it.
    for name in ("rope_type", "type", "finetuned", *IDLE_ROPE_KEYS.get(kind, "").split()):
        fields.pop(name, None)
    unknown = sorted(set(fields) - set(ROPE_KINDS[kind].split()))
    keys = ROPE_KINDS[kind].replace(" ", ", ") or "none"
    require(not unknown, f"keys of {where}", unknown, f"among those of rope_type {kind!r}: {keys}", CHECK_CONFIG)
    if kind == "default":
        return None
    fields = {
        name: value for name, value in fields.items() if value is not None or name not in MAY_BE_NULL.get(kind, ())
    }
    if kind in ("yarn", "longrope"):
        fields.setdefault("original_max_position_embeddings", max_position_embeddings)
    if kind == "longrope":  # of which a factor below 1 would change nothing, so none is stated
        original = _integer(fields, "original_max_position_embeddings")
        fields.setdefault("factor", max(1.0, max_position_embeddings / original))
    if "factor" not in fields:
        raise ConfigError(f"{where}.factor is missing; add it from the model's publisher")
    return from_dict(RopeScaling, {"kind": kind, **fields}, where)


def _required(values: dict[str, Any], name: str) -> Any:
    if values.get(name) is None:
        raise ConfigError(f"{name} is missing; add it from the model's publisher")
    return values[name]


def _integer(values: dict[str, Any], name: str) -> int:
    value = _required(values, name)
    valid = isinstance(value, int) and not isinstance(value, bool) and value > 0
    require(valid, name, value, "an integer > 0", CHECK_CONFIG)
    return int(value)


def _boolean(values: dict[str, Any], name: str, default: bool = False) -> bool:
    """Read a field that is `default` where it is absent."""
    value = values.get(name, default)
    require(isinstance(value, bool), name, value, "true or false", CHECK_CONFIG)
    return bool(value)
