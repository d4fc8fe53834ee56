"""Compares a ModelConfig with what transformers' own configuration class makes of the same config.json.

Two readers of one file: where kvseek and transformers would compute different things from it, the checkpoint is refused. Only
the configuration is made, no model.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from kvseek.core.config import ModelConfig
from kvseek.core.errors import ConfigError
from kvseek.engine.model.rope import frequencies

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # model_type → architecture
HAVE_OUTPUT_BIAS = ("llama", "qwen3")  # model types in which attention_bias is a bias of the output projection too
SAME_NAMES = ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps", "tie_word_embeddings")
OTHER_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
STATE = "state the field in config.json so that both read the same, or use another checkpoint"


def check_effective_config(model: ModelConfig, directory: Path) -> None:
    """Raise ConfigError if transformers refuses the config.json of `directory`, or reads another model than `model` from it.

    Not compared: bos_token_id and pad_token_id, which the tokenizer writes, and max_position_embeddings, from which transformers
    computes nothing that the frequencies do not show.
    """
    path = directory / "config.json"
    config = transformers_config(directory)
    for name, theirs in effective_values(config).items():
        ours = getattr(model, name)
        if ours != theirs:
            raise _difference(path, name, ours, theirs)
    if not model.eos_token_ids and config.eos_token_id is not None:
        raise _difference(path, "eos_token_id", None, config.eos_token_id)
    _compare_frequencies(model, config, path)


def transformers_config(directory: Path) -> Any:
    """Return transformers' configuration of a directory, with its RoPE parameters as its models will see them."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        config.standardize_rope_params()  # as models do once more when they are made
    except Exception as error:  # whatever transformers' validation raises: it is of many types
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"{directory / 'config.json'}: transformers cannot read it ({reason}); correct the file"
        ) from None
    return config


def effective_values(config: Any) -> dict[str, Any]:
    """Return fields of ModelConfig and their values in transformers' configuration; the architecture alone if it is another."""
    kind, biased = config.model_type, bool(getattr(config, "attention_bias", False))
    if kind not in ARCHITECTURES:
        return {"architecture": kind}
    return {
        "architecture": ARCHITECTURES[kind],
        **{name: getattr(config, name) for name in SAME_NAMES},
        **{name: getattr(config, theirs) for name, theirs in OTHER_NAMES.items()},
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "rope_theta": config.rope_parameters.get("rope_theta"),
        "qkv_bias": kind == "qwen2" or (kind in HAVE_OUTPUT_BIAS and biased),
        "output_bias": kind in HAVE_OUTPUT_BIAS and biased,
        "qk_norm": kind == "qwen3",
        "sliding_window": getattr(config, "sliding_window", None),
    }


def _compare_frequencies(model: ModelConfig, config: Any, path: Path) -> None:
    """Compare what the two compute from the scaling, not its fields, some of which mean the same by another name."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stated, scaling = config.rope_parameters, model.rope_scaling
    plain = stated["rope_type"] == "default"
    if plain != (scaling is None):
        raise _difference(path, "rope_scaling", scaling, stated)
    if plain:
        return
    found, factor = frequencies(model)
    theirs, their_factor = ROPE_INIT_FUNCTIONS[stated["rope_type"]](config, torch.device("cpu"))
    same = found.shape == theirs.shape and torch.allclose(found, theirs, rtol=1e-5, atol=0)
    if not same or not math.isclose(factor, their_factor, rel_tol=1e-6):
        raise _difference(path, "rope_scaling", scaling, stated)


def _difference(path: Path, name: str, ours: Any, theirs: Any) -> ConfigError:
    import transformers

    version = transformers.__version__
    return ConfigError(f"{path}: {name}: kvseek reads {ours!r}, transformers {version} reads {theirs!r}; {STATE}")
