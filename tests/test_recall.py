"""Recall measures: what they capture is what attention sees, their arithmetic, and the targets on a real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from random_models import ARCHITECTURES, save_random_model

from kvseek.engine.errors import ConfigError
from kvseek.evaluation import recall
from kvseek.evaluation.capture import CapturedLayer, capture, load_model, token_ids
from kvseek.plugins.common.group import GROUP_REDUCTIONS
from kvseek.plugins.pariskv.config import Config

TOKENS = 700
TEXT = "the harbour master wrote the log, and the light was lit at dusk. " * 40


@pytest.fixture(scope="module", params=ARCHITECTURES)
def random_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("recall") / request.param, request.param)


def test_captured_vectors_reproduce_the_attention_weights(random_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvseek.evaluation.capture.CHUNK_TOKENS", 16)  # several chunks, the last one short
    model, _ = load_model(random_model)
    ids = torch.arange(40).mul(7).remainder(300).tolist()
    layers = capture(model, ids, queries=20)  # from more than one chunk
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = model(torch.tensor([ids]), output_attentions=True).attentions
    assert len(layers) == len(expected)
    for layer, weights in zip(layers, expected, strict=True):
        keys = layer.keys.repeat_interleave(layer.queries.shape[0] // layer.keys.shape[0], dim=0)
        scores = layer.queries @ keys.transpose(1, 2) * layer.scaling
        scores.masked_fill_(torch.ones(20, 40).tril(20) == 0, float("-inf"))
        assert torch.allclose(scores.softmax(dim=-1), weights[0, :, 20:], atol=1e-5)


def test_capturing_leaves_the_model_as_it_was(random_model: Path) -> None:
    model, _ = load_model(random_model)
    ids = list(range(30))
    before = model(torch.tensor([ids])).logits
    capture(model, ids, queries=4)
    assert torch.equal(model(torch.tensor([ids])).logits, before)


def random_layer(tokens: int = 1400, queries: int = 6) -> CapturedLayer:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, tokens, 64, generator=generator)
    return CapturedLayer(keys, torch.randn(6, queries, 64, generator=generator) * 2, 0.125)


@pytest.mark.parametrize("group_reduce", GROUP_REDUCTIONS)
def test_measures_of_a_layer(group_reduce: str) -> None:
    layer = random_layer()
    measure = recall.measure_layer(3, layer, Config(top_k=50, group_reduce=group_reduce))
    assert (measure.layer, measure.group_reduce) == (3, group_reduce)
    assert 0.5 < measure.recall < 1
    assert 0 < measure.mass < measure.flat_mass < 1
    # By hand: the exact rows' mass of one KV head and query.
    keys = layer.keys[0, 64:-256]
    weights = (layer.queries[:3] @ keys.T * 0.125).softmax(dim=-1)
    positions = torch.arange(50)
    by_hand = weights[:, 0, :50].sum(dim=-1).mean()
    assert recall._mass(weights[None, :, 0], positions[None]) == pytest.approx(float(by_hand))


@pytest.mark.parametrize("group_reduce", GROUP_REDUCTIONS)
def test_everything_is_found_when_everything_is_kept(group_reduce: str) -> None:
    layer = random_layer(tokens=64 + 90 + 256)
    measure = recall.measure_layer(0, layer, Config(top_k=90, group_reduce=group_reduce))
    assert (measure.recall, measure.mass_ratio) == (1, 1)
    assert measure.mass == pytest.approx(1)


def test_the_estimate_is_better_with_alpha() -> None:
    error = recall.estimate_error(0, random_layer())
    assert 0 < error.corrected < error.uncorrected < 0.12


def test_command_line_prints_json_and_tables(
    random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    arguments = ["--model", str(random_model), "--text", str(text), "--tokens", str(TOKENS), "--queries", "3"]
    assert recall.main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["retrieval_tokens"] == TOKENS - 64 - 256
    assert len(report["layers"]) == 3 * len(GROUP_REDUCTIONS)
    rows = [row["recall"] for row in report["layers"] if row["group_reduce"] == "max"]
    assert report["averages"]["max"]["recall"] == pytest.approx(sum(rows) / 3)
    assert recall.main(arguments) == 0
    printed = capsys.readouterr().out
    assert f"{report['averages']['max']['recall']:.3f}" in printed
    assert f"{report['error']:.2%}" in printed


def test_errors_say_what_to_do(random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "short.txt"
    text.write_text("the light was lit at dusk", encoding="utf-8")
    absent = str(tmp_path / "absent")
    assert recall.main(["--model", absent, "--text", str(text)]) == 1
    assert "does not exist; pass a Hugging Face directory" in capsys.readouterr().err
    assert recall.main(["--model", str(random_model), "--text", absent]) == 1
    assert absent in capsys.readouterr().err
    assert recall.main(["--model", str(random_model), "--text", str(text), "--tokens", "600"]) == 1
    assert "tokens = 600: must be <=" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        recall.main(["--model", str(random_model), "--text", str(text), "--queries", "0"])
    assert "--queries must be in 1..256" in capsys.readouterr().err


def test_text_must_be_long_enough(random_model: Path) -> None:
    _, tokenizer = load_model(random_model)
    assert token_ids(tokenizer, TEXT, 50) == tokenizer(TEXT)["input_ids"][:50]
    with pytest.raises(ConfigError, match="pass a longer --text"):
        token_ids(tokenizer, "dusk", 50)


@pytest.mark.model
@pytest.mark.slow
def test_targets_on_real_keys(smollm2_gguf: Path, document: str) -> None:
    model, tokenizer = load_model(smollm2_gguf)
    layers = capture(model, token_ids(tokenizer, document, 8192), queries=8)
    del model
    config = Config()
    measures = [recall.measure_layer(number, layer, config) for number, layer in enumerate(layers)]
    errors = [recall.estimate_error(number, layer) for number, layer in enumerate(layers)]
    assert sum(m.recall for m in measures) / len(measures) >= 0.82
    assert sum(m.mass for m in measures) >= 0.95 * sum(m.flat_mass for m in measures)
    assert sum(e.corrected for e in errors) / len(errors) <= 0.035
    assert all(e.corrected < e.uncorrected for e in errors)
