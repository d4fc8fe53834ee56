"""Makes a ModelConfig from the config.json of a Hugging Face checkpoint. What the decoder lacks is refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from kvseek.core.config import CHECK_CONFIG, ModelConfig, RopeScaling
from kvseek.core.errors import ConfigError, from_dict, require

from .known_keys import CONFIG, IDLE_ROPE_KEYS, ROPE_KINDS, USE_ANOTHER, KnownKeys

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",  # the same decoder, with a sliding window in its first versions
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
DEFAULT_MISTRAL_WINDOW = 4096  # tokens; transformers' default for a Mistral config.json without the field
QK_NORM = ("qwen3", "qwen3_moe")
HYBRIDS = ("Qwen3Next", "Qwen3_5")  # with whatever follows
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
    _refuse_states(values)
    CONFIG.check(values)
    architecture = _architecture(values)
    _refuse_unsupported(values)
    heads, hidden = _integer(values, "num_attention_heads"), _integer(values, "hidden_size")
    layers = _integer(values, "num_hidden_layers")
    require(layers <= MOST_LAYERS, "num_hidden_layers", layers, f"<= {MOST_LAYERS}", CHECK_CONFIG)
    attention_bias = _boolean(values, "attention_bias")
    return from_dict(
        ModelConfig,
        {
            "architecture": architecture,
            "vocab_size": _integer(values, "vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": _integer(values, "intermediate_size"),
            "num_layers": layers,
            "num_heads": heads,
            "num_kv_heads": _kv_heads(values, architecture, heads),
            "head_dim": _head_dim(values, architecture, hidden, heads),
            "rms_norm_eps": _required(values, "rms_norm_eps"),
            "max_position_embeddings": _integer(values, "max_position_embeddings"),
            **_rope(values),
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
            "experts": _experts(values, architecture, layers),
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


def _refuse_states(values: dict[str, Any]) -> None:
    """Refuse hybrids before any key of theirs that is unknown, which nobody should remove."""
    stated = values.get("architectures")
    name = stated[0] if isinstance(stated, list) and stated else None
    hybrid, limit = isinstance(name, str) and name.startswith(HYBRIDS), f"one of {', '.join(ARCHITECTURES)}"
    remedy = (
        "its Gated DeltaNet layers keep a state and no rows, which kvseek cannot serve yet: use a Qwen3 or Qwen3-MoE"
    )
    require(not hybrid, "architectures", name, limit, remedy)


def _experts(values: dict[str, Any], architecture: str, layers: int) -> dict[str, Any] | None:
    """Read the fields of ExpertsConfig; in a decoder without experts, the keys must ask for none."""
    if not architecture.endswith("_moe"):
        for name in EXPERT_KEYS:
            limit = f"absent with architectures = {values['architectures'][0]!r}"
            require(not values.get(name), name, values.get(name), limit, USE_ANOTHER)
        return None
    shared, qwen2, name = "shared_expert_intermediate_size", architecture == "qwen2_moe", values["architectures"][0]
    # transformers 5 writes Qwen3-MoE's under another name.
    count = "num_local_experts" if not qwen2 and "num_experts" not in values else "num_experts"
    ignored = {"num_experts", "num_local_experts", *(() if qwen2 else ("qkv_bias", shared))}  # by transformers
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
        "norm_topk_prob": _boolean(values, "norm_topk_prob"),
        "shared_intermediate_size": _integer(values, shared) if qwen2 else None,
        "dense_layers": dense_layers(layers, step, alone),
    }


def dense_layers(layers: int, step: int, alone: Sequence[int]) -> tuple[int, ...]:
    """Number the layers without experts, by decoder_sparse_step and mlp_only_layers."""
    return tuple(layer for layer in range(layers) if layer in alone or (layer + 1) % step)


def _refuse_unsupported(values: dict[str, Any]) -> None:
    activation = values.get("hidden_act", "silu")
    require(activation == "silu", "hidden_act", activation, "'silu'", USE_ANOTHER)
    biased, name = values.get("mlp_bias", False), values["architectures"][0]
    limit = f"false, or absent, with architectures = {name!r}"  # transformers ignores the key there
    require(name == "LlamaForCausalLM" or biased is False, "mlp_bias", biased, limit, USE_ANOTHER)
    normed, limit = values.get("use_qk_norm", False), f"false, or absent, with architectures = {name!r}"
    fits = normed is False or (normed is True and ARCHITECTURES[name] in QK_NORM)
    require(fits, "use_qk_norm", normed, limit, USE_ANOTHER)
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
    stated = architecture in ("qwen2", "qwen2_moe", "qwen3_moe") and "head_dim" in values
    if stated:  # transformers computes nothing in its place
        return _integer(values, "head_dim")
    if architecture != "qwen3" and values.get("head_dim") is None:
        limit = f"a multiple of num_attention_heads = {heads}"
        require(hidden % heads == 0, "hidden_size", hidden, limit, "or state head_dim")
        return hidden // heads
    return _integer(values, "head_dim")


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    """Read the fields of ModelConfig for the rotation of positions, and for how far positions reach."""
    for name in ("rope_scaling", "rope_parameters"):
        valid = isinstance(values.get(name), dict | None)
        require(valid, name, values.get(name), "an object or null", CHECK_CONFIG)
    # Version 5 of transformers writes rope_parameters, but where rope_scaling is there too, it reads rope_scaling alone.
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    parameters = dict(values.get(name) or {})
    theta = parameters.pop("rope_theta", values.get("rope_theta", DEFAULT_ROPE_THETA))
    _check_partial(parameters.pop("partial_rotary_factor", values.get("partial_rotary_factor")))
    if (original := "original_max_position_embeddings") in values:  # goes before the one among the parameters
        outer = _integer(values, original)
        if _kind(parameters) in [kind for kind, keys in ROPE_KINDS.items() if original in keys]:
            parameters[original] = outer
    reach = _integer(values, "max_position_embeddings")
    scaling = rope_scaling(parameters, reach, name)
    if scaling is not None and scaling.kind == "yarn":
        reach = max(reach, int(scaling.factor * scaling.original_max_position_embeddings))
    return {
        "rope_theta": theta,
        "rope_scaling": None if scaling is None else dataclasses.asdict(scaling),
        "max_position_embeddings": min([reach, *_dual_chunks(values)]),
    }


def _check_partial(factor: Any) -> None:
    require(factor in (None, 1, 1.0), "partial_rotary_factor", factor, "1", USE_ANOTHER)


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
