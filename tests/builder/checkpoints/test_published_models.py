"""Configurations of published models, and Mistral's sliding window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import BuildEngine
from tests.engine.model.test_logits import compare
from tests.support.random_models import save_random_model

from kvseek.builder import build
from kvseek.builder.checkpoints.model_config import model_config
from kvseek.builder.checkpoints.weights import WeightFormat, total_size
from kvseek.core.config import RopeScaling
from kvseek.core.errors import ConfigError

LLAMA_3 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
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
QWEN_25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
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
MISTRAL_1 = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
MISTRAL_3 = MISTRAL_1 | {"rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768}

# Configuration, parameters as the model's page states them, what the decoder makes of it.
PUBLISHED: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "Llama-3-8B": (LLAMA_3, 8_030_261_248, {"architecture": "llama", "rope_theta": 5e5, "rope_scaling": None}),
    "Llama-3.1-8B": (
        LLAMA_31,
        8_030_261_248,
        {"rope_scaling": RopeScaling("llama3", 8.0, 8192), "eos_token_ids": (128001, 128008, 128009)},
    ),
    "Llama-3.2-1B": (LLAMA_32, 1_235_814_400, {"head_dim": 64, "rope_scaling": RopeScaling("llama3", 32.0, 8192)}),
    "Qwen2.5-7B": (QWEN_25, 7_615_616_512, {"architecture": "qwen2", "qkv_bias": True, "sliding_window": None}),
    "Mistral-7B-v0.1": (MISTRAL_1, 7_241_732_096, {"architecture": "llama", "sliding_window": 4096}),
    "Mistral-7B-v0.3": (MISTRAL_3, 7_248_023_552, {"architecture": "llama", "sliding_window": None}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name: str) -> None:
    values, parameters, expected = PUBLISHED[name]
    config = model_config(values)
    found = vars(config)
    assert {field: found[field] for field in expected} == expected
    assert total_size(config, WeightFormat(torch.bfloat16)) == 2 * parameters
    assert config.max_position_embeddings == values["max_position_embeddings"]


def test_sliding_windows_of_mistral() -> None:
    silent = {name: value for name, value in MISTRAL_1.items() if name != "sliding_window"}
    assert model_config(silent).sliding_window == 4096
    for window in (0, -1, "4096"):
        with pytest.raises(ConfigError, match=f"sliding_window = {window!r}: must be an integer > 0"):
            model_config(MISTRAL_1 | {"sliding_window": window})


def test_mistral_within_its_window(
    tmp_path: Path, build_engine: BuildEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_random_model(tmp_path / "model", "mistral", sliding_window=256)
    engine = tmp_path / "engine"
    arguments = ["--model", str(model), "--output_dir", str(engine), "--method", "full", "--kernels", "reference"]
    for flags in ([], ["--max_seq_len", "257"]):
        assert build.main([*arguments, *flags, "--quiet"]) == 1
        message = capsys.readouterr().err
        assert f"max_seq_len = {257 if flags else 1024}: must be <= sliding_window = 256" in message
        assert "build with --max_seq_len 256, or use another checkpoint" in message
    assert not list(tmp_path.glob("*engine*"))
    directory = build_engine(model, "full", "--kernels", "reference", "--max_seq_len", "256")
    compare(model, directory, torch.arange(190).mul(7).remainder(100).tolist())
