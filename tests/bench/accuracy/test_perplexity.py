"""kvseek evaluate perplexity: its report on a tiny model beside LLM.score, its figures by hand, its refusals."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from tests.conftest import RandomModel

from kvseek import LLM, SamplingParams
from kvseek.bench.accuracy import perplexity
from kvseek.bench.accuracy.haystack import read_text
from kvseek.bench.output import as_text
from kvseek.cli.main import main

CACHE = {"sink": 4, "local": 16, "update": 8, "full_threshold": 32}
WINDOW = ",".join(f"cache.{name}={tokens}" for name, tokens in CACHE.items())
WORDS = "the harbour master wrote the log at dusk. one ship, two ships, three ships in 1931. "


@pytest.fixture
def flags(random_model: RandomModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of two texts, one of them in a package that cannot be imported."""
    package = tmp_path / "a_package_of_texts"
    package.mkdir()
    (package / "__init__.py").write_text("import nothing_of_this_name")
    (package / "log.txt").write_text(WORDS * 30, encoding="utf-8")
    (tmp_path / "log.txt").write_text(WORDS[20:] * 30, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    texts = ["--text", str(tmp_path / "log.txt"), "a_package_of_texts:log.txt"]
    sizes = ["--prompt_tokens", "100", "--tokens", "40", "--block", "10"]
    return ["evaluate", "perplexity", "--model", str(random_model("llama")), *texts, *sizes]


def test_figures_are_those_of_scores(
    flags: list[str], random_model: RandomModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "results" / "perplexity.json"
    flags += ["--output", str(output)]
    assert main([*flags, "--methods", f"full,nested:{WINDOW},top_k=8"]) == 0
    cut_off = json.loads(output.read_text(encoding="utf-8"))["results"]
    capsys.readouterr()
    flags += ["--methods", f"full,nested:{WINDOW},flat:{WINDOW},top_k=9", "--top_k", "8,400"]
    assert main(flags) == 0
    shown, progress = capsys.readouterr()
    assert [line.rpartition(": ")[0] for line in progress.splitlines() if ": perplexity" in line] == [
        f"nested:{WINDOW},top_k=400",
        f"flat:{WINDOW},top_k=9",
    ], "what is done is not done again"
    report = json.loads(output.read_text(encoding="utf-8"))
    assert output.read_text(encoding="utf-8") == as_text(report)
    names = ["full", f"nested:{WINDOW},top_k=8", f"nested:{WINDOW},top_k=400", f"flat:{WINDOW},top_k=9"]
    assert [entry["name"] for entry in report["results"]] == names
    assert report["texts"] == ["log.txt", "a_package_of_texts:log.txt"]
    assert report["results"][:2] == cut_off
    assert main([*flags, "--block", "20"]) == 1
    assert "--output = {'model': " in capsys.readouterr().err
    full, few, every, exact = report["results"]
    assert (full["percent"], full["error"], full["by_part"]) == (0, 0, [0] * 4)
    assert every["percent"] == pytest.approx(0, abs=1e-3), "every row is selected"
    assert every["attended_tokens"] == full["attended_tokens"] == full["cached_tokens"] == 100 + 20.5
    assert few["attended_tokens"] < exact["attended_tokens"] < 40
    assert few["percent"] != 0 != exact["percent"]
    options = {"method": "nested", "method_config": {"top_k": 8}, "cache": CACHE, "max_seq_len": 400}
    with LLM(random_model("llama"), cache_dir=tmp_path / "cache", quiet=True, **options) as llm:
        ids = [llm.tokenizer.encode(read_text(text)) for text in flags[5:7]]
        scores = llm.score([own[:100] for own in ids], [own[100:141] for own in ids])
    for score, own in zip(scores, few["log_probabilities"], strict=True):
        assert score.logprobs is not None
        assert own == pytest.approx([one.token for one in score.logprobs[1:]], abs=1e-3)
    assert few["perplexity"] == pytest.approx(math.exp(-sum(map(sum, few["log_probabilities"])) / 80), rel=1e-3)
    for heading in ("log.txt", "by step", "unlikely", f"{few['perplexity']:.3f}"):
        assert heading in shown


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_an_own_answer_is_what_the_engine_generates(
    temperature: float,
    flags: list[str],
    random_model: RandomModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The tokens that count are the first engine's; no text has to follow the prompt."""
    output = tmp_path / "answers.json"
    flags += ["--prompt_tokens", "560", "--own_answers", "--output", str(output)]
    flags += ["--temperature", str(temperature)] if temperature else []
    assert main([*flags, "--methods", "full"]) == 0
    assert main([*flags, "--methods", f"full,nested:{WINDOW},top_k=8"]) == 0, "goes on with the first engine's answer"
    assert "repeated" in capsys.readouterr().out
    full, few = json.loads(output.read_text(encoding="utf-8"))["results"]
    with LLM(random_model("llama"), cache_dir=tmp_path / "cache", quiet=True, method="full", max_seq_len=700) as llm:
        prompts = [llm.tokenizer.encode(read_text(text))[:560] for text in flags[5:7]]
        answers = llm.generate(prompts, SamplingParams(temperature, max_tokens=41, ignore_eos=True, logprobs=1))
    assert full["answers"] == [list(answer.token_ids) for answer in answers]
    for answer, own in zip(answers, full["log_probabilities"], strict=True):
        assert own == pytest.approx([one.token for one in answer.logprobs[1:]], abs=1e-3)
    assert few["percent"] > 0
    assert few["answers"] != full["answers"]
    assert few["repeated"] == perplexity.repeated(few["answers"])


def test_repeated_by_hand() -> None:
    """Eleven tokens, of which the next eleven are the same: their n-grams begin with tokens of both."""
    fresh, again = list(range(27)), [*range(11), *range(11), *range(100, 105)]
    assert perplexity.repeated([fresh]) == [0, 0, 0, 0]
    assert perplexity.repeated([again]) == pytest.approx([0, 0, 80, 0])
    assert perplexity.repeated([fresh, again]) == pytest.approx([0, 0, 40, 0])


def test_figures_by_hand() -> None:
    """Two texts of four tokens, blocks of two: what is lost is the blocks' mean, and their spread its error."""
    first = [[0.1, 2.0, 0.1, 2.0], [0.1, 2.0, 0.1, 2.0]]
    losses = [[0.1, 2.4, 0.1, 2.0], [0.1, 2.0, 0.3, 2.2]]
    found = perplexity.figures_of(losses, first, 2)
    assert found["perplexity"] == pytest.approx(math.exp(9.2 / 8))
    assert found["percent"] == pytest.approx(100 * (math.exp(0.1) - 1))
    deviation = math.sqrt((0.1**2 * 4) / 3)  # of 0.2, 0, 0 and 0.2
    assert found["error"] == pytest.approx(100 * math.exp(0.1) * deviation / 2)
    assert [one["percent"] for one in found["by_text"]] == pytest.approx([100 * (math.exp(0.1) - 1)] * 2)
    assert found["by_part"] == pytest.approx([100 * (math.exp(one) - 1) for one in (0, 0.2, 0.1, 0.1)])
    assert found["likely"] == pytest.approx(100 * (math.exp(0.05) - 1))
    assert found["unlikely"] == pytest.approx(100 * (math.exp(0.15) - 1))
    assert perplexity.figures_of(first, first, 2)["error"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--tokens", "45"], "--tokens = 45: must be a multiple of --block = 10, twice that or more"),
        (["--tokens", "10"], "--tokens = 10: must be a multiple of --block = 10, twice that or more"),
        (["--own_answers", "--tokens", "6", "--block", "3"], "--tokens = 6: must be >= 12 with --own_answers"),
        (["--temperature", "1"], "--temperature = 1.0: must be left out without --own_answers"),
        (["--block", "0"], "--block = 0: must be >= 1"),
        (["--methods", "full,prkv", "--top_k", "64,100"], "top_k = 100: must be a positive multiple of page = 8"),
        (["--top_k", "x"], "--top_k = 'x': must be a comma list of numbers >= 1"),
        (["--prompt_tokens", "900"], "--prompt_tokens = 900: must be <= "),
        (
            ["--text", "no_such_package:a.txt"],
            "text = 'no_such_package:a.txt': there is no package 'no_such_package'",
        ),
        (["--text", "no_such/log.txt"], "No such file"),
        (["--text", "a/log.txt", "b/log.txt"], "--text = ['log.txt', 'log.txt']: must be of different names"),
        (["--methods", "full,full"], "--methods = 'full,full': must name each once"),
    ],
)
def test_bad_settings_are_named(
    changes: list[str], message: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, "--methods", "full", *changes]) == 1
    assert message in capsys.readouterr().err
