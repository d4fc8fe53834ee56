"""config.json of Hugging Face directories: what each field means, what is refused by its name, and published models."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import BuildEngine
from tests.engine.model.test_logits import compare
from tests.support.checkpoint_files import LLAMA, LLAMA3
from tests.support.random_models import save_random_model

from kvseek.builder import build
from kvseek.builder.checkpoints.effective_config import check_effective_config, transformers_config
from kvseek.builder.checkpoints.model_config import model_config
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.checkpoints.weights import WeightFormat, total_size
from kvseek.core.config import read_config
from kvseek.core.errors import ConfigError
from kvseek.core.model_config import DeltaNetConfig, ExpertsConfig, ModelConfig, RopeScaling
from kvseek.engine.model.weights import list_weights

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
# LLAMA reaches 4,096 tokens, 4 times as far as here.
LONG = RopeScaling("longrope", 4.0, 1024, short_factor=(1.0,) * 8, long_factor=(2.0,) * 8)
LINEAR = {"type": "linear", "factor": 4.0}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "finetuned": True}
DEFAULT = {"rope_type": "default", "rope_theta": 500000.0}
SCALINGS = [
    ({"rope_type": "dynamic", "factor": 2.0}, RopeScaling("dynamic", 2.0)),
    ({**LONGROPE, "original_max_position_embeddings": 1024}, LONG),
    ({**LONGROPE, "original_max_position_embeddings": 1024, "factor": None, "attention_factor": None}, LONG),
    (
        {**LONGROPE, "original_max_position_embeddings": 8192},
        dataclasses.replace(LONG, factor=1.0, original_max_position_embeddings=8192),
    ),
    ({**LONGROPE, "factor": 2}, dataclasses.replace(LONG, factor=2.0, original_max_position_embeddings=4096)),
    ({"rope_type": "linear", "factor": 2.0}, RopeScaling("linear", 2.0)),
    ({"rope_type": "llama3", **LLAMA3}, RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)),
    ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 16}, RopeScaling("yarn", 4.0, 4096, beta_fast=16.0)),
    ({"rope_type": "default"}, None),
    ({"rope_type": "yarn", "factor": 4.0, "finetuned": True}, RopeScaling("yarn", 4.0, 4096)),
]


@pytest.mark.parametrize("style", ["type", "rope_type", "rope_parameters"])
@pytest.mark.parametrize(("scaling", "expected"), SCALINGS)
def test_rope_scaling(scaling: dict[str, Any], expected: RopeScaling | None, style: str) -> None:
    if style == "rope_parameters":
        config = model_config(LLAMA | {"rope_parameters": {"rope_theta": 5e5, **scaling}})
    else:
        stated = {style if key == "rope_type" else key: value for key, value in scaling.items()}
        config = model_config(LLAMA | {"rope_theta": 500000, "rope_scaling": stated})
    assert config.rope_scaling == expected
    assert config.rope_theta == 5e5
    assert config.max_position_embeddings == (4 * 4096 if scaling["rope_type"] == "yarn" else 4096)


def test_fields_of_each_architecture() -> None:
    llama = model_config(LLAMA, [9, 7])
    assert llama == ModelConfig("llama", 100, 64, 128, 2, 4, 2, 16, 1e-5, 1e4, 4096, eos_token_ids=(9, 7, 8))
    assert model_config(LLAMA | {"num_key_value_heads": None}).num_kv_heads == 4
    assert model_config(LLAMA | {"head_dim": 32}).head_dim == 32
    biased = model_config(LLAMA | {"attention_bias": True})
    assert (biased.qkv_bias, biased.output_bias, biased.qk_norm) == (True, True, False)
    assert model_config(LLAMA | {"mlp_bias": True}).mlp_bias
    qwen2 = model_config(LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32768})
    assert (qwen2.architecture, qwen2.qkv_bias, qwen2.output_bias) == ("qwen2", True, False)
    qwen3 = model_config(LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "tie_word_embeddings": True})
    assert (qwen3.architecture, qwen3.qk_norm, qwen3.qkv_bias, qwen3.tie_word_embeddings) == (
        "qwen3",
        True,
        False,
        True,
    )


LLAMA3_SCALING = {"rope_type": "llama3", **LLAMA3}
STATED = LLAMA | {"model_type": "llama", "bos_token_id": 1}
REFUSED = [
    ({"architectures": ["GPT2LMHeadModel"]}, r"architectures = 'GPT2LMHeadModel': must be one of LlamaForCausalLM"),
    ({"architectures": None}, "architectures = 'none'"),
    ({"architectures": 5}, "architectures = 5: must be a list"),
    ({"architectures": [["LlamaForCausalLM"]]}, r"architectures = \['LlamaForCausalLM'\]: must be one of"),
    ({"eos_token_id": {"id": 2}}, "eos_token_id = {'id': 2}: must be an integer, a list of integers or null"),
    ({"eos_token_id": [2, "end"]}, r"eos_token_id = \[2, 'end'\]: must be an integer"),
    ({"layer_types": 2}, "layer_types = 2: must be a list"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: must be <= 1024"),
    ({"rope_scaling": {"rope_type": "su"}}, "rope_scaling.rope_type = 'su'"),
    ({"rope_scaling": {"rope_type": "longrope"}}, r"length of rope_scaling.short_factor = 0: must be head_dim / 2 = 8"),
    (
        {"rope_scaling": LONGROPE | {"long_factor": [1.0] * 7}},
        r"length of rope_scaling.long_factor = 7: must be head_dim / 2 = 8",
    ),
    (
        {"rope_scaling": LONGROPE | {"short_factor": [1.0, 0, *[1.0] * 6]}},
        r"short_factor = 0.0: must be finite and > 0",
    ),
    ({"rope_scaling": LONGROPE | {"long_factor": 1.0}}, "rope_scaling: long_factor = 1.0"),
    (
        {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 1}},
        "original_max_position_embeddings = 1: must be > 1",
    ),
    (
        {"rope_scaling": LONGROPE | {"original_max_position_embeddings": "x"}},
        "original_max_position_embeddings = 'x': must be an integer",
    ),
    ({"rope_scaling": LONGROPE | {"short_mscale": 1.2}}, r"keys of rope_scaling = \['short_mscale'\]"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2}, "head_dim = 2: must be > 2 with dynamic"),
    ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "original_max_position_embeddings = 0: must be > 0"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types = \['sliding_attention'\]"),
    ({"mlp_bias": True, "architectures": ["Qwen2ForCausalLM"]}, "mlp_bias = True: must be false, or absent, with arch"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ({"num_hidden_layers": "12"}, "num_hidden_layers = '12': must be an integer"),
    ({"vocab_size": None}, "vocab_size is missing"),
    ({"num_key_value_heads": 3}, "num_kv_heads = 3: must be a divisor of num_heads = 4"),
    ({"architectures": ["Qwen3ForCausalLM"]}, "head_dim is missing"),
    ({"rope_parameters": {"full_attention": DEFAULT}}, r"keys of rope_parameters = \['full_attention'\]"),
    (
        {"rope_parameters": {**DEFAULT, "factor": 8.0}},
        r"\['factor'\]: must be among those of rope_type 'default': none",
    ),
    ({"rope_scaling": {**LINEAR, "beta_fast": 1}}, r"keys of rope_scaling = \['beta_fast'\]"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    (
        {"rope_scaling": {"rope_type": None, "factor": 2.0}},
        "rope_scaling.rope_type = None: must be one of default, lin",
    ),
    ({"rope_scaling": {"rope_type": "linear", "factor": None}}, "rope_scaling: factor = None: must be float"),
    ({"rope_scaling": [1]}, r"rope_scaling = \[1\]: must be an object or null"),
    ({"rope_scaling": YARN, "original_max_position_embeddings": None}, "original_max_position_embeddings is missing"),
    ({"rope_scaling": {**YARN, "rope_type": "linear"}}, r"\['original_max_position_embeddings'\]: must be among"),
    ({"sliding_window": 4096}, "sliding_window = 4096: must be null or absent"),
    ({"eos_token_id": 100}, "eos_token_id = 100: must be between 0 and vocab_size - 1 = 99"),
    ({"eos_token_id": [7, -1]}, "eos_token_id = -1: must be between 0"),
    ({"bos_token_id": 100}, "bos_token_id = 100: must be between 0"),
    (
        {"pad_token_id": -2},
        "pad_token_id = -2: must be between 0 and vocab_size - 1 = 99; state another one .* or null",
    ),
    *(({"rope_theta": theta}, "rope_theta = .*: must be finite and > 1") for theta in (-5, 0, 1, float("nan"), 1e400)),
    ({"rope_parameters": {"rope_theta": 0}}, "rope_theta = 0.0: must be finite and > 1"),
    ({"rope_theta": None}, "rope_theta = None: must be float"),
    ({"rope_theta": 10**400}, "rope_theta has 401 digits"),
    *(({"rms_norm_eps": eps}, "rms_norm_eps = .*: must be finite and > 0") for eps in (-1e-6, 0, float("inf"))),
    ({"max_position_embeddings": 2**31}, "max_position_embeddings = 2147483648: must be between 1 and"),
    ({"rope_scaling": {**YARN, "beta_fast": 0}}, "rope_scaling.beta_fast = 0.0: must be finite and > 0"),
    ({"rope_scaling": {**YARN, "beta_fast": 0.5}}, "rope_scaling.beta_fast = 0.5: must be >= beta_slow"),
    ({"rope_scaling": {**YARN, "beta_slow": -1}}, "rope_scaling.beta_slow = -1.0: must be finite and > 0"),
    ({"rope_scaling": {**YARN, "attention_factor": 0}}, "rope_scaling.attention_factor = 0.0: must be finite and > 0"),
    ({"rope_scaling": {**YARN, "mscale": -10}}, "rope_scaling.mscale = -10.0: must be finite and >= 0"),
    ({"rope_scaling": {**YARN, "truncate": None}}, "rope_scaling: truncate = None: must be bool"),
    ({"rope_scaling": {**YARN, "factor": 1e300}}, r"rope_scaling.factor = 1e\+300: must be <= 2147483647 / original"),
    ({"rope_scaling": {**LINEAR, "factor": 0.5}}, "rope_scaling.factor = 0.5: must be finite and >= 1"),
    (
        {"rope_scaling": YARN, "original_max_position_embeddings": 2**31},
        "embeddings = 2147483648: must be <= 2147483647",
    ),
    ({"head_dim": 2**25}, "head_dim = 33554432: must be between 1 and 16777216"),
    ({"rope_scaling": {**YARN, "factor": float("nan")}}, "rope_scaling.factor = nan: must be finite and >= 1"),
    (
        {"rope_scaling": {**LLAMA3_SCALING, "low_freq_factor": 4.0}},
        "rope_scaling.high_freq_factor = 4.0: must be > low_freq",
    ),
    (
        {"rope_scaling": {**LLAMA3_SCALING, "low_freq_factor": 0}},
        "rope_scaling.low_freq_factor = 0.0: must be finite and > 0",
    ),
    ({"tie_word_embeddings": None}, "tie_word_embeddings = None: must be true or false"),
    ({"attention_bias": "no"}, "attention_bias = 'no': must be true or false"),
    ({"dual_chunk_attention_config": {"chunk_size": 8, "local_size": 8}}, r"local_size = 8: must be < chunk_size"),
    ({"dual_chunk_attention_config": {"chunk": 8}}, "chunk = 8: must be a key that kvseek knows"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_refused_values(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_config(STATED | change)


# Names under which messages speak of a field, where it is not the field's own.
SPOKEN = {
    "num_attention_heads": "num_heads|hidden_size",
    "vocab_size": "token_id",
    "num_key_value_heads": "num_kv_heads",
}
VALUES = [None, True, -1, 0, 3, 0.5, float("nan"), 10**400, "", "x", [], [None], ["x"], {}, {"x": None}]


@pytest.mark.parametrize("name", [*STATED, "rope_theta", "rope_scaling", "rope_parameters", "head_dim", "layer_types"])
def test_any_value_of_any_field(name: str) -> None:
    """No value ends in anything but a configuration or an error that names the field."""
    names = [name, *SPOKEN.get(name, name).split("|")]
    for value in VALUES:
        message = ""
        try:
            assert isinstance(model_config(STATED | {name: value}), ModelConfig)
        except ConfigError as error:
            message = str(error)
        assert not message or any(one in message for one in names), f"{value!r:.9}: {message}"


@pytest.mark.parametrize("scaling", [LINEAR, LLAMA3_SCALING, YARN], ids=["linear", "llama3", "yarn"])
@pytest.mark.parametrize(
    "name", [*RopeScaling.__dataclass_fields__, "rope_type", "rope_theta", "partial_rotary_factor"]
)
def test_any_value_of_any_scaling_field(name: str, scaling: dict[str, Any]) -> None:
    outer = {"original_max_position_embeddings": 64}
    for value in VALUES:
        with contextlib.suppress(ConfigError):
            assert isinstance(model_config(STATED | outer | {"rope_scaling": {**scaling, name: value}}), ModelConfig)


def test_numbers_that_no_file_should_hold(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(STATED)[:-1] + ', "rope_theta": ' + "9" * 5000 + "}")
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        open_checkpoint(tmp_path)


def test_dual_chunk_attention_reaches_to_the_end_of_its_first_chunk() -> None:
    chunks = {"chunk_size": 1024, "local_size": 64, "original_max_position_embeddings": 1024}
    config = model_config(STATED | {"dual_chunk_attention_config": chunks})
    assert config.max_position_embeddings == 960
    assert config.rope_scaling is None


def test_sliding_windows_of_mistral() -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"]}
    assert model_config(mistral).sliding_window == 4096
    for window in (0, -1, "4096"):
        with pytest.raises(ConfigError, match=f"sliding_window = {window!r}: must be an integer > 0"):
            model_config(mistral | {"sliding_window": window})


# Keys that save_pretrained wrote beside those that say what the model is. Where one configuration is made of another, it may have
# keys of that one which change nothing.
SAVED = {
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
}
LLAMA_2 = SAVED | {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
LLAMA_3 = LLAMA_2 | {
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
LLAMA_3_262K = LLAMA_3 | {"max_position_embeddings": 262144, "rope_theta": 283461213.0}
SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA_31 = LLAMA_3 | {
    "eos_token_id": [128001, 128008, 128009],
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rope_scaling": SCALING,
}
LLAMA_32 = LLAMA_31 | {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": SCALING | {"factor": 32.0},
    "tie_word_embeddings": True,
}
# Biases in all projections, as the Granite Code models' paper (arXiv 2405.04324) and configurations have them.
GRANITE_CODE_3B = LLAMA_3 | {
    "attention_bias": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "max_position_embeddings": 128000,
    "mlp_bias": True,
    "num_key_value_heads": 32,
    "pad_token_id": 0,
    "rope_theta": 10000000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
SMOLLM_2 = LLAMA_3 | {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "mlp_bias": False,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "rope_interleaved": False,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "vocab_size": 49152,
}
QWEN_25 = SAVED | {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN_25_HALF = QWEN_25 | {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_window_layers": 21,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
QWEN_25_1M = QWEN_25 | {
    "dual_chunk_attention_config": {
        "chunk_size": 262144,
        "local_size": 8192,
        "original_max_position_embeddings": 262144,
    },
    "max_position_embeddings": 1010000,
    "rope_theta": 10000000.0,
}
YARN_4 = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}  # as Qwen's model cards say to add
R1_QWEN = QWEN_25 | {
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "max_position_embeddings": 131072,
    "rope_theta": 10000,
    "sliding_window": 4096,
    "use_mrope": False,
}
QWEN_3 = QWEN_25 | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "sliding_window": None,
    "vocab_size": 151936,
}
QWEN_3_4B = QWEN_3 | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
QWEN_3_MOE = QWEN_3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
QWEN_3_CODER = {key: value for key, value in QWEN_3_MOE.items() if key != "bos_token_id"} | {
    "intermediate_size": 5472,
    "max_position_embeddings": 262144,
    "max_window_layers": 28,
    "qkv_bias": False,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 0,
    "use_qk_norm": True,
}
QWEN_3_235B = QWEN_3_MOE | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 94,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}
QWEN_15_MOE = QWEN_25 | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "eos_token_id": 151643,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "vocab_size": 151936,
}
QWEN_3_NEXT = {
    key: value for key, value in QWEN_3_MOE.items() if key not in ("max_window_layers", "sliding_window")
} | {
    "architectures": ["Qwen3NextForCausalLM"],
    "full_attention_interval": 4,
    "head_dim": 256,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
}
# The text parts, as these models' text_config.
QWEN_35_TEXT = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 248320,
}
QWEN_35_27B = QWEN_35_TEXT | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    "linear_num_value_heads": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_5_text",
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
}
QWEN_35_35B = QWEN_35_TEXT | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "hidden_size": 2048,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
    "linear_num_value_heads": 32,
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
}
QWEN_2_57B = QWEN_15_MOE | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "moe_intermediate_size": 2560,
    "num_attention_heads": 28,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "shared_expert_intermediate_size": 20480,
    "sliding_window": 131072,
}
MISTRAL_1 = LLAMA_2 | {
    "architectures": ["MistralForCausalLM"],
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_key_value_heads": 8,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
}
MISTRAL_2 = MISTRAL_1 | {"rope_theta": 1000000.0, "sliding_window": None}
MISTRAL_NEMO = MISTRAL_2 | {
    "head_dim": 128,
    "hidden_size": 5120,
    "max_position_embeddings": 1024000,
    "num_hidden_layers": 40,
    "vocab_size": 131072,
}

LLAMA3_8, LLAMA3_32 = RopeScaling("llama3", 8.0, 8192), RopeScaling("llama3", 32.0, 8192)
ENDS_31 = (128001, 128008, 128009)
# Configuration, parameters as the model's page states them, what the decoder makes of it. All of these are served.
PUBLISHED: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "Llama-2-7B": (LLAMA_2, 6_738_415_616, {"num_kv_heads": 32, "rope_theta": 1e4, "rope_scaling": None}),
    "Llama-3-8B": (LLAMA_3, 8_030_261_248, {"architecture": "llama", "rope_theta": 5e5, "rope_scaling": None}),
    "Llama-3-8B-Instruct-262k": (LLAMA_3_262K, 8_030_261_248, {"rope_theta": 283461213.0, "rope_scaling": None}),
    "Llama-3.1-8B": (LLAMA_31, 8_030_261_248, {"rope_scaling": LLAMA3_8, "eos_token_ids": ENDS_31}),
    "Llama-3.2-1B": (LLAMA_32, 1_235_814_400, {"head_dim": 64, "rope_scaling": LLAMA3_32}),
    "Granite-3B-Code-128k": (GRANITE_CODE_3B, 3_482_503_680, {"mlp_bias": True, "output_bias": True, "head_dim": 80}),
    # As transformers 4 says to extend a Llama. It is served as far as the scaling changes nothing.
    "Llama-2-7B with dynamic NTK": (
        LLAMA_2 | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        6_738_415_616,
        {"rope_scaling": RopeScaling("dynamic", 2.0)},
    ),
    # Published models with longrope have other architectures; this one states it as Phi-3's configurations do.
    "Llama-3-8B with longrope": (
        LLAMA_3
        | {
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 8192,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [4.0] * 64},
        },
        8_030_261_248,
        {"rope_scaling": RopeScaling("longrope", 16.0, 8192, short_factor=(1.0,) * 64, long_factor=(4.0,) * 64)},
    ),
    "SmolLM2-135M": (SMOLLM_2, 134_515_008, {"tie_word_embeddings": True, "rope_theta": 1e5}),
    "Qwen2.5-0.5B": (QWEN_25_HALF, 494_032_768, {"tie_word_embeddings": True, "head_dim": 64}),
    "Qwen2.5-7B": (QWEN_25, 7_615_616_512, {"architecture": "qwen2", "qkv_bias": True, "sliding_window": None}),
    "DeepSeek-R1-Distill-Qwen-7B": (R1_QWEN, 7_615_616_512, {"rope_theta": 1e4, "sliding_window": None}),
    "Qwen3-8B": (QWEN_3, 8_190_735_360, {"architecture": "qwen3", "qk_norm": True, "qkv_bias": False}),
    "Qwen3-4B": (QWEN_3_4B, 4_022_468_096, {"tie_word_embeddings": True}),
    "Qwen3-30B-A3B": (
        QWEN_3_MOE,
        30_532_122_624,
        {"num_kv_heads": 4, "experts": ExpertsConfig(128, 8, 768, norm_topk_prob=True)},
    ),
    "Qwen3-Coder-30B-A3B": (QWEN_3_CODER, 30_532_122_624, {"qk_norm": True, "qkv_bias": False, "bos_token_id": None}),
    "Qwen3-235B-A22B": (QWEN_3_235B, 235_093_634_560, {"num_heads": 64, "num_layers": 94}),
    "Qwen1.5-MoE-A2.7B": (
        QWEN_15_MOE,
        14_315_784_192,
        {"qkv_bias": True, "experts": ExpertsConfig(60, 4, 1408, norm_topk_prob=False, shared_intermediate_size=5632)},
    ),
    "Qwen2-57B-A14B": (QWEN_2_57B, 57_408_658_944, {"head_dim": 128, "output_bias": False}),
    "Mistral-7B-v0.1": (MISTRAL_1, 7_241_732_096, {"architecture": "llama", "sliding_window": 4096}),
    "Mistral-7B-Instruct-v0.2": (MISTRAL_2, 7_241_732_096, {"rope_theta": 1e6, "sliding_window": None}),
    "Mistral-Nemo-2407": (MISTRAL_NEMO, 12_247_782_400, {"head_dim": 128, "num_heads": 32}),
}
# Served too, with another largest context than max_position_embeddings says.
OTHER_REACH: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    # Dual chunk attention is ordinary attention up to the end of its first chunk: 262,144 - 8,192 tokens.
    "Qwen2.5-7B-Instruct-1M": (QWEN_25_1M, 253952, {"rope_theta": 1e7, "rope_scaling": None}),
    "Qwen2.5-7B with YaRN": (
        QWEN_25 | {"rope_scaling": YARN_4},
        131072,
        {"rope_scaling": RopeScaling("yarn", 4, 32768)},
    ),
    "Qwen3-8B with YaRN": (QWEN_3 | {"rope_scaling": YARN_4}, 131072, {"rope_scaling": RopeScaling("yarn", 4, 32768)}),
    # attn_factor is no field of transformers' yarn, which warns of it and computes without it.
    "DeepSeek-R1-0528-Qwen3-8B": (
        QWEN_3 | {"rope_scaling": {**YARN_4, "attn_factor": 0.8782488562869419}},
        131072,
        {"rope_scaling": RopeScaling("yarn", 4, 32768)},
    ),
    # The scaling of Yarn-Llama-2-7b-64k, whose `finetuned` changes nothing, and whose own code transformers has too.
    "Yarn-Llama-2-7b-64k": (
        LLAMA_2
        | {
            "auto_map": {"AutoModelForCausalLM": "modeling_llama_together_yarn.LlamaForCausalLM"},
            "rope_scaling": {
                "factor": 16.0,
                "finetuned": True,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
        },
        65536,
        {"rope_scaling": RopeScaling("yarn", 16.0, 4096)},
    ),
}
# Refused, and why: the decoder lacks the part that the key asks for.
PUBLISHED_MODELS_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Mixtral-8x7B": (
        MISTRAL_2 | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8},
        "architectures = 'MixtralForCausalLM': must be one of",
    ),
    "Qwen3.6 without its text part": (
        {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "vision_config": {}},
        "vision_config = {}: must be a key that kvseek knows",
    ),
    "Gemma-2-9B": (
        LLAMA_3 | {"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0},
        r"attn_logit_softcapping = 50\.0: must be null, or absent",
    ),
    "Granite-3.0-8B": (
        LLAMA_3 | {"architectures": ["GraniteForCausalLM"], "embedding_multiplier": 12.0},
        r"embedding_multiplier = 12\.0: must be 1 or 1\.0, or absent",
    ),
    "Phi-3-mini-128k": (
        LLAMA_3 | {"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "longrope"}},
        "architectures = 'Phi3ForCausalLM': must be one of",
    ),
    "MiniCPM4-8B": (
        LLAMA_3 | {"architectures": ["MiniCPMForCausalLM"], "rope_scaling": {"rope_type": "longrope"}},
        "architectures = 'MiniCPMForCausalLM': must be one of",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name: str, tmp_path: Path) -> None:
    values, parameters, expected = PUBLISHED[name]
    config = read_by_both(values, tmp_path)
    found = vars(config)
    assert {field: found[field] for field in expected} == expected
    assert total_size(config, WeightFormat(torch.bfloat16)) == 2 * parameters
    assert config.max_position_embeddings == values["max_position_embeddings"]


STATES = DeltaNetConfig(tuple(layer for layer in range(64) if layer % 4 < 3), 16, 48, 128, 128, 4)
HYBRIDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen3-Next-80B-A3B": (
        QWEN_3_NEXT,
        {
            "rotary_dim": 64,
            "row_layers": tuple(range(3, 48, 4)),
            "experts": ExpertsConfig(512, 10, 512, norm_topk_prob=True, shared_intermediate_size=512),
        },
    ),
    "Qwen3.5-27B": (QWEN_35_27B, {"delta_net": STATES, "experts": None, "tie_word_embeddings": False}),
    "Qwen3.5-35B-A3B": (
        QWEN_35_35B,
        {
            "row_layers": tuple(range(3, 40, 4)),
            "experts": ExpertsConfig(256, 8, 512, norm_topk_prob=True, shared_intermediate_size=512),
        },
    ),
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids(name: str, tmp_path: Path) -> None:
    """As transformers reads them, and with as many parameters as its models have."""
    from transformers import AutoModelForCausalLM

    values, expected = HYBRIDS[name]
    config = read_by_both(values, tmp_path)
    assert {field: getattr(config, field) for field in expected} == expected
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(transformers_config(tmp_path))
    found = sum(math.prod(weight.shape) for weight in list_weights(config))
    assert found == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", OTHER_REACH)
def test_published_configurations_of_another_reach(name: str, tmp_path: Path) -> None:
    values, reach, expected = OTHER_REACH[name]
    config = read_by_both(values, tmp_path)
    assert {field: vars(config)[field] for field in expected} == expected
    assert config.max_position_embeddings == reach


def read_by_both(values: dict[str, Any], directory: Path) -> ModelConfig:
    """Read a configuration, in which transformers must find the same model."""
    (directory / "config.json").write_text(json.dumps(values))
    config = model_config(values)
    check_effective_config(config, directory)
    return config


@pytest.mark.parametrize("name", PUBLISHED_MODELS_REFUSED)
def test_refused_published_configurations(name: str) -> None:
    values, message = PUBLISHED_MODELS_REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        model_config(values)


def test_mistral_within_its_window(
    tmp_path: Path, build_engine: BuildEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_random_model(tmp_path / "model", "mistral", sliding_window=256)
    engine = tmp_path / "engine"
    arguments = ["--model", str(model), "--output_dir", str(engine), "--method", "full", "--kernels", "reference"]
    assert build.main([*arguments, "--max_seq_len", "257", "--quiet"]) == 1
    message = capsys.readouterr().err
    assert "max_seq_len = 257: must be <= sliding_window = 256" in message
    assert "build with --max_seq_len 256, or use another checkpoint" in message
    assert not list(tmp_path.glob("*engine*"))
    directory = build_engine(model, "full", "--kernels", "reference")
    assert read_config(directory).max_seq_len == 256, (
        "the longest that the model allows, and no error about a flag that nobody gave"
    )
    compare(model, directory, torch.arange(190).mul(7).remainder(100).tolist())
