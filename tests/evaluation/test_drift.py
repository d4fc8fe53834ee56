"""The drift evaluation: which selections it taps, what it compares them with, and its report on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.conftest import BuildEngine, RandomModel
from tests.plugins.cases import CASES, SELECTING, method_flags

from kvseek.core.batch import Batch, RequestState
from kvseek.core.errors import ConfigError, LogitsError
from kvseek.core.extents import ExtentTable
from kvseek.core.index_context import IndexContext
from kvseek.core.request import Request, SamplingParams
from kvseek.core.selection import Selection
from kvseek.engine.draws.sampling import NO_TOKEN
from kvseek.engine.engine import Engine
from kvseek.evaluation import drift
from kvseek.evaluation.selection_quality import Quality, compare_fresh, measure, recall_of
from kvseek.evaluation.selection_tap import SelectionTap, TappedSelection
from kvseek.plugins.registry import get_method

WINDOW = ("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "32")
LIMITS = ("--max_batch_size", "1", "--max_seq_len", "1024", "--max_input_len", "200")


@pytest.fixture(scope="module")
def model(random_model: RandomModel) -> Path:
    return random_model("llama")


def test_the_upper_bound_has_full_recall(model: Path, build_engine: BuildEngine, tmp_path: Path) -> None:
    """flat selects the exact top k: anything but 1 would mean that queries, rows and keys are of different steps."""
    directory = build_engine(model, "flat", *WINDOW, *LIMITS, "--flat.top_k", "12")
    report = run(directory, tmp_path, "--steps", "60", "--every", "3", "--layers", "0,2")
    assert len(report["samples"]) == 20
    for sample in report["samples"]:
        assert list(sample["layers"]) == [0, 2]
        for quality in sample["layers"].values():
            assert quality["recall"] == 1.0
            assert quality["mass"] == pytest.approx(quality["exact_mass"], abs=1e-6)
    assert report["by_thousand"][0]["mass_ratio"] == pytest.approx(1, abs=1e-6)
    assert [(row["recall"], row["fresh_recall"], row["same_rows"]) for row in report["fresh_index"]] == [(1, 1, 1)] * 4
    assert report["last_minus_first_thousand"] is None  # a single thousand


def test_recall_and_memory_by_step(
    model: Path, build_engine: BuildEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = build_engine(model, "pariskv", *WINDOW, *LIMITS, "--pariskv.top_k", "12")
    output = tmp_path / "results" / "drift.json"
    flags = ["--steps", "120", "--every", "10", "--output", str(output)]
    assert drift.main([*command(directory, tmp_path), *flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(output.read_text(encoding="utf-8"))
    assert [sample["step"] for sample in report["samples"]] == list(range(10, 121, 10))
    assert report["steps"] == 120
    assert (report["prompt_tokens"], report["follow"]) == (100, False)
    for sample in report["samples"]:
        assert sample["cached_tokens"] == 100 + sample["step"]
        assert 0 <= sample["cached_tokens"] - sample["retrieval_tokens"] - 4 - 16 <= 8
        assert list(sample["layers"]) == ["0", "1", "2"]
        for quality in sample["layers"].values():
            assert 0.3 < quality["recall"] <= 1
            assert 0 < quality["mass"] <= quality["exact_mass"] + 1e-6 <= 1 + 1e-6
        assert sample["resident"] > 50e6
        assert (sample["device"], sample["extents"]) == (0, 1)
    # Evicted in pieces and indexed beside the steps, keys have the codes that they have when indexed at once.
    assert [(row["step"], row["layer"]) for row in report["fresh_index"]] == [
        (s, n) for s in (10, 120) for n in (0, 1, 2)
    ]
    for row in report["fresh_index"]:
        assert row["same_rows"] == 1
        assert row["fresh_recall"] == row["recall"]
    assert drift.main([*command(directory, tmp_path), *flags]) == 0
    assert "fresh index" in capsys.readouterr().out


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_following_feeds_the_document(
    temperature: str, model: Path, build_engine: BuildEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cached keys of layer 0 depend on token and position alone: they must be those of a prompt of the same tokens."""
    directory = build_engine(model, "pariskv", *WINDOW, *LIMITS, "--pariskv.top_k", "12")
    tapped: list[TappedSelection] = []

    def keep(last: TappedSelection, *settings: object) -> Quality:
        tapped.append(last)
        return Quality(1.0, 1.0, 1.0)

    monkeypatch.setattr(drift, "measure", keep)
    flags = ["--layers", "0", "--every", "60", "--temperature", temperature, "--follow"]
    followed = drift.run(drift.parse([*command(directory, tmp_path), *flags, "--steps", "60"]))
    # The same document as a prompt of 159 tokens, and one step more.
    flags = [*flags[:2], "--every", "1", "--follow", "--steps", "1", "--prompt_tokens", "159"]
    drift.run(drift.parse([*command(directory, tmp_path), *flags]))
    assert followed["follow"] is True
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


