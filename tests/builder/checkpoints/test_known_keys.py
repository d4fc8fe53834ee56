"""What is read of config.json and of GGUF's metadata, against transformers' own classes: every key, and every field's value."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType
from tests.conftest import RandomModel
from tests.support.checkpoint_files import LLAMA, edit_gguf, edit_json, finish, write_gguf
from tests.support.random_models import ARCHITECTURE_SHAPE, MIXTURES, SHAPE, class_prefix, save_random_model

from kvseek.builder.checkpoints.effective_config import (
    check_effective_config,
    check_gguf_metadata,
    effective_values,
    transformers_config,
)
from kvseek.builder.checkpoints.files import generation_ends, read_object
from kvseek.builder.checkpoints.gguf import GgufCheckpoint
from kvseek.builder.checkpoints.known_keys import (
    CONFIG,
    GENERATION,
    GGUF,
    IDLE_ROPE_KEYS,
    ROPE_KINDS,
    TENSORRT_LLM,
    KnownKeys,
)
from kvseek.builder.checkpoints.model_config import model_config
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.core.errors import ConfigError
from kvseek.core.model_config import ModelConfig, RopeScaling

CLASSES = (
    "PreTrainedConfig",
    "LlamaConfig",
    "MistralConfig",
    "Qwen2Config",
    "Qwen3Config",
    "Qwen2MoeConfig",
    "Qwen3MoeConfig",
    "Qwen3NextConfig",
    "Qwen3_5TextConfig",
    "Qwen3_5MoeTextConfig",
)
LISTS = {"CONFIG": CONFIG, "GENERATION": GENERATION, "GGUF": GGUF, "TENSORRT_LLM": TENSORRT_LLM}
# Keys of gguf's constants that ask for parts which the decoder lacks; they are refused as unknown.
OTHER_PARTS = """
    deepstack dense embedding_length_ expert features_length leading_dense moe_ nextn pooling logit softcapping swin rescale
    time_ residual_scale embedding_scale token_shift interleave_moe full_attention activation_sparsity altup swiglu decoder_
    alibi clamp layer_norm_epsilon group_norm lora relative_buckets attention.scale output_scale temperature _mla _swa
    shared_kv sliding_window_pattern dimension_sections freq_base_swa scaling.alpha attn_factor yarn_log ext_factor"""


@pytest.mark.parametrize("name", CLASSES)
def test_every_key_of_transformers_configurations(name: str) -> None:
    """The fields of the classes, what save_pretrained writes, and that their defaults ask for nothing that is refused."""
    import transformers

    made = getattr(transformers, name)()
    fields = {field.name for field in dataclasses.fields(made)}
    assert [key for key in sorted(fields | set(made.to_dict())) if not CONFIG.knows(key)] == []
    CONFIG.check(made.to_dict())
    CONFIG.check(json.loads(made.to_json_string()))


def test_every_key_of_transformers_generation_configuration() -> None:
    from transformers import GenerationConfig

    made = GenerationConfig()
    GENERATION.check(vars(made))
    ignored = GenerationConfig._get_default_generation_params()
    CONFIG.check({key: value for key, value in ignored.items() if key not in ("eos_token_id", "bos_token_id")})


@pytest.mark.parametrize(
    ("kind", "key"), [(kind, key) for kind, keys in IDLE_ROPE_KEYS.items() for key in keys.split()]
)
def test_scaling_keys_that_transformers_ignores_change_nothing(kind: str, key: str, tmp_path: Path) -> None:
    scaling = {"rope_type": kind, "factor": 2.0}
    plain = model_config(LLAMA | {"rope_scaling": scaling})
    values = LLAMA | {"model_type": "llama", "rope_scaling": {**scaling, key: 777}}
    assert model_config(values) == plain
    (tmp_path / "config.json").write_text(json.dumps(values))
    check_effective_config(plain, tmp_path)
    with pytest.raises(ConfigError, match=f"keys of rope_scaling = .*'{key}x'"):
        model_config(LLAMA | {"rope_scaling": {**scaling, f"{key}x": 1}})


def test_every_scaling_key_is_a_field() -> None:
    fields = {field.name for field in dataclasses.fields(RopeScaling)} - {"kind"}
    assert set(" ".join(ROPE_KINDS.values()).split()) == fields


def test_every_key_of_gguf() -> None:
    """A key of gguf's constants is known, or it belongs to a part that other architectures have."""
    from gguf import Keys

    groups = [Keys.General, Keys.LLM, Keys.Attention, Keys.Rope, Keys.Split, Keys.Tokenizer]
    keys = [key for group in groups for name, key in vars(group).items() if name.isupper()]
    left = [key for key in keys if not GGUF.knows(key)]
    assert [key for key in left if not any(part in key for part in OTHER_PARTS.split())] == []
    assert not any(key.startswith(("general.", "tokenizer.", "split.")) for key in left)


