"""kvseek evaluate perplexity on a GPU, where a method may have kernels compiled for a budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.random_models import save_random_model

from kvseek.bench import evaluate

pytestmark = pytest.mark.gpu

CACHE = "cache.sink=4,cache.local=32,cache.update=64,cache.full_threshold=40"


def test_each_budget_has_its_kernels(tmp_path: Path) -> None:
    model, text, output = tmp_path / "model", tmp_path / "log.txt", tmp_path / "result.json"
    save_random_model(model, "llama", head_dim=64)
    text.write_text(
        "the harbour master wrote the log at dusk. one ship, two ships, three ships. " * 60, encoding="utf-8"
    )
    flags = ["--device", "cuda", "--dtype", "bfloat16", "--methods", f"full,nested:{CACHE},prkv:{CACHE},page=8"]
    sizes = ["--top_k", "64,128,880", "--prompt_tokens", "600", "--tokens", "100", "--output", str(output)]
    assert evaluate.main(["perplexity", "--model", str(model), "--text", str(text), *flags, *sizes]) == 0
    full, *others = json.loads(output.read_text(encoding="utf-8"))["results"]
    for few, more, every in (others[:3], others[3:]):
        assert few["attended_tokens"] + 64 == more["attended_tokens"] < every["attended_tokens"]
        assert every["attended_tokens"] == full["attended_tokens"]
        assert every["perplexity"] == pytest.approx(full["perplexity"], rel=1e-2)
