"""config.json of Hugging Face directories: what each field means, and every value that is refused by its name."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoint_files import LLAMA, LLAMA3

from kvseek.builder.checkpoints.model_config import model_config
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.core.config import ModelConfig, RopeScaling
from kvseek.core.errors import ConfigError

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
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config = "),
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
