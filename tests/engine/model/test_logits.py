"""The full engine against transformers on the same weights: logits and greedy tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.plugins.cases import CASES, method_flags
from tests.support.prefill import run_prefill
from tests.support.random_models import ARCHITECTURES, HYBRIDS, MIXTURES

from kvseek.core.request import Request
from kvseek.engine.engine import Engine
from kvseek.plugins.registry import METHODS

MAX_DIFFERENCE = 2e-4
GREEDY_TOKENS = 40  # past the ring's end, and past longrope's border


def load_transformers(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    source = {"gguf_file": model.name} if model.suffix == ".gguf" else {}
    folder = model.parent if model.suffix == ".gguf" else model
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source).eval()


@torch.inference_mode()
def greedy_transformers(reference: Any, prompt: list[int], tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, and the logits [tokens, vocabulary] that each was drawn from."""
    inputs, cache, drawn, logits = torch.tensor([prompt]), None, [], []
    for _ in range(tokens):
        output = reference(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        logits.append(output.logits[0, -1])
        drawn.append(int(logits[-1].argmax()))
        inputs = torch.tensor([[drawn[-1]]])
    return drawn, torch.stack(logits)


def engine_logits(engine: Engine, prompt: list[int], forced: list[int]) -> torch.Tensor:
    """Logits after the prompt and after each forced token but the last, by the engine's own decoder: [tokens, vocabulary]."""
    decoder = engine.decoder
    rows = [run_prefill(decoder, 0, prompt, len(forced))]
    rows += [decoder.decode([token], [0])[0][0] for token in forced[:-1]]
    decoder.cache.close(0)
    return torch.stack(rows)


def compare(model: Path, directory: Path, prompt: list[int], *, generates: bool = False) -> None:
    engine = Engine.load(directory)
    tokens, expected = greedy_transformers(load_transformers(model), prompt, GREEDY_TOKENS)
    found = engine_logits(engine, prompt, tokens)
    assert (found - expected).abs().max() <= MAX_DIFFERENCE
    if generates:
        assert engine.generate([Request(tuple(prompt), GREEDY_TOKENS)]) == [tokens]


@pytest.mark.model
@pytest.mark.slow
def test_smollm2(smollm2_gguf: Path, document: str, build_engine: BuildEngine) -> None:
    directory = build_engine(smollm2_gguf, "full")
    prompt = Engine.load(directory).tokenizer.encode(document)[:512]
    assert len(prompt) == 512
    compare(smollm2_gguf, directory, prompt, generates=True)


def test_needle_model(needle_folder: Path, build_engine: BuildEngine) -> None:
    model = needle_folder / "model"
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(4, 2600, (2200,), generator=generator).tolist()
    compare(model, build_engine(model, "full", "--max_seq_len", "4096", "--prefill_chunk_tokens", "700"), prompt)


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MIXTURES, *HYBRIDS])
def test_random_models(architecture: str, kernels: str, random_model: RandomModel, build_engine: BuildEngine) -> None:
    model = random_model(architecture)
    # A short window and small chunks: the prompt crosses chunk borders and the ring wraps while decoding.
    window = ("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--prefill_chunk_tokens", "50")
    directory = build_engine(model, "full", "--kernels", kernels, *window)
    compare(model, directory, torch.arange(180).mul(7).remainder(100).tolist(), generates=True)