@pytest.mark.parametrize("name", LISTS)
def test_a_key_stands_in_one_list(name: str) -> None:
    known = LISTS[name]
    groups = [known.used.split(), list(known.neutral), *(keys.split() for keys in known.idle.values())]
    for first, second in itertools.combinations(groups, 2):
        assert set(first) & set(second) == set()
    assert all(len(set(group)) == len(group) for group in groups)


def test_every_used_key_is_read() -> None:
    """A key that no code reads would be dropped in silence."""
    from kvseek.builder.checkpoints import effective_config, gguf, gguf_tokenizer, tensorrt_llm
    from kvseek.builder.checkpoints import model_config as hugging_face

    def unread(known: KnownKeys, *modules: Any) -> list[str]:
        code = "".join(map(inspect.getsource, modules))
        return [key for key in known.used.split() if key.removeprefix("{arch}.") not in code]

    assert unread(CONFIG, hugging_face, effective_config) == []
    assert unread(TENSORRT_LLM, tensorrt_llm) == []
    # transformers reads the vocabulary of a GGUF file; scalings and end ids are put together from parts of their names.
    left = unread(GGUF, gguf, gguf_tokenizer)
    assert [key for key in left if not key.startswith(("tokenizer.", "{arch}.rope.scaling."))] == []


UNKNOWN = r"{} = .*: must be a key that kvseek knows, .* remove it from {}, else use another checkpoint"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_multiplier", 0.5),
        ("final_logit_softcaping", 30.0),
        ("logit_scale", None),
        ("no_rope_layers", [1, 0]),
        ("attn_factor", 0.9),
        ("text_config", {}),
    ],
)
def test_unknown_keys_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=UNKNOWN.format(key, r"config\.json")):
        model_config(LLAMA | {key: value})


LEFT_BEHIND: dict[str, dict[str, Any]] = {
    "unsloth": {"unsloth_fixed": True, "unsloth_version": "2025.3.19", "torch_dtype": "bfloat16"},
    "axolotl": {"use_cache": False, "_attn_implementation_autoset": True, "axolotl_version": "0.9.2"},
    "LLaMA-Factory": {"use_cache": False, "_attn_implementation": "flash_attention_2", "neftune_noise_alpha": 5},
    "mergekit": {"_name_or_path": "a/b", "mergekit_version": "0.1.0", "base_model": "a/b"},
    "other trainers": {
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "loss_type": "ForCausalLM",
        "bf16": True,
    },
    "attention": {
        "use_flash_attn": True,
        "_flash_attn_2_enabled": True,
        "attn_implementation": "sdpa",
        "use_xformers": False,
    },
    "dequantised": {"_pre_quantization_dtype": "bfloat16", "load_in_4bit": False, "quantization": None},
    "converters": {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}, "pytorch_version": "2.1", "unk_token_id": 0},
    "lengths": {"max_seq_length": 512, "model_max_length": 512},
}


@pytest.mark.parametrize("left", LEFT_BEHIND)
def test_what_trainers_and_converters_leave_behind_changes_nothing(left: str, tmp_path: Path) -> None:
    model = save_random_model(tmp_path, "llama")
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(values | LEFT_BEHIND[left]))
    checkpoint = open_checkpoint(model)
    assert checkpoint.config == model_config(values)
    checkpoint.check()  # transformers reads the same model, too


@pytest.mark.parametrize(("key", "allowed"), CONFIG.neutral.items())
def test_neutral_values(key: str, allowed: tuple[Any, ...]) -> None:
    """What the decoder lacks may be stated as absent, and not as present, nor as a number that equals a boolean."""
    for value in allowed:
        model_config(LLAMA | {key: value})
    other = 8 if isinstance(allowed[0], (int, float)) and not isinstance(allowed[0], bool) else not allowed[0]
    for value in (other, 0.5, "x", [1]):
        with pytest.raises(ConfigError, match=f"{key} = .*: must be .*, or absent; use another checkpoint"):
            model_config(LLAMA | {key: value})


def test_generation_configuration(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    published = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
        "repetition_penalty": 1.05,
        "eos_token_id": [7, 8],
    }
    path.write_text(json.dumps(published))
    assert generation_ends(tmp_path) == [7, 8]
    path.write_text(json.dumps(published | {"end_after": 5}))
    message = r"generation_config\.json: " + UNKNOWN.format("end_after", r"generation_config\.json")
    with pytest.raises(ConfigError, match=message):
        generation_ends(tmp_path)


GGUF_REFUSED = [
    ("llama.attention.scale", 0.1, r"llama\.attention\.scale = 0\.1.*: must be a key that kvseek knows"),
    ("llama.attention.causal", False, r"llama\.attention\.causal = False: must be true, or absent"),
    ("llama.expert_count", 8, r"llama\.expert_count = 8: must be 0 or null"),
    ("llama.attention.value_length", 64, r"llama\.attention\.value_length = 64: must be the head size 32"),
    ("llama.rope.dimension_count", 16, r"llama\.rope\.dimension_count = 16: must be the head size 32"),
    (
        "llama.rope.scaling.type",
        "longrope",
        r"llama\.rope\.scaling\.type = 'longrope': must be one of none, linear, yarn",
    ),
    (
        "llama.rope.scaling.attn_factor",
        2.0,
        r"llama\.rope\.scaling\.attn_factor = 2\.0: must be a key that kvseek knows",
    ),
    ("qwen2.rope.freq_base", 1e6, r"qwen2\.rope\.freq_base = 1000000\.0: must be a key that kvseek knows"),
    ("general.type", "adapter", r"general\.type = 'adapter': must be \"model\", or absent"),
    ("tokenizer.ggml.eos_token_id", 384, r"eos_token_id = 384: must be between 0 and vocab_size - 1 = 383"),
    ("llama.embedding_length", "wide", r"hidden_size = 'wide': must be an integer > 0"),
]


