"""Whatever checkpoint is drawn: kvseek computes transformers' logits, or refuses it and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from tests.builder.checkpoints.beside_transformers import outcome, without_advice
from tests.builder.checkpoints.drawn_checkpoints import Case, Files, Shape, cases

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 500.0}

# Checkpoints that kvseek once served otherwise than transformers. An entry stays in FOUND for good.
FOUND: dict[str, Case] = {
    "scaling beside parameters": Case(config={"rope_scaling": LINEAR, "rope_parameters": PLAIN}),
    "scaling beside yarn parameters": Case(config={"rope_scaling": LINEAR, "rope_parameters": {**PLAIN, **YARN}}),
    "tied with another head": Case(config={"tie_word_embeddings": True}),
    "single file beside an index": Case(files=Files(layout="both")),
    "original length at the top, yarn": Case(
        config={"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 32}
    ),
    "original length at the top and in yarn": Case(
        config={"rope_scaling": YARN, "original_max_position_embeddings": 64, "rope_theta": 500.0}
    ),
    "original length at the top, yarn parameters": Case(
        config={"rope_parameters": {**YARN, "rope_theta": 500.0}, "original_max_position_embeddings": 64}
    ),
    "nested parameters": Case(config={"rope_parameters": {"full_attention": {**LINEAR, "rope_theta": 500.0}}}),
    "unknown keys of kind default": Case(config={"rope_parameters": {**PLAIN, "factor": 4.0, "x": 1}}),
    "not causal": Case(config={"is_causal": False}),
    "model type of another architecture": Case(
        Shape(model_type="qwen2", qkv_bias=True), config={"model_type": "mistral"}
    ),
}


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    with without_advice():
        yield


@pytest.mark.parametrize("layout", ["single", "shards"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("shape", "config"),
    [
        (Shape(), {}),
        (Shape("mistral"), {"sliding_window": None}),
        (Shape("qwen2", qkv_bias=True), {}),
        (Shape("qwen3", head_dim=16), {}),
    ],
)
def test_plain_checkpoints_run(shape: Shape, config: dict[str, Any], dtype: str, layout: str) -> None:
    """The property would hold for a builder that refuses everything."""
    assert outcome(Case(shape, config, Files(dtype, layout))) == "equal"


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(name: str) -> None:
    outcome(FOUND[name])


@pytest.mark.slow
@hypothesis.settings(max_examples=200, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(cases())
def test_same_logits_or_refused(case: Case) -> None:
    outcome(case)
