"""What kvseek reads from config.json against what transformers' own class makes of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType
from tests.conftest import RandomModel
from tests.support.checkpoint_files import edit_gguf, edit_json, write_gguf
from tests.support.random_models import ARCHITECTURE_SHAPE, SHAPE

from kvseek.builder.checkpoints.effective_config import (
    check_effective_config,
    check_gguf_metadata,
    effective_values,
    transformers_config,
)
from kvseek.builder.checkpoints.files import read_object
from kvseek.builder.checkpoints.gguf import GgufCheckpoint
from kvseek.builder.checkpoints.model_config import model_config
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.core.config import ModelConfig, RopeScaling
from kvseek.core.errors import ConfigError

# Fields that are compared otherwise than by their values, or not (docstring of check_effective_config).
NOT_BY_VALUE = {"rope_scaling", "eos_token_ids", "bos_token_id", "pad_token_id", "max_position_embeddings"}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 16,
    "long_factor": [4.0] * 16,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def saved(directory: Path, architecture: str, **changes: Any) -> Path:
    """A directory with a config.json and nothing else."""
    import transformers

    config_class = getattr(transformers, f"{architecture.capitalize()}Config")
    values = {**SHAPE, **ARCHITECTURE_SHAPE[architecture], **changes}
    config_class(architectures=[f"{architecture.capitalize()}ForCausalLM"], **values).save_pretrained(directory)
    return directory


def read(directory: Path) -> ModelConfig:
    return model_config(read_object(directory / "config.json"))


@pytest.mark.parametrize("changes", [{}, {"rope_parameters": {"rope_theta": 1e4, **YARN}}], ids=["plain", "yarn"])
@pytest.mark.parametrize("architecture", ARCHITECTURE_SHAPE)
def test_every_field_is_compared(architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    directory = saved(tmp_path, architecture, **changes)
    model = read(directory)
    check_effective_config(model, directory)
    names = effective_values(transformers_config(directory))
    assert set(names) | NOT_BY_VALUE == {field.name for field in dataclasses.fields(ModelConfig)}
    others = {
        "architecture": "qwen2" if model.architecture == "llama" else "llama",
        "sliding_window": 512,
        "num_kv_heads": 3,
    }
    for name in names:
        value = getattr(model, name)
        other = others[name] if name in others else not value if isinstance(value, bool) else value * 2
        message = rf"config\.json: {name}: kvseek reads {other!r}, transformers \S+ reads "
        with pytest.raises(ConfigError, match=message):
            check_effective_config(dataclasses.replace(model, **{name: other}), directory)
    for scaling in (RopeScaling("linear", 2.0), RopeScaling("yarn", 4.0, 64, attention_factor=2.0)):
        with pytest.raises(ConfigError, match=r"config\.json: rope_scaling: kvseek reads RopeScaling\(.*transformers"):
            check_effective_config(dataclasses.replace(model, rope_scaling=scaling), directory)
    with pytest.raises(ConfigError, match=r"eos_token_id: kvseek reads None, transformers \S+ reads 1"):
        check_effective_config(dataclasses.replace(model, eos_token_ids=()), directory)


DIFFERENT = [
    ("mistral", {"num_key_value_heads": ...}, "num_kv_heads: kvseek reads 6, transformers .* reads 8"),
    ("llama", {"model_type": "mistral"}, "sliding_window: kvseek reads None, transformers .* reads 4096"),
    ("llama", {"model_type": "qwen3"}, "architecture: kvseek reads 'llama', transformers .* reads 'qwen3'"),
    ("llama", {"model_type": "gpt2"}, "architecture: kvseek reads 'llama', transformers .* reads 'gpt2'"),
    ("llama", {"model_type": ...}, "transformers cannot read it"),
    ("mistral", {"attention_bias": True}, "qkv_bias: kvseek reads True, transformers .* reads False"),
]
REFUSED_BY_TRANSFORMERS = [
    ("llama", {"initializer_range": "x"}, "initializer_range"),
    ("llama", {"hidden_size": 97}, "hidden size"),
    ("qwen3", {"layer_types": ["full_attention"]}, "layer"),
    ("llama", {"dtype": "float99"}, "float99"),
]


@pytest.mark.parametrize(("architecture", "changes", "message"), DIFFERENT)
def test_two_readings(architecture: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    directory = changed(saved(tmp_path, architecture), changes)
    with pytest.raises(ConfigError, match=message):
        check_effective_config(read(directory), directory)


@pytest.mark.parametrize(("architecture", "changes", "reason"), REFUSED_BY_TRANSFORMERS)
def test_what_transformers_refuses(architecture: str, changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    directory = changed(saved(tmp_path, architecture), changes)
    with pytest.raises(ConfigError, match=rf"config\.json: transformers cannot read it \(\w+: .*{reason}.*; correct"):
        check_effective_config(read(directory), directory)


def changed(directory: Path, changes: dict[str, Any]) -> Path:
    """Set fields of config.json, or remove those whose value is an ellipsis."""

    def change(values: dict[str, Any]) -> None:
        values.update(changes)
        for name in [name for name, value in values.items() if value is ...]:
            del values[name]

    return edit_json(directory / "config.json", change)


def test_longrope_is_compared_on_both_sides_of_its_border(tmp_path: Path) -> None:
    directory = saved(tmp_path, "llama", rope_parameters={"rope_theta": 1e4, **LONGROPE})
    model = read(directory)
    scaling = model.rope_scaling
    assert scaling is not None
    others: list[dict[str, Any]] = [
        {"short_factor": (2.0,) * 16},
        {"long_factor": (2.0,) * 16},
        {"original_max_position_embeddings": 63},
        {"original_max_position_embeddings": 65},
        {"factor": 2.0},
        {"attention_factor": 1.0},
    ]
    check_effective_config(model, directory)
    for change in others:
        other = dataclasses.replace(model, rope_scaling=dataclasses.replace(scaling, **change))
        with pytest.raises(ConfigError, match=r"config\.json: rope_scaling: kvseek reads"):
            check_effective_config(other, directory)


def test_dynamic_frequencies_beyond_their_reach_are_others(tmp_path: Path) -> None:
    directory = saved(tmp_path, "llama", rope_parameters={"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0})
    model = read(directory)
    check_effective_config(model, directory)
    further = dataclasses.replace(model, max_position_embeddings=model.max_position_embeddings + 1)
    with pytest.raises(ConfigError, match=r"config\.json: rope_scaling: kvseek reads"):
        check_effective_config(further, directory)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_every_field_that_transformers_reads_from_gguf_metadata_is_compared(
    architecture: str, random_model: RandomModel, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", random_model(architecture), architecture))
    assert isinstance(checkpoint, GgufCheckpoint)
    checkpoint.check()
    model, metadata, path = checkpoint.config, checkpoint._metadata, checkpoint.path
    names = {
        "hidden_size",
        "intermediate_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "rms_norm_eps",
        "rope_theta",
    }
    others = {"num_heads": 2 * model.num_heads, "num_kv_heads": 1, "tie_word_embeddings": not model.tie_word_embeddings}
    for name in names | {"tie_word_embeddings"}:
        other = dataclasses.replace(model, **{name: others.get(name, 2 * getattr(model, name))})
        message = (
            rf"model\.gguf: {name}: kvseek reads .*, transformers \S+ reads .*; use the model's Hugging Face directory"
        )
        with pytest.raises(ConfigError, match=message):
            check_gguf_metadata(other, path, metadata, checkpoint._tensors)
    # Only with a key that transformers reads; qwen files state the head size by one that it does not know.
    stated = {**metadata, f"{architecture}.vocab_size": 500}
    with pytest.raises(ConfigError, match=r"vocab_size: kvseek reads 384, transformers \S+ reads 500"):
        check_gguf_metadata(model, path, stated, checkpoint._tensors)


def test_a_gguf_file_that_transformers_takes_for_a_mistral(random_model: RandomModel, tmp_path: Path) -> None:
    """By its name alone, and then with Mistral's window, which llama.cpp does not apply."""
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), "llama")
    edit_gguf(
        path, lambda metadata, _: metadata.update({"general.name": "mistral"}), {"general.name": GGUFValueType.STRING}
    )
    with pytest.raises(ConfigError, match=r"sliding_window: kvseek reads None, transformers \S+ reads 4096"):
        open_checkpoint(path).check()