@pytest.mark.parametrize(("key", "value", "message"), GGUF_REFUSED)
def test_gguf_keys_that_are_refused(key: str, value: Any, message: str, gguf_file: Path) -> None:
    import gguf

    kinds = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT64}
    set_key(gguf_file, key, value, kinds.get(type(value), gguf.GGUFValueType.STRING))
    with pytest.raises(ConfigError, match=rf"model\.gguf: {message}"):
        _ = open_checkpoint(gguf_file).config


def test_gguf_arrays_that_are_refused(tmp_path: Path) -> None:
    """Sizes of each layer, and RoPE of several axes: arrays are read too."""
    import gguf

    for key in ("llama.attention.head_count_kv", "llama.rope.dimension_sections", "tokenizer.ggml.eos_token_id"):
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
        for name in (
            "embedding_length",
            "feed_forward_length",
            "block_count",
            "attention.head_count",
            "context_length",
        ):
            writer.add_uint32(f"llama.{name}", 4)
        writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        writer.add_array(key, [2, 2, 2])
        writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
        finish(writer)
        with pytest.raises(
            ConfigError,
            match=r"num_key_value_heads = \[2, 2, 2\]|dimension_sections = \[2, 2|eos_token_ids = 'an array'",
        ):
            _ = open_checkpoint(tmp_path / "model.gguf").config


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", save_random_model(tmp_path / "model", "llama"), "llama")


def set_key(path: Path, key: str, value: Any, kind: Any) -> None:
    edit_gguf(path, lambda metadata, _: metadata.update({key: value}), {key: kind})


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

    prefix, kind = class_prefix(architecture), "Text" * architecture.startswith("qwen3_5")
    config_class = getattr(transformers, f"{prefix}{kind}Config")
    values = {**SHAPE, **ARCHITECTURE_SHAPE[architecture], **changes}
    config_class(architectures=[f"{prefix}ForCausalLM"], **values).save_pretrained(directory)
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
    if model.experts is not None:
        others["architecture"] = "qwen2_moe" if architecture == "qwen3_moe" else "qwen3_moe"
        others["experts"] = dataclasses.replace(model.experts, dense_layers=(0,))
    if model.delta_net is not None:
        others["delta_net"] = dataclasses.replace(model.delta_net, conv_kernel=3)
        others["rotary_dim"] = 2
        # A model of another kind would not have these layers.
        names = {name: value for name, value in names.items() if name != "architecture"}
    for name in names:
        value = getattr(model, name)
        if name in ("experts", "delta_net", "rotary_dim") and value is None:
            continue
        other = others[name] if name in others else not value if isinstance(value, bool) else value * 2
        message = rf"config\.json: {name}: kvseek reads {re.escape(repr(other))}, transformers \S+ reads "
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
    ("qwen3_moe", {"num_experts": 4}, r"num_local_experts = 8: must be absent with architectures = 'Qwen3MoeFor"),
    ("qwen3_moe", {"num_local_experts": ...}, "num_experts is missing; add it from"),
    ("qwen2_moe", {"shared_expert_intermediate_size": ...}, "shared_expert_intermediate_size is missing"),
    ("qwen3_moe", {"qkv_bias": True}, "qkv_bias = True: must be absent with architectures = 'Qwen3MoeForCausalLM'"),
    ("qwen3", {"moe_intermediate_size": 8}, "moe_intermediate_size = 8: must be absent with architectures = 'Qwen3For"),
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


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", *MIXTURES])
def test_every_field_that_transformers_reads_from_gguf_metadata_is_compared(
    architecture: str, random_model: RandomModel, tmp_path: Path
) -> None:
    mixed = {"mlp_only_layers": []} if architecture in MIXTURES else {}
    made = random_model(architecture, **mixed)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", made, architecture))
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
    if model.experts is not None:
        for change in (
            {"num_experts": 5},
            {"num_experts_per_tok": 1},
            {"norm_topk_prob": not model.experts.norm_topk_prob},
        ):
            other = dataclasses.replace(model, experts=dataclasses.replace(model.experts, **change))
            with pytest.raises(ConfigError, match=r"model\.gguf: experts: kvseek reads .*, transformers \S+ reads"):
                check_gguf_metadata(other, path, metadata, checkpoint._tensors)
    # Only with a key that transformers reads; qwen files state the head size by one that it does not know.
    stated = {**metadata, f"{checkpoint.architecture}.vocab_size": 500}
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
