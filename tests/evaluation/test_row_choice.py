"""The study of rules that choose rows, against their definitions in plain loops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.conftest import RandomModel

from kvseek.evaluation import row_choice
from kvseek.evaluation.row_choice import Rule, Step, choose, compare, measure_step


@pytest.fixture
def step() -> Step:
    generator = torch.Generator().manual_seed(3)
    weights = (4 * torch.randn(2, 3, 60, generator=generator)).softmax(dim=-1)
    values = torch.randn(2, 60, 8, generator=generator) * (1 + torch.arange(60) % 7)[:, None]
    place = torch.arange(60)
    return Step(weights, values, (place < 4) | (place >= 50))


def rows_by_hand(step: Step, head: int, rule: Rule) -> list[int]:
    weights = step.weights[head].double().mean(dim=0).tolist()
    value = [w * (float(step.values[head, i].norm()) if rule.norms else 1) for i, w in enumerate(weights)]
    free = sorted((i for i in range(60) if not step.window[i]), key=lambda i: -value[i])[: rule.most]
    kept = sum(weights[i] for i in range(60) if step.window[i])
    chosen: list[int] = []
    for row in free:
        if len(chosen) >= rule.least and kept >= rule.share and rule.share < 1:
            break
        kept += weights[row]
        chosen.append(row)
    return sorted(chosen)


@pytest.mark.parametrize("rule", [Rule(5), Rule(5, norms=True), Rule(99), Rule(20, 2, 0.6), Rule(20, 9, 0.3)], ids=str)
def test_rules_choose_what_they_say(step: Step, rule: Rule) -> None:
    chosen = choose(step, rule)
    for head in range(2):
        assert chosen[head].nonzero()[:, 0].tolist() == rows_by_hand(step, head, rule)


def test_a_rule_that_takes_everything_lacks_nothing(step: Step) -> None:
    rows, kept, error = measure_step(step, Rule(99)).tolist()
    assert (rows, kept) == (46, pytest.approx(1))
    assert error == pytest.approx(0, abs=1e-5)
    assert measure_step(step, Rule(3))[2] > 0.01


def test_shares_are_compared_with_as_many_rows(step: Step) -> None:
    found = compare([step, step], [Rule(3), Rule(30, 1, 0.7)])
    assert [entry["rule"] for entry in found][:2] == ["top_k 3", "share 0.7 of 1 to 30 rows"]
    assert found[2]["rows"] == round(found[1]["rows"])


def test_report(random_model: RandomModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, text, output = random_model("llama"), tmp_path / "text", tmp_path / "found.json"
    text.write_text("the quick brown fox jumps over the lazy dog " * 200)
    flags = ["--context", "600", "--queries", "2", "--every", "2", "--output", str(output)]
    assert row_choice.main(["--model", str(model), "--text", str(text), *flags]) == 0
    results = json.loads(output.read_text())["results"]
    assert len(results) == 12 + 6
    assert all(0 < entry["kept"] <= 1.001 for entry in results)
    assert "norms 100" in capsys.readouterr().out
    assert row_choice.main(["--model", str(model), "--text", str(text), "--context", "60000"]) == 1
    assert "row_choice: tokens = 60000" in capsys.readouterr().err
