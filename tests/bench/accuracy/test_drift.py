"""The drift evaluation: which selections it taps, what it compares them with, and its report on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.plugins.cases import CASES, SELECTING, method_flags

from kvseek.bench.accuracy import drift
from kvseek.bench.accuracy.drift import SelectionTap, Tapped
from kvseek.core.batch import Batch, RequestState, Selection
from kvseek.core.errors import ConfigError, LogitsError
from kvseek.core.extents import ExtentTable
from kvseek.core.index_context import IndexContext
from kvseek.core.request import Request, SamplingConfig
from kvseek.engine.draws.sampling import NO_TOKEN
from kvseek.engine.engine import Engine
from kvseek.plugins.registry import get_method

WINDOW = ("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "32")
LIMITS = ("--max_batch_size", "1", "--max_seq_len", "1024", "--max_input_len", "200")


@pytest.fixture(scope="module")
def model(random_model: RandomModel) -> Path:
    return random_model("llama")


@pytest.fixture(scope="module")
def pariskv(model: Path, build_engine: BuildEngine) -> Path:
    return build_engine(model, "pariskv", *WINDOW, *LIMITS, "--pariskv.top_k", "12")


def command(directory: Path, folder: Path) -> list[str]:
    text = folder / "text.txt"
    text.write_text("the harbour master wrote the log at dusk. " * 40, encoding="utf-8")
    return ["--engine_dir", str(directory), "--text", str(text), "--prompt_tokens", "100"]


def run(directory: Path, folder: Path, *flags: str) -> dict[str, object]:
    return drift.run(drift.parse([*command(directory, folder), *flags]))


def test_recall_by_step(pariskv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Evicted in pieces and indexed beside the steps, keys have the codes that they have when indexed at once."""
    output = tmp_path / "results" / "drift.json"
    flags = ["--steps", "120", "--every", "10", "--output", str(output)]
    assert drift.main([*command(pariskv, tmp_path), *flags]) == 0
    assert "built afresh" in capsys.readouterr().out
    report = json.loads(output.read_text(encoding="utf-8"))
    assert [sample["step"] for sample in report["samples"]] == list(range(10, 121, 10))
    for sample in report["samples"]:
        assert sample["cached_tokens"] == 100 + sample["step"]
        assert list(sample["layers"]) == ["0", "1", "2"]
        for quality in sample["layers"].values():
            assert 0.3 < quality["recall"] <= 1
            assert 0 < quality["mass"] <= quality["exact_mass"] + 1e-6 <= 1 + 1e-6
    places = [(row["step"], row["layer"]) for row in report["fresh_index"]]
    assert places == [(step, layer) for step in (10, 120) for layer in (0, 1, 2)]
    assert all(row["same_rows"] == 1 and row["fresh_recall"] == row["recall"] for row in report["fresh_index"])


