"""Compares a ModelConfig with what transformers' own configuration class makes of the same config.json or GGUF metadata.

Two readers of one file: where kvseek and transformers would compute different things from it, the checkpoint is refused. Only
the configuration is made, no model.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvseek.core.errors import ConfigError
from kvseek.core.model_config import HYBRIDS, MODEL_ARCHITECTURES, DeltaNetConfig, ExpertsConfig, ModelConfig
from kvseek.core.rope import frequencies

from .model_config import DELTA_KEYS, KINDS, QK_NORM, SHARED_EXPERT, dense_layers

# model_type → architecture
ARCHITECTURES = {name: name for name in MODEL_ARCHITECTURES} | {
    "mistral": "llama",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
}
# Model types in which attention_bias is a bias of the output projection too.
HAVE_OUTPUT_BIAS = ("llama", "qwen3", "qwen3_moe", *HYBRIDS)
ALWAYS_BIASED = ("qwen2", "qwen2_moe")  # in query, key and value, unless qkv_bias says otherwise
SAME_NAMES = ("vocab_size", "hidden_size", "rms_norm_eps", "tie_word_embeddings")
OTHER_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
# Fields that a GGUF file states by its tensors. transformers looks at none of these, and has no biases in a llama.
BY_TENSORS = ("qkv_bias", "output_bias", "mlp_bias")
# Fields that transformers reads from keys which a GGUF file may lack. It takes a default, and kvseek the tensors' shapes.
BY_KEYS = {"vocab_size": "vocab_size", "head_dim": "rope.dimension_count"}
STATE = "state the field in config.json so that both read the same, or use another checkpoint"
USE_DIRECTORY = "use the model's Hugging Face directory"


def check_effective_config(model: ModelConfig, directory: Path) -> None:
    """Raise ConfigError if transformers refuses the config.json of `directory`, or reads another model than `model` from it.

    Not compared: bos_token_id and pad_token_id, which the tokenizer writes, and max_position_embeddings, from which transformers
    computes nothing that the frequencies do not show.
    """
    path = directory / "config.json"
    config = transformers_config(directory)
    _compare_values(model, effective_values(config), path, STATE)
    if not model.eos_token_ids and config.eos_token_id is not None:
        raise _difference(path, "eos_token_id", None, config.eos_token_id, STATE)
    _compare_frequencies(model, config, path)


def check_gguf_metadata(model: ModelConfig, path: Path, metadata: Mapping[str, Any], tensors: Collection[str]) -> None:
    """Raise ConfigError if transformers reads another model than `model` from the metadata of the GGUF file `path`.

    transformers is given a file of the keys that it takes a model's sizes from, because reading a vocabulary takes seconds. Not
    compared is what transformers does not read from metadata: RoPE scaling, and the fields of BY_TENSORS and BY_KEYS.

    Parameters
    ----------
    metadata : mapping
        Values by key. Arrays are left out: one that states a size for each layer has been refused before.
    tensors : collection of str
        The names of the file's tensors.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "metadata.gguf")
        _write_metadata(copy, metadata, tensors)
        config = transformers_config(Path(folder), copy.name, path)
    architecture = metadata["general.architecture"]
    absent = {name for name, key in BY_KEYS.items() if f"{architecture}.{key}" not in metadata}
    values = effective_values(config)
    compared = {name: value for name, value in values.items() if name not in absent and name not in BY_TENSORS}
    if (ours := model.experts) is not None and compared.get("experts") is not None:  # whose sizes it does not read
        sizes = {name: getattr(ours, name) for name in ("intermediate_size", "shared_intermediate_size")}
        compared["experts"] = replace(compared["experts"], **sizes)
    _compare_values(model, compared, path, USE_DIRECTORY)


