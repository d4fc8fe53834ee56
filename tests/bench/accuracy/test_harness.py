"""lm_eval's model `kvseek` gives what lm_eval's own model of transformers gives, for every kind of request."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support import lm_eval

pytestmark = [pytest.mark.slow, pytest.mark.model, lm_eval.needs_lm_eval]
QUESTIONS = ["The harbour master wrote in the", "One ship, two ships, three", "The light was lit at"]
CHOICES = [" log every evening.", " ships", " dusk and put out at dawn."]
LAUNCHER = "kvseek.bench.accuracy.harness"


def test_the_figures_of_transformers(smollm2_gguf: Path, tmp_path: Path) -> None:
    """In float32 and with dense attention."""
    chosen = [{"question": q, "choices": CHOICES, "answer": place} for place, q in enumerate(QUESTIONS)]
    asked = [{"question": q, "answer": "none"} for q in QUESTIONS]
    tasks = {
        "choose": (lm_eval.CHOOSE, chosen),
        "generate": (lm_eval.GENERATE, asked),
        "read": (lm_eval.READ, [{"question": " ".join(QUESTIONS) * 3}]),
    }
    theirs = f"pretrained={smollm2_gguf.parent},gguf_file={smollm2_gguf.name},dtype=float32"
    flags = ("--model", "hf", "--model_args", theirs, "--device", "cpu", "--batch_size", "1")
    scores, samples = lm_eval.evaluate(tmp_path / "hf", tasks, "lm_eval", *flags)
    ours = f"model={smollm2_gguf},method=full,max_seq_len=1024,cache_dir={tmp_path / 'engines'}"
    flags = ("--model", "kvseek", "--model_args", ours, "--batch_size", "2")
    own, answers = lm_eval.evaluate(tmp_path / "kvseek", tasks, LAUNCHER, *flags)
    assert own["choose"]["acc,none"] == scores["choose"]["acc,none"]
    assert own["read"]["word_perplexity,none"] == pytest.approx(scores["read"]["word_perplexity,none"], rel=1e-3)
    for mine, other in zip(answers["choose"], samples["choose"], strict=True):
        assert [float(value) for value, _ in mine["filtered_resps"]] == pytest.approx(
            [float(value) for value, _ in other["filtered_resps"]], abs=1e-2
        )
        assert [flag for _, flag in mine["filtered_resps"]] == [flag for _, flag in other["filtered_resps"]]
    assert [one["filtered_resps"] for one in answers["generate"]] == [
        one["filtered_resps"] for one in samples["generate"]
    ]