@pytest.mark.parametrize("method", SELECTING)
def test_every_method_is_tapped(method: str, model: Path, build_engine: BuildEngine, tmp_path: Path) -> None:
    """Selected rows are of the region and hold no more than the exact ones, though rows move and layers are dense.

    `flat` selects the exact top k: anything but 1 would mean that queries, rows and keys are of different steps.
    """
    directory = build_engine(model, method, *WINDOW, *LIMITS, *method_flags(method, CASES[method].sparse))
    report = run(directory, tmp_path, "--steps", "60", "--every", "4")
    assert len(report["samples"]) == 15
    measured = [quality for sample in report["samples"] for quality in sample["layers"].values()]
    assert all(0 < one["mass"] <= one["exact_mass"] + 1e-6 for one in measured)
    assert report["by_thousand"][0]["recall"] > 0
    if method == "flat":
        assert {one["recall"] for one in measured} == {1.0}
        assert {(row["fresh_recall"], row["same_rows"]) for row in report["fresh_index"]} == {(1.0, 1.0)}


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_following_feeds_the_document(
    temperature: str, pariskv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cached keys of layer 0 depend on token and position alone: they must be those of a prompt of the same tokens."""
    tapped: list[Tapped] = []
    quality = Tapped.quality
    monkeypatch.setattr(Tapped, "quality", lambda self, top_k: tapped.append(self) or quality(self, top_k))
    monkeypatch.setattr(drift, "_beside_fresh", lambda *_: {})
    flags = ["--layers", "0", "--temperature", temperature, "--follow"]
    run(pariskv, tmp_path, *flags, "--every", "60", "--steps", "60")
    # The same document as a prompt of 159 tokens, and one step more.
    run(pariskv, tmp_path, *flags, "--every", "1", "--steps", "1", "--prompt_tokens", "159")
    decoded, prompted = tapped
    n = min(decoded.keys.shape[1], prompted.keys.shape[1])
    assert n >= 130  # 96 are the prompt's
    torch.testing.assert_close(decoded.keys[:, :n], prompted.keys[:, :n], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(decoded.queries, prompted.queries, rtol=1e-4, atol=1e-4)


def test_the_script_ends_in_draws() -> None:
    sampler = drift.ScriptedSampler(Request((1,), 3), 4, [3, 1])
    assert [sampler.take(2) for _ in range(3)] == [3, 1, 2]
    with pytest.raises(LogitsError, match="must be finite"):
        drift.ScriptedSampler(Request((1,), 3), 4, [3]).take(NO_TOKEN)


def test_the_needle_document_is_followed(needle_folder: Path, build_engine: BuildEngine) -> None:
    limits = ("--max_batch_size", "1", "--max_seq_len", "700", "--cache.full_threshold", "512")
    window = ("--cache.sink", "16", "--cache.local", "64", "--cache.update", "32")
    directory = build_engine(needle_folder / "model", "pariskv", *limits, *window, "--pariskv.top_k", "50")
    flags = ["--prompt_tokens", "520", "--steps", "100", "--every", "20", "--follow"]
    report = drift.run(drift.parse(["--engine_dir", str(directory), "--needle", *flags]))
    assert [sample["cached_tokens"] for sample in report["samples"]] == [540, 560, 580, 600, 620]
    assert report["by_thousand"][0]["recall"] > 0.85
    assert report["by_thousand"][0]["mass_ratio"] > 0.98
    assert all(row["same_rows"] == 1 for row in report["fresh_index"])


def test_means_of_thousands() -> None:
    def sample(step: int, recall: float) -> dict[str, object]:
        return {
            "step": step,
            "layers": {n: {"recall": recall - n / 10, "mass": recall / 2, "exact_mass": 0.5} for n in (0, 1)},
        }

    found = drift.by_thousand([sample(1, 0.9), sample(1000, 0.7), sample(1001, 0.5), sample(2500, 0.4)])
    assert [one["steps"] for one in found] == ["1–1,000", "1,001–2,000", "2,001–3,000"]
    assert [one["recall"] for one in found] == pytest.approx([0.75, 0.45, 0.35])
    assert [one["mass_ratio"] for one in found] == pytest.approx([0.8, 0.5, 0.4])


def test_qualities_by_hand() -> None:
    """One KV head of two query heads; of each, two rows share nearly all attention. Rows of both heads are the top 3."""
    keys = torch.zeros(1, 20, 8)
    keys[0, [4, 5], 0] = 20.0
    keys[0, [4, 6], 1] = 20.0
    for rows, recall, mass in (([4, 5, 6], 1.0, 1.0), ([-1, 5, 0], 1 / 3, 1 / 4)):
        quality = Tapped(torch.eye(2, 8), torch.tensor([rows], dtype=torch.int32), keys, 1.0).quality(3)
        assert list(quality.values()) == pytest.approx([recall, mass, 1.0], abs=1e-4)


def test_a_fresh_index_finds_what_the_running_one_lost() -> None:
    method, cpu = get_method("flat"), torch.device("cpu")
    settings = method.configure({"top_k": 2})
    context = IndexContext(0, 1, 1, 4, 1.0, settings, {}, ExtentTable(1, 1, 1), [3], torch.float32, cpu, library=None)
    keys = torch.eye(4)[None, [0, 1, 2, 3]] * torch.tensor([3.0, 2.0, 1.0, 0.0])[:, None]
    tapped = Tapped(torch.ones(1, 4), torch.tensor([[0, 2]], dtype=torch.int32), keys, 1.0)
    assert sorted(drift.fresh_rows(tapped, method.create(context), "flat")[0].tolist()) == [0, 1]


def batch_of(length: int, extents: int) -> Batch:
    return Batch.of([RequestState(slot=0, length=length)], torch.zeros(1, extents, dtype=torch.int32))


def test_selections_are_copied_and_keys_are_those_before_the_upkeep(model: Path, build_engine: BuildEngine) -> None:
    """A graph overwrites its tensors at the next step, and a method may move rows between two steps."""
    engine = Engine.load(build_engine(model, "flat", *WINDOW, *LIMITS))
    cache, tap = engine.decoder.cache, SelectionTap(engine, [0, 1])
    cache.open(0, 29)
    cache.begin_prefill(0, 29)
    pool = cache.rows.of_layer(1).pool.zero_()
    queries, rows = torch.ones(1, 6, 16), torch.tensor([[[1, 2], [3, 0]]], dtype=torch.int32)
    batch = batch_of(4, 2)
    for wanted in (True, False):
        if wanted:
            tap.expect()
            tap.selected(1, queries, batch, Selection(rows))
            tap.selected(1, queries * 0, Batch.of([RequestState(slot=0, length=4)] * 2, batch.table), None)
            queries.zero_(), rows.zero_()
        tap.step_ended([0])
        pool.add_(1)
        last = tap.last(1)
        assert last.keys.unique().tolist() == [0]
        assert (last.queries.unique().tolist(), last.rows.tolist()) == ([1.0], [[1, 2], [3, 0]])
    with pytest.raises(ConfigError, match="layer 0 selected nothing"):
        tap.last(0)


def test_a_tap_changes_no_token(pariskv: Path) -> None:
    request = Request(tuple(range(5, 105)), 30, SamplingConfig(temperature=1.0, seed=3))
    plain, tapped = Engine.load(pariskv), Engine.load(pariskv)
    SelectionTap(tapped, [0, 1])
    assert plain.generate([request]) == tapped.generate([request])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "--steps = 0: must be >= 1"),
        (["--layers", "0,3"], "--layers = '0,3': must be a comma list of layers below 3"),
        (["--prompt_tokens", "5000"], "--prompt_tokens = 5000: the document must have 5000 tokens, "),
        (["--steps", "4000", "--follow"], "--steps = 4000 with --follow: the document must have 4100 tokens, "),
        (["--steps", "2", "--every", "7"], "--steps = 2: no step that was measured attended sparsely"),
    ],
)
def test_bad_settings_are_named(
    flags: list[str], message: str, pariskv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drift.main([*command(pariskv, tmp_path), *flags]) == 1
    assert message in capsys.readouterr().err


def test_a_method_that_selects_everything_is_refused(
    model: Path, build_engine: BuildEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drift.main(command(build_engine(model, "full", *WINDOW, *LIMITS), tmp_path)) == 1
    assert "method 'full': must have a field top_k" in capsys.readouterr().err
