"""Whatever checkpoint is drawn: kvseek computes transformers' logits, or refuses it and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from tests.builder.checkpoints.drawn_checkpoints import ABSENT, Case, Files, Shape, cases, outcome

from kvseek.builder import checking

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SCALED = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "finetuned": True}
DYNAMIC = {"type": "dynamic", "factor": 4.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [1.0, 4.0, 8.0, 16.0]}
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
LENGTH = "original_max_position_embeddings"
MISTRAL, QWEN2, QWEN3 = Shape("mistral"), Shape("qwen2", qkv_bias=True), Shape("qwen3")
GEMMA = Shape("gemma3", head="none")
MLP_BIASED = Shape(mlp_bias=True, qkv_bias=True, output_bias=True)
BIASED_MISTRAL = Shape("mistral", qkv_bias=True, output_bias=True)

# Configurations that state a thing twice, or where transformers looks first.
ROPE: dict[str, dict[str, Any]] = {
    "rope_scaling beside rope_parameters": {"rope_parameters": PLAIN, "rope_scaling": LINEAR},
    "rope_scaling beside rope_parameters and rope_theta": {
        "rope_parameters": PLAIN,
        "rope_theta": 1e6,
        "rope_scaling": SCALED,
    },
    "empty rope_scaling": {"rope_parameters": {**PLAIN, **LLAMA3}, "rope_scaling": {}},
    "rope_theta beside that of rope_parameters": {"rope_parameters": PLAIN, "rope_theta": 1e6},
    "type beside rope_type": {"rope_scaling": {**LINEAR, "rope_type": "linear", "type": "yarn"}},
    "outer original length, yarn": {"rope_scaling": SCALED, "original_max_position_embeddings": 64},
    "outer original length, llama3": {"rope_scaling": LLAMA3, "original_max_position_embeddings": 64},
    "outer original length, rope_parameters": {
        "rope_parameters": {**PLAIN, **LLAMA3},
        "original_max_position_embeddings": 64,
    },
    "outer original length, linear": {"rope_scaling": LINEAR, "original_max_position_embeddings": 64},
    "yarn, all fields": {
        "rope_scaling": {
            **SCALED,
            "beta_fast": 16,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 1,
            "truncate": False,
        }
    },
    "yarn, nulls": {"rope_scaling": {**SCALED, "beta_fast": None, "attention_factor": None}},
    "yarn, attention_factor": {"rope_scaling": {**SCALED, "attention_factor": 1.5}},
    "yarn, ramp of no width": {"rope_scaling": {**SCALED, "beta_fast": 2, "beta_slow": 2, "truncate": False}},
}
# Checkpoints that broke the property once, or are close to such. An entry stays for good.
FOUND: dict[str, Case] = {
    "scaling beside parameters": Case(config={"rope_scaling": LINEAR, "rope_parameters": PLAIN}),
    "scaling beside yarn parameters": Case(config={"rope_scaling": LINEAR, "rope_parameters": {**PLAIN, **YARN}}),
    "tied with another head": Case(config={"tie_word_embeddings": True}),
    "length at the top, yarn scaling": Case(config={"rope_scaling": {"type": "yarn", "factor": 4.0}, LENGTH: 32}),
    "length at the top and in yarn scaling": Case(config={"rope_scaling": YARN, LENGTH: 64, "rope_theta": 500.0}),
    "length at the top and in yarn parameters": Case(
        config={"rope_parameters": {**YARN, "rope_theta": 500.0}, LENGTH: 64}
    ),
    "length at the top and in llama3 parameters": Case(
        config={"rope_parameters": {**LLAMA3, "rope_theta": 500.0}, LENGTH: 128}
    ),
    "nested parameters": Case(config={"rope_parameters": {"full_attention": {**LINEAR, "rope_theta": 500.0}}}),
    "nested parameters, qwen3": Case(QWEN3, {"rope_parameters": {"full_attention": {**LINEAR, "rope_theta": 500.0}}}),
    "unknown keys of kind default": Case(config={"rope_parameters": {**PLAIN, "factor": 4.0, "x": 1}}),
    "not causal": Case(config={"is_causal": False}),
    "model type of another architecture": Case(QWEN2, {"model_type": "mistral"}),
    "model type without query norms": Case(QWEN3, {"model_type": "llama"}),
    "no model type": Case(config={"model_type": ABSENT}),
    "biases that Mistral lacks": Case(BIASED_MISTRAL, {"attention_bias": True, "sliding_window": None}),
    "layer types of a Mistral without window": Case(
        MISTRAL, {"sliding_window": None, "layer_types": ["full_attention"] * 2}
    ),
    "fewer layer types than layers": Case(config={"layer_types": ["full_attention"]}),
    "whole number as rms_norm_eps": Case(config={"rms_norm_eps": 1}),
    "null as Qwen2's head_dim": Case(QWEN2, {"head_dim": None}),
    "no padding id, as the first Llama checkpoints say it": Case(config={"pad_token_id": -1}),
    "padding id beyond the vocabulary": Case(config={"pad_token_id": 5000}),
    "biases of an MLP that Qwen lacks": Case(QWEN3, {"mlp_bias": True}),
    "MLP biases that are not stated": Case(Shape(mlp_bias=True)),
    "dynamic frequencies of too few channels": Case(Shape(head_dim=2), {"rope_scaling": DYNAMIC}),
    "longrope divisors for other heads": Case(QWEN2, {"rope_scaling": {**LONGROPE, "long_factor": [1.0] * 3}}),
    "longrope from the first token on": Case(config={"rope_scaling": {**LONGROPE, LENGTH: 1}}),
    "longrope's length at the top": Case(config={"rope_scaling": LONGROPE, LENGTH: 30, "rope_theta": 500.0}),
    "longrope's own factors": Case(
        config={"rope_scaling": {**LONGROPE, LENGTH: 16, "factor": 2, "attention_factor": 1.5}}
    ),
}


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    with checking.quiet():
        yield


ALL_BIASES = {"mlp_bias": True, "attention_bias": True}
# Checkpoints that run: the property would hold for a builder that refuses everything.
RUN = [
    Case(files=Files("bfloat16", "shards")),
    Case(Shape("qwen3", head_dim=16), files=Files("bfloat16", "shards")),
    Case(MLP_BIASED, ALL_BIASES, Files("float16")),
    Case(QWEN2, files=Files("float16", "shards")),
    Case(),
    Case(Shape(qkv_bias=True, output_bias=True), {"attention_bias": True}),
    Case(Shape(head="none"), {"tie_word_embeddings": True}),
    Case(config={"rope_parameters": {**YARN, "rope_theta": 500.0}}),
    Case(config={"rope_scaling": LLAMA3, "rope_theta": 500.0}),
    Case(config={"rope_scaling": DYNAMIC, "max_position_embeddings": 40}),
    Case(MLP_BIASED, ALL_BIASES),
    Case(MISTRAL, {"sliding_window": None, "rope_scaling": LINEAR}),
    Case(QWEN2),
    Case(Shape("qwen3", head_dim=16)),
    Case(QWEN2, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    Case(GEMMA, {"sliding_window_pattern": 2, "sliding_window": 7}),
    Case(GEMMA, {"sliding_window_pattern": 1, "attention_bias": False, "rope_local_base_freq": 500.0}),
    Case(GEMMA, {"sliding_window_pattern": 2, "rope_theta": 500.0, "rope_scaling": LINEAR, "query_pre_attn_scalar": 5}),
    Case(QWEN3, {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}),
    Case(
        QWEN3,
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    Case(Shape("qwen2_moe", qkv_bias=True, experts=4, chosen=3), files=Files("bfloat16", "shards")),
    Case(Shape("qwen2_moe", qkv_bias=True, experts=5, chosen=5, normalised=True, dense=(0,))),
    Case(Shape("qwen3_moe", experts=9, chosen=2, normalised=True, dense=(1,))),
    Case(Shape("qwen3_moe", experts=4, qkv_bias=True, output_bias=True), {"attention_bias": True}),
    Case(Shape("qwen3_next", states=(0,), experts=5, chosen=3, normalised=True), files=Files("bfloat16", "shards")),
    Case(Shape("qwen3_next", states=(1,), value_heads=2, head="none"), {"tie_word_embeddings": True}),
    Case(
        Shape("qwen3_next", states=(0,), experts=4, dense=(1,), qkv_bias=True, output_bias=True),
        {"attention_bias": True},
    ),
    Case(Shape("qwen3_5", states=(0,)), {"partial_rotary_factor": 0.5}),
    Case(
        Shape("qwen3_5", states=(1,)), {"rope_parameters": {**YARN, "rope_theta": 500.0, "partial_rotary_factor": 1.0}}
    ),
    Case(Shape("qwen3_5_moe", states=(0,), experts=6, chosen=2), {"norm_topk_prob": ABSENT, "mlp_only_layers": ABSENT}),
    *(Case(config=own) for own in ROPE.values()),
    Case(files=Files(layout="both")),  # a single file beside the shards of an index: transformers reads the single file
]
# The prompt of 24 tokens is long, or one of the 15 tokens after it is, or none: transformers' cache keeps what it has.
RUN += [
    Case(config={"rope_scaling": {**LONGROPE, LENGTH: length}, "rope_theta": 500.0})
    for length in (16, 23, 24, 25, 30, 38, 39, 40)
]


@pytest.mark.parametrize("case", RUN)
def test_they_run_with_the_logits_of_transformers(case: Case) -> None:
    assert outcome(case) == "equal"


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND)
def test_what_was_found(case: Case) -> None:
    outcome(case)


@pytest.mark.slow
@hypothesis.settings(max_examples=60, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(cases())
def test_same_logits_or_refused(case: Case) -> None:
    outcome(case)
