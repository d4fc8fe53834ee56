"""lm_eval's model `kvseek` gives what lm_eval's own model of transformers gives, for every kind of request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ROOT, RandomModel
from tests.support import lm_eval

MODELS = ROOT / ".cache/lm_eval"  # the part of lm_eval that needs no tasks
QUESTIONS = ["The harbour master wrote in the", "One ship, two ships, three", "The light was lit at"]
CHOICES = [" log every evening.", " ships", " dusk and put out at dawn."]
LAUNCHER = "kvseek.bench.accuracy.harness"


@pytest.mark.skipif(not MODELS.exists(), reason=f"{MODELS.relative_to(ROOT)} is absent: make test installs it")
def test_every_kind_of_request(random_model: RandomModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tasks and their data: requests as tasks make them, to both models."""
    monkeypatch.syspath_prepend(MODELS)
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from kvseek.bench.accuracy.harness import KvseekLM

    model = str(random_model("llama"))
    theirs = HFLM(pretrained=model, dtype="float32", device="cpu", batch_size=1)
    ours = KvseekLM(model, batch_size=2, device="cpu", method="full", max_seq_len=256, cache_dir=tmp_path)

    def answers(lm: Any, kind: str, requests: list[tuple[Any, ...]]) -> Any:
        return getattr(lm, kind)([Instance(kind, {}, asked, place) for place, asked in enumerate(requests)])

    def both(kind: str, requests: list[tuple[Any, ...]]) -> tuple[Any, Any]:
        return answers(ours, kind, requests), answers(theirs, kind, requests)

    drawn = {"until": ["never there"], "max_gen_toks": 9, "do_sample": False}
    own, expected = both("generate_until", [(question, drawn) for question in QUESTIONS])
    assert own == expected
    short, _ = both("generate_until", [(question, drawn | {"max_gen_toks": 1}) for question in QUESTIONS])
    pairs = [("", CHOICES[0]), *((question, choice) for question in QUESTIONS for choice in (*CHOICES, *short))]
    own, expected = both("loglikelihood", [pair for pair in pairs if pair[1]])
    assert [value for value, _ in own] == pytest.approx([value for value, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in own] == [greedy for _, greedy in expected]
    assert {greedy for _, greedy in own} == {True, False}
    own, expected = both("loglikelihood_rolling", [(" ".join(QUESTIONS) * 3,)])
    assert own == pytest.approx(expected, abs=1e-2)


@pytest.mark.slow
@pytest.mark.model
@lm_eval.needs_lm_eval
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