def command(directory: Path, folder: Path) -> list[str]:
    text = folder / "text.txt"
    text.write_text("the harbour master wrote the log at dusk. " * 40, encoding="utf-8")
    return ["--engine_dir", str(directory), "--text", str(text), "--prompt_tokens", "100"]


def run(directory: Path, folder: Path, *flags: str) -> dict[str, object]:
    return drift.run(drift.parse([*command(directory, folder), *flags]))


def test_thousands_are_compared() -> None:
    def sample(step: int, recall: float) -> drift.Sample:
        layers = {0: Quality(recall, recall / 2, 0.5), 1: Quality(recall - 0.1, recall / 2, 0.5)}
        return drift.Sample(step, step, step, layers, 0, 0, 1)

    summary = drift.summarise([sample(1, 0.9), sample(1000, 0.7), sample(1001, 0.5), sample(2500, 0.4)], 2500)
    spans = [(span["first_step"], span["samples"]) for span in summary["by_thousand"]]
    assert spans == [(1, 2), (1001, 1), (2001, 1)]
    assert [span["recall"] for span in summary["by_thousand"]] == pytest.approx([0.75, 0.45, 0.35])
    assert [span["mass_ratio"] for span in summary["by_thousand"]] == pytest.approx([0.8, 0.5, 0.4])
    change = {"recall": 0.35 - 0.75, "mass_ratio": 0.4 - 0.8, "exact_mass": 0}
    assert summary["last_minus_first_thousand"] == pytest.approx(change)


def test_recall_counts_rows_of_the_exact_top() -> None:
    """Two KV heads; scores ascend with the position in one and descend in the other. Entries of -1 are none."""
    n, dim = 50, 8
    keys = torch.zeros(2, n, dim)
    keys[0, :, 0] = torch.arange(n).float()
    keys[1, :, 0] = -torch.arange(n).float()
    queries = torch.zeros(4, dim)
    queries[:, 0] = 1
    rows = torch.tensor([[45, 46, 47, 48, 49], [0, 1, 2, -1, -1]], dtype=torch.int32)
    assert recall_of(TappedSelection(queries, rows, keys, 1.0), 5) == pytest.approx((1.0 + 0.6) / 2)
    assert recall_of(TappedSelection(queries, rows - rows - 1, keys, 1.0), 5) == 0


def test_attention_on_the_selected_rows() -> None:
    """One KV head of two query heads; of each, two rows share nearly all attention. Rows of both heads are the top 3."""
    keys = torch.zeros(1, 20, 8)
    keys[0, [4, 5], 0] = 20.0
    keys[0, [4, 6], 1] = 20.0
    queries = torch.eye(2, 8)
    both = TappedSelection(queries, torch.tensor([[4, 5, 6]], dtype=torch.int32), keys, 1.0)
    one = TappedSelection(queries, torch.tensor([[-1, 5, 0]], dtype=torch.int32), keys, 1.0)
    for tapped, recall, mass in ((both, 1.0, 1.0), (one, 1 / 3, 1 / 4)):
        quality = measure(tapped, 3)
        assert (quality.recall, quality.mass, quality.exact_mass) == pytest.approx((recall, mass, 1.0), abs=1e-4)


def test_a_fresh_index_shows_what_the_running_one_lost() -> None:
    """The running index misses a row that one built from the same keys finds."""
    method = get_method("flat")
    settings = method.configure({"top_k": 2})
    cpu = torch.device("cpu")
    context = IndexContext(0, 1, 1, 4, 1.0, settings, {}, ExtentTable(1, 1, 1), [3], torch.float32, cpu, library=None)
    keys = torch.eye(4)[None, [0, 1, 2, 3]] * torch.tensor([3.0, 2.0, 1.0, 0.0])[:, None]
    tapped = TappedSelection(torch.ones(1, 4), torch.tensor([[0, 2]], dtype=torch.int32), keys, 1.0)
    compared = compare_fresh(tapped, method.create(context), "flat", 2)
    assert (compared.recall, compared.fresh_recall, compared.same_rows) == (0.5, 1.0, 0.5)