# Experts of a layer and of a token, and how config.json spreads them over three layers.
SPREAD: list[tuple[str, int, int, dict[str, Any]]] = [
    ("qwen3_moe", 4, 1, {"norm_topk_prob": True}),
    ("qwen3_moe", 64, 8, {"norm_topk_prob": False, "decoder_sparse_step": 2}),
    (
        "qwen3_moe",
        16,
        8,
        {"norm_topk_prob": True, "mlp_only_layers": [0, 2], "attention_bias": True, "tie_word_embeddings": True},
    ),
    ("qwen2_moe", 60, 4, {"norm_topk_prob": False, "mlp_only_layers": []}),
    ("qwen2_moe", 5, 4, {"norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [0], "qkv_bias": False}),
]


@pytest.mark.parametrize("tokens", [5, 700, 1300])
@pytest.mark.parametrize(("architecture", "experts", "chosen", "fields"), SPREAD)
def test_mixtures_of_experts(
    architecture: str,
    experts: int,
    chosen: int,
    fields: dict[str, Any],
    tokens: int,
    random_model: RandomModel,
    build_engine: BuildEngine,
) -> None:
    sizes = {"num_experts": experts, "num_experts_per_tok": chosen, "max_position_embeddings": 4096}
    model = random_model(architecture, **sizes, **fields)
    directory = build_engine(model, "full", "--prefill_chunk_tokens", "512")
    compare(model, directory, torch.arange(tokens).mul(7).remainder(379).tolist())


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 1024}
# Hybrids: experts, heads of Gated DeltaNet (of keys and values, and their channels), kinds of layers, partial rotation.
SPREAD_STATES: list[tuple[str, tuple[int, int, int, int], dict[str, Any]]] = [
    ("qwen3_next", (1, 1, 16, 16), {"num_experts": 0, "linear_conv_kernel_dim": 2, "tie_word_embeddings": True}),
    ("qwen3_next", (2, 6, 32, 8), {"num_experts": 64, "num_experts_per_tok": 8, "partial_rotary_factor": 0.5}),
    (
        "qwen3_next",
        (4, 4, 8, 64),
        {
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
            "attention_bias": True,
            "num_hidden_layers": 5,
            "layer_types": None,
            "decoder_sparse_step": 2,
            "rope_parameters": {**YARN, "partial_rotary_factor": 0.25},
        },
    ),
    (
        "qwen3_5",
        (2, 4, 128, 128),
        {"partial_rotary_factor": 1.0, "layer_types": ["full_attention", *["linear_attention"] * 2]},
    ),
    ("qwen3_5_moe", (3, 3, 24, 40), {"num_experts": 16, "num_experts_per_tok": 4, "linear_conv_kernel_dim": 1}),
]


@pytest.mark.parametrize("tokens", [5, 700, 1300])
@pytest.mark.parametrize(("architecture", "heads", "fields"), SPREAD_STATES)
def test_hybrids(
    architecture: str,
    heads: tuple[int, int, int, int],
    fields: dict[str, Any],
    tokens: int,
    random_model: RandomModel,
    build_engine: BuildEngine,
) -> None:
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    sizes = {"max_position_embeddings": 4096, **dict(zip(names, heads, strict=True))}
    model = random_model(architecture, **sizes, **fields)
    directory = build_engine(model, "full", "--prefill_chunk_tokens", "500")
    compare(model, directory, torch.arange(tokens).mul(7).remainder(379).tolist())


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_with_experts_and_states(
    method: str, architecture: str, random_model: RandomModel, build_engine: BuildEngine
) -> None:
    """With budgets of as many rows as there are."""
    kinds = {"layer_types": ["full_attention", "linear_attention", "full_attention"]}
    model = random_model(architecture, **kinds if architecture == "qwen3_next" else {})
    window = ("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "0")
    directory = build_engine(model, method, *window, *method_flags(method, CASES[method].everything))
    compare(model, directory, torch.arange(300).mul(7).remainder(379).tolist())


@pytest.mark.parametrize("head_dim", [12, 80, 100])
def test_head_sizes_without_kernels_of_their_own(
    head_dim: int, random_model: RandomModel, build_engine: BuildEngine
) -> None:
    model = random_model("llama", head_dim=head_dim)
    compare(model, build_engine(model, "full"), torch.arange(150).mul(7).remainder(100).tolist())


ROPE = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    # The prompt of 150 tokens is short, and the sequence becomes long among the 40 tokens after it.
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * pair for pair in range(16)],
        "long_factor": [1.0 + 2 * pair for pair in range(16)],
        "original_max_position_embeddings": 180,
    },
}


@pytest.mark.parametrize("kind", ROPE)
def test_rope_scaling(kind: str, random_model: RandomModel, build_engine: BuildEngine) -> None:
    model = random_model("llama", rope_parameters={"rope_theta": 10000.0, **ROPE[kind]})
    compare(model, build_engine(model, "full"), torch.arange(150).mul(11).remainder(100).tolist())