def _write_metadata(path: Path, metadata: Mapping[str, Any], tensors: Collection[str]) -> None:
    """Write a GGUF file of the model's name and sizes, and of a number as the head, if there is one: transformers asks for it."""
    from gguf import GGUFValueType, GGUFWriter

    kinds = {
        bool: GGUFValueType.BOOL,
        int: GGUFValueType.UINT64,
        float: GGUFValueType.FLOAT64,
        str: GGUFValueType.STRING,
    }
    architecture = metadata["general.architecture"]
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if (key == "general.name" or key.startswith(f"{architecture}.")) and type(value) in kinds:
            kind = GGUFValueType.INT64 if type(value) is int and value < 0 else kinds[type(value)]
            writer.add_key_value(key, value, kind)
    for name in {"output.weight"} & set(tensors):
        writer.add_tensor(name, torch.zeros(1).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def transformers_config(directory: Path, gguf_file: str | None = None, shown: Path | None = None) -> Any:
    """Return transformers' configuration of a directory, or of a GGUF file in it, with RoPE parameters as its models see them.

    `shown` is the file that messages name: config.json without it.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            directory, gguf_file=gguf_file, local_files_only=True, trust_remote_code=False
        )
        config = config.get_text_config()  # of a model that also reads images
        config.standardize_rope_params()  # as models do once more when they are made
    except Exception as error:  # whatever transformers' validation raises: it is of many types
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        path = shown or directory / "config.json"
        raise ConfigError(f"{path}: transformers cannot read it ({reason}); correct the file") from None
    return config


def effective_values(config: Any) -> dict[str, Any]:
    """Return fields of ModelConfig and their values in transformers' configuration; the architecture alone if it is another."""
    kind, biased = config.model_type, bool(getattr(config, "attention_bias", False))
    if kind not in ARCHITECTURES:
        return {"architecture": kind}
    own = ARCHITECTURES[kind]
    kind = own if own in HYBRIDS else kind
    return {
        "architecture": own,
        "intermediate_size": getattr(config, f"{'moe_' * (own == 'qwen3_5_moe')}intermediate_size"),
        **{name: getattr(config, name) for name in SAME_NAMES},
        **{name: getattr(config, theirs) for name, theirs in OTHER_NAMES.items()},
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "rope_theta": config.rope_parameters.get("rope_theta"),
        "qkv_bias": getattr(config, "qkv_bias", True) if kind in ALWAYS_BIASED else kind in HAVE_OUTPUT_BIAS and biased,
        "output_bias": kind in HAVE_OUTPUT_BIAS and biased,
        "mlp_bias": kind == "llama" and bool(config.mlp_bias),
        "qk_norm": kind in QK_NORM,
        "sliding_window": getattr(config, "sliding_window", None) or None,
        "experts": _experts(config, kind) if getattr(config, "num_experts", 0) else None,
        "gated_attention": own in HYBRIDS,
        "centred_norms": own in HYBRIDS,
        "delta_net": _delta_net(config) if kind in HYBRIDS else None,
        "rotary_dim": _rotary_dim(config) if kind in HYBRIDS else None,
    }


def _experts(config: Any, kind: str) -> ExpertsConfig:
    everywhere = kind == "qwen3_5_moe"
    dense = (
        () if everywhere else dense_layers(config.num_hidden_layers, config.decoder_sparse_step, config.mlp_only_layers)
    )
    return ExpertsConfig(
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        everywhere or config.norm_topk_prob,
        config.shared_expert_intermediate_size if kind in SHARED_EXPERT else None,
        dense,
    )


def _delta_net(config: Any) -> DeltaNetConfig:
    layers = tuple(layer for layer, kind in enumerate(config.layer_types) if KINDS.get(kind))
    return DeltaNetConfig(layers, **{name: getattr(config, key) for name, key in DELTA_KEYS.items()})


def _rotary_dim(config: Any) -> int | None:
    factor = config.rope_parameters.get("partial_rotary_factor", 1.0)
    return None if factor == 1 else int(config.head_dim * factor)


def _compare_values(model: ModelConfig, values: Mapping[str, Any], path: Path, remedy: str) -> None:
    for name, theirs in values.items():
        if (ours := getattr(model, name)) != theirs:
            raise _difference(path, name, ours, theirs, remedy)


def _compare_frequencies(model: ModelConfig, config: Any, path: Path) -> None:
    """Compare what the two compute from the scaling, not its fields, some of which mean the same by another name.

    Compared are sequences of the largest length that is served, and with longrope of the largest that is short and the next.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stated, scaling = config.rope_parameters, model.rope_scaling
    plain = stated["rope_type"] == "default"
    if plain != (scaling is None):
        raise _difference(path, "rope_scaling", scaling, stated, STATE)
    if plain:
        return
    reach, short = model.max_position_embeddings, model.short_reach
    for length in sorted({reach, *(border for border in (short, short + 1) if border < reach)}):
        found, factor = frequencies(model, length)
        compute = ROPE_INIT_FUNCTIONS[stated["rope_type"]]
        theirs, their_factor = compute(config, torch.device("cpu"), seq_len=length)
        found = found[: (model.rotary_dim or model.head_dim) // 2]
        same = found.shape == theirs.shape and torch.allclose(found, theirs, rtol=1e-5, atol=0)
        if not same or not math.isclose(factor, their_factor, rel_tol=1e-6):
            raise _difference(path, "rope_scaling", scaling, stated, STATE)


def _difference(path: Path, name: str, ours: Any, theirs: Any, remedy: str) -> ConfigError:
    import transformers

    version = transformers.__version__
    return ConfigError(f"{path}: {name}: kvseek reads {ours!r}, transformers {version} reads {theirs!r}; {remedy}")