def test_selections_are_copied(model: Path, build_engine: BuildEngine) -> None:
    """A graph overwrites its tensors at the next step: what was tapped must not change with them."""
    decoder = Engine.load(build_engine(model, "flat", *WINDOW, *LIMITS)).decoder
    tap = SelectionTap(decoder.cache, 1.0, [1])
    decoder.cache.open(0, 24)
    decoder.cache.begin_prefill(0, 24)
    queries, rows = torch.ones(1, 6, 16), torch.tensor([[[1, 2], [3, 0]]], dtype=torch.int32)
    batch = batch_of(4, 2)
    tap.expect()
    tap.selected(1, queries, batch, Selection(rows))
    tap.selected(0, queries, batch, Selection(rows))
    tap.selected(1, torch.zeros(2, 6, 16), Batch.of([RequestState(slot=0, length=4)] * 2, batch.table), None)
    tap.step_ended([0])
    queries.zero_(), rows.zero_()
    last = tap.last(1)
    assert (last.queries.unique().tolist(), last.rows.tolist()) == ([1.0], [[1, 2], [3, 0]])
    with pytest.raises(ConfigError, match="layer 0 selected nothing"):
        tap.last(0)


def test_keys_are_those_before_the_upkeep(model: Path, build_engine: BuildEngine) -> None:
    """A method may move rows between two steps; only the keys of a step that is measured are copied."""
    decoder = Engine.load(build_engine(model, "flat", *WINDOW, *LIMITS)).decoder
    cache, tap = decoder.cache, SelectionTap(decoder.cache, 1.0, [0])
    cache.open(0, 29)
    cache.begin_prefill(0, 29)
    pool = cache.rows.of_layer(0).pool
    pool.zero_()
    tap.selected(0, torch.ones(1, 6, 16), batch_of(4, 2), Selection(torch.zeros(1, 2, 2, dtype=torch.int32)))
    for wanted in (True, False):
        if wanted:
            tap.expect()
        tap.step_ended([0])
        pool.add_(1)
        assert tap.last(0).keys.unique().tolist() == [0]


def batch_of(length: int, extents: int) -> Batch:
    return Batch.of([RequestState(slot=0, length=length)], torch.zeros(1, extents, dtype=torch.int32))


@pytest.mark.parametrize("method", SELECTING)
def test_every_method_is_tapped(method: str, model: Path, build_engine: BuildEngine, tmp_path: Path) -> None:
    """Selected rows are of the region and hold no more than the exact ones, though rows move and layers are dense."""
    directory = build_engine(model, method, *WINDOW, *LIMITS, *method_flags(method, CASES[method].sparse))
    report = run(directory, tmp_path, "--steps", "60", "--every", "4")
    assert len(report["samples"]) == 15
    for sample in report["samples"]:
        for quality in sample["layers"].values():
            assert 0 < quality["mass"] <= quality["exact_mass"] + 1e-6
    assert report["by_thousand"][0]["recall"] > 0


def test_a_tap_changes_no_token(model: Path, build_engine: BuildEngine) -> None:
    directory = build_engine(model, "pariskv", *WINDOW, *LIMITS, "--pariskv.top_k", "12")
    request = Request(tuple(range(5, 105)), 30, SamplingParams(temperature=1.0, seed=3))
    plain, tapped = Engine.load(directory), Engine.load(directory)
    SelectionTap.into(tapped, [0, 1])
    assert plain.generate([request]) == tapped.generate([request])


BAD = {
    "steps": (["--steps", "0"], "--steps = 0: must be >= 1"),
    "layers": (["--layers", "0,3"], "--layers = '0,3': must be a comma list of layers below 3"),
    "short text": (["--prompt_tokens", "5000"], "--prompt_tokens = 5000: the document must have 5000 tokens, "),
    "short document": (
        ["--steps", "4000", "--follow"],
        "--prompt_tokens = 100 and --steps = 4000 with --follow: the document must have 4100 tokens, ",
    ),
    "no sparse step": (["--steps", "2", "--every", "7"], "--steps = 2: no step that was measured attended sparsely"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_named(
    case: str, model: Path, build_engine: BuildEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = build_engine(model, "pariskv", *WINDOW, *LIMITS, "--pariskv.top_k", "12")
    flags, message = BAD[case]
    assert drift.main([*command(directory, tmp_path), *flags]) == 1
    assert message in capsys.readouterr().err


def test_a_method_that_selects_everything_is_refused(
    model: Path, build_engine: BuildEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = build_engine(model, "full", *WINDOW, *LIMITS)
    assert drift.main(command(directory, tmp_path)) == 1
    assert "method 'full': must have a field top_k" in capsys.readouterr().err
