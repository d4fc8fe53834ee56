"""Checkpoints: configurations of Hugging Face directories and GGUF files, tensors and tokenizer of GGUF files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.gguf_files import finish, write_gguf
from tests.support.llama_config import LLAMA
from tests.support.random_models import save_random_model

from kvseek.builder import build
from kvseek.builder.checkpoints import gguf as gguf_checkpoint
from kvseek.builder.checkpoints.model_config import model_config
from kvseek.builder.checkpoints.open import open_checkpoint
from kvseek.builder.checkpoints.weights import weight_reader
from kvseek.core.config import ModelConfig, RopeScaling
from kvseek.core.errors import ConfigError
from kvseek.core.rope import frequencies

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
# LLAMA reaches 4,096 tokens, 4 times as far as here.
LONG = RopeScaling("longrope", 4.0, 1024, short_factor=(1.0,) * 8, long_factor=(2.0,) * 8)
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
    ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling.factor is missing"),
    (
        {"rope_scaling": {"type": "linear", "factor": 2.0, "bend": 1}},
        r"keys of rope_scaling = \['bend'\]: must be among those of rope_type 'linear': factor",
    ),
    ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "original_max_position_embeddings = 0: must be > 0"),
    ({"rope_scaling": "yarn"}, "rope_scaling = 'yarn': must be an object"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    ({"use_sliding_window": True}, "use_sliding_window = True"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types = \['sliding_attention'\]"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config = "),
    ({"mlp_bias": True, "architectures": ["Qwen2ForCausalLM"]}, "mlp_bias = True: must be false, or absent, with arch"),
    ({"mlp_bias": None}, "mlp_bias = None: must be true or false"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ({"num_experts": 8}, "num_experts = 8"),
    ({"num_hidden_layers": "12"}, "num_hidden_layers = '12': must be an integer"),
    ({"vocab_size": None}, "vocab_size is missing"),
    ({"num_key_value_heads": 3}, "num_kv_heads = 3: must be a divisor of num_heads = 4"),
    ({"architectures": ["Qwen3ForCausalLM"]}, "head_dim is missing"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_refused_configurations(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_config(LLAMA | change)


def test_refused_paths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; pass a Hugging Face directory"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is an adapter; merge it into its base model with peft's merge_and_unload"):
        open_checkpoint(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        checkpoint.tensor("lm_head.weight")
    with pytest.raises(ConfigError, match="cannot load the tokenizer"):
        checkpoint.tokenizer()
    save_file({"lm_head.weight": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors: dtype of lm_head\.weight = I8: must be one of F32"):
        open_checkpoint(tmp_path).tensor("lm_head.weight")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        _ = checkpoint.config


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_gguf_equals_the_hugging_face_checkpoint(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_checkpoint, "BLOCK_WEIGHTS", 1000)  # tensors are read in several blocks
    model = save_random_model(tmp_path / "model", architecture)
    expected, found = open_checkpoint(model), open_checkpoint(write_gguf(tmp_path / "m.gguf", model, architecture))
    changes = {"rms_norm_eps": pytest.approx(1e-6), "bos_token_id": None, "pad_token_id": None}
    assert vars(found.config) == vars(expected.config) | changes
    tensors = load_file(model / "model.safetensors")
    assert all(torch.equal(found.tensor(name), tensor) for name, tensor in tensors.items())
    assert found.unused(set(tensors)) == set()
    assert found.unused(set(tensors) - {"model.norm.weight"}) == {"output_norm.weight"}


def test_gguf_files_of_several_parts(tmp_path: Path) -> None:
    model = save_random_model(tmp_path / "model", "llama")
    whole = open_checkpoint(write_gguf(tmp_path / "whole.gguf", model, "llama"))
    path = write_gguf(tmp_path / "m.gguf", model, "llama", part_tensors=12)
    assert path.name == "m-00001-of-00003.gguf"
    found = open_checkpoint(path)
    assert found.config == whole.config
    assert [file.name for file in found.files] == [f"m-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    tensors = load_file(model / "model.safetensors")
    assert found.unused(set(tensors)) == set()
    assert all(torch.equal(found.tensor(name), whole.tensor(name)) for name in tensors)
    assert {found.header(name).place.partition(":")[0] for name in tensors} == set(map(str, found.files))
    arguments = ["--model", str(path), "--tokenizer", str(model), "--output_dir", str(tmp_path / "engine"), "--quiet"]
    assert build.main([*arguments, "--method", "full", "--kernels", "reference"]) == 0, (
        "compared with transformers, too"
    )


def test_gguf_parts_that_are_refused(tmp_path: Path) -> None:
    model = save_random_model(tmp_path / "model", "llama")
    first = write_gguf(tmp_path / "m.gguf", model, "llama", part_tensors=12)
    second, third = (first.with_name(f"m-0000{part}-of-00003.gguf") for part in (2, 3))

    def refused(path: Path, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            _ = open_checkpoint(path).unused(set())

    refused(second, r"split\.no = 1: must be 0, that of the first part; download all parts .* and pass the first")
    refused(first.rename(tmp_path / "renamed.gguf"), r"split\.count = 3: must be 1, or the number in a name such as")
    (tmp_path / "renamed.gguf").rename(first)
    content = third.read_bytes()
    third.write_bytes(second.read_bytes())
    refused(first, r"00003-of-00003\.gguf: split\.no and split\.count = \[1, 3\]: must be \[2, 3\]")
    third.write_bytes(content[:100])
    refused(first, r"cannot read .*00003-of-00003\.gguf: .*cut short")
    third.unlink()
    refused(first, r"00003-of-00003\.gguf is missing, one of the 3 parts of the model")


def test_gguf_with_llama3_rope_factors(tmp_path: Path) -> None:
    model = save_random_model(tmp_path / "model", "llama")
    scaled = model_config(LLAMA | {"head_dim": 32, "rope_scaling": {"type": "llama3", **LLAMA3}})
    plain = model_config(LLAMA | {"head_dim": 32})
    factors = frequencies(plain)[0] / frequencies(scaled)[0]
    found = open_checkpoint(write_gguf(tmp_path / "a.gguf", model, "llama", factors)).config.rope_scaling
    assert found is not None
    assert dataclasses.replace(found, factor=round(found.factor, 5)) == RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight = .* must be those of Llama 3\.1's scaling"):
        _ = open_checkpoint(write_gguf(tmp_path / "b.gguf", model, "llama", factors.sqrt())).config


def test_refused_gguf_files(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "gpt2.gguf", "gpt2")
    writer.add_tensor("token_embd.weight", torch.zeros(4, 4).numpy())
    finish(writer)
    with pytest.raises(ConfigError, match=r"general\.architecture = 'gpt2': must be one of llama, qwen2, qwen3"):
        _ = open_checkpoint(tmp_path / "gpt2.gguf").config
    (tmp_path / "text.gguf").write_text("no model at all")
    with pytest.raises(ConfigError, match=r"must be b'GGUF'; pass a \.gguf file or a Hugging Face directory"):
        _ = open_checkpoint(tmp_path / "text.gguf").config
    whole = (tmp_path / "gpt2.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:40])
    with pytest.raises(ConfigError, match="damaged or cut short"):
        _ = open_checkpoint(tmp_path / "cut.gguf").config
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    finish(writer)
    with pytest.raises(ConfigError, match=r"byte order of .*big\.gguf = 'foreign': must be this machine's"):
        _ = open_checkpoint(tmp_path / "big.gguf").config


def test_gguf_tokenizers_of_unknown_kind_are_refused(tmp_path: Path) -> None:
    model = save_random_model(tmp_path / "model", "llama")
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.model = None: must be one of 'gpt2', 'llama'"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", model, "llama")).tokenizer()


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_equals_what_transformers_reads(smollm2_gguf: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    checkpoint = open_checkpoint(smollm2_gguf)
    tensors = {name: value for name, value in reference.state_dict().items() if name != "lm_head.weight"}
    assert len(tensors) == 272
    assert all(torch.equal(checkpoint.tensor(name), value) for name, value in tensors.items())


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_splits_words_as_it_was_trained(smollm2_gguf: Path) -> None:
    tokenizer = open_checkpoint(smollm2_gguf).tokenizer()
    backend = tokenizer.backend
    assert backend.encode("a  1931").tokens == ["a", "ĠĠ", "1", "9", "3", "1"], "digits are words of their own"
    assert backend.encode("It's 5").tokens == ["It", "'s", "Ġ", "5"]
    text = "Log of 3 May:  wind 12 knots\n\n\tfog – ünïcode 🙂"
    assert backend.decode(backend.encode(text).ids) == text
    assert backend.token_to_id("<|im_end|>") == tokenizer.special_id("eos_token") == 2


def test_weight_reader(tmp_path: Path) -> None:
    """Weights one by one, fused as in an engine; a checkpoint with tensors to spare is refused before any is read."""
    model = save_random_model(tmp_path / "model", "llama")
    tensors = load_file(model / "model.safetensors")
    projections = [tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"]
    found = weight_reader(open_checkpoint(model), torch.bfloat16)("layers.1.qkv.weight")
    assert torch.equal(found, torch.cat(projections).to(torch.bfloat16))
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**values, "num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match="has no place in a llama decoder"):
        weight_reader(open_checkpoint(model), torch.bfloat16)
