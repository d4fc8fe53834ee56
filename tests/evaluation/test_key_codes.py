"""The study of nested key codes: its default variant is the method, and keys that are not quantised lose nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvseek.evaluation import key_codes
from kvseek.evaluation.capture import CapturedLayer
from kvseek.evaluation.key_codes import TOP_K, Truth, Variant, measure_layer, truth_of
from kvseek.evaluation.replay import Replay
from kvseek.measurement.variants import Variant as MethodVariant
from kvseek.plugins.codes.rotation import rotation_signs

STEPS = 3


@pytest.fixture(scope="module")
def layer() -> CapturedLayer:
    """Keys around a mean, and queries that attend to few of them."""
    generator = torch.Generator().manual_seed(5)
    keys = torch.randn(2, 1600, 32, generator=generator) + torch.randn(2, 1, 32, generator=generator)
    return CapturedLayer(keys, torch.randn(6, 40, 32, generator=generator) * 2, 32**-0.5)


def recall_of_method(layer: CapturedLayer, truth: Truth, **settings: object) -> float:
    """Share of the exact rows that an index of the method selects."""
    replay = Replay(layer, 3, STEPS, MethodVariant("nested", "nested", {"top_k": TOP_K, **settings}))
    found = []
    for step in range(STEPS):
        chosen = replay.step(layer.queries[:, step - STEPS].contiguous())
        found.append(chosen.gather(1, truth.best[step]).float().mean())
    return float(torch.stack(found).mean())


@pytest.mark.parametrize(
    ("variant", "settings"),
    [(Variant(), {}), (Variant(first_bits=0), {"first_bits": 4}), (Variant(candidates=2), {"candidates": 2})],
)
def test_variants_are_the_methods_settings(layer: CapturedLayer, variant: Variant, settings: dict[str, object]) -> None:
    truth = truth_of(layer, STEPS)
    recall, mass, exact = measure_layer(truth, variant, rotation_signs(0, 32))
    assert 0.5 < recall < 1
    assert 0.5 < mass / exact < 1
    assert recall == pytest.approx(recall_of_method(layer, truth, **settings), abs=2e-3)  # a tie within rounding


def test_keys_that_are_not_quantised_lose_nothing(layer: CapturedLayer) -> None:
    recall, mass, exact = measure_layer(
        truth_of(layer, STEPS), Variant(bits=16, first_bits=0, query_bits=0), rotation_signs(0, 32)
    )
    assert recall == pytest.approx(1, abs=2e-3)
    assert mass == pytest.approx(exact, rel=1e-4)


def test_report(monkeypatch: pytest.MonkeyPatch, layer: CapturedLayer, tmp_path: Path) -> None:
    monkeypatch.setattr(key_codes, "cached_capture", lambda *_: [layer] * 4)
    monkeypatch.setattr(key_codes, "variants", lambda: [Variant(), Variant(candidates=4)])
    output = tmp_path / "report.json"
    arguments = ["--model", "m.gguf", "--text", "t", "--queries", str(STEPS), "--output", str(output)]
    assert key_codes.main(arguments) == 0
    results = json.loads(output.read_text())["results"]
    assert [one["changes"] for one in results] == ["defaults", "candidates 4"]
    assert results[0]["recall"] >= results[1]["recall"] > 0.5
