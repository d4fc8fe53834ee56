"""Configurations of published models, what becomes of each, and Mistral's sliding window."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import BuildEngine
from tests.engine.model.test_logits import compare
from tests.support.random_models import save_random_model

from kvseek.builder import build
from kvseek.builder.checkpoints.effective_config import check_effective_config
from kvseek.builder.checkpoints.model_config import model_config
from kvseek.builder.checkpoints.weights import WeightFormat, total_size
from kvseek.core.config import ModelConfig, RopeScaling
from kvseek.core.config_file import read_config
from kvseek.core.errors import ConfigError

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
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Qwen3-30B-A3B": (QWEN_3 | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128}, "num_experts = 128"),
    "Mixtral-8x7B": (
        MISTRAL_2 | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8},
        "num_local_experts = 8",
    ),
    "Llama-3.1-8B-Instruct-FP8": (
        LLAMA_31 | {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config = .*: must be absent; use the unquantised checkpoint",
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


@pytest.mark.parametrize("name", REFUSED)
def test_refused_published_configurations(name: str) -> None:
    values, message = REFUSED[name]
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
