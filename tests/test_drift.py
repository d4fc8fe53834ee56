"""The drift evaluation: what it overhears, what it compares it with, and its report on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import BuildEngine
from random_models import save_random_model
from torch import Tensor

from kvseek.engine.engine import Engine
from kvseek.engine.memory import ExtentTable
from kvseek.engine.request import Request, SamplingParams
from kvseek.evaluation import drift
from kvseek.evaluation.overhear import Heard, Listener, _Overheard, recall_of
from kvseek.plugins.base import DeviceIndex, IndexContext
from kvseek.plugins.batch import DeviceBatch, RequestState, pack

WINDOW = ("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "32")
LIMITS = ("--max_batch_size", "1", "--max_seq_len", "1024", "--max_input_len", "200")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("drift") / "model", "llama")


def test_the_upper_bound_has_full_recall(model: Path, build_engine: BuildEngine, tmp_path: Path) -> None:
    """flat selects the exact top k: anything but 1 would mean that queries, rows and keys are of different steps."""
    directory = build_engine(model, "flat", *WINDOW, *LIMITS, "--flat.top_k", "12")
    report = run(directory, tmp_path, "--steps", "60", "--every", "3", "--layers", "0,2")
    assert len(report["samples"]) == 20
    assert all(sample["recall"] == {0: 1.0, 2: 1.0} for sample in report["samples"])
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
    assert report["prompt_tokens"] == 100
    for sample in report["samples"]:
        assert sample["cached_tokens"] == 100 + sample["step"]
        assert 0 <= sample["cached_tokens"] - sample["retrieval_tokens"] - 4 - 16 <= 8
        assert list(sample["recall"]) == ["0", "1", "2"]
        assert all(0.3 < recall <= 1 for recall in sample["recall"].values())
        assert sample["resident"] > 50e6
        assert (sample["device"], sample["extents"]) == (0, 1)
    assert drift.main([*command(directory, tmp_path), *flags]) == 0
    assert "recall" in capsys.readouterr().out


def command(directory: Path, folder: Path) -> list[str]:
    text = folder / "text.txt"
    text.write_text("the harbour master wrote the log at dusk. " * 40, encoding="utf-8")
    return ["--engine_dir", str(directory), "--text", str(text), "--prompt_tokens", "100"]


def run(directory: Path, folder: Path, *flags: str) -> dict[str, object]:
    return drift.run(drift.parse([*command(directory, folder), *flags]))


def test_thousands_are_compared() -> None:
    def sample(step: int, recall: float) -> drift.Sample:
        return drift.Sample(step, step, step, {0: recall, 1: recall - 0.1}, 0, 0, 1)

    summary = drift.summarise([sample(1, 0.9), sample(1000, 0.7), sample(1001, 0.5), sample(2500, 0.4)], 2500)
    spans = [(span["first_step"], span["samples"]) for span in summary["by_thousand"]]
    assert spans == [(1, 2), (1001, 1), (2001, 1)]
    assert [span["recall"] for span in summary["by_thousand"]] == pytest.approx([0.75, 0.45, 0.35])
    assert summary["last_minus_first_thousand"] == pytest.approx(0.35 - 0.75)


def test_recall_counts_rows_of_the_exact_top() -> None:
    """Two KV heads; scores ascend with the position in one and descend in the other. Entries of -1 are none."""
    n, dim = 50, 8
    keys = torch.zeros(2, n, dim)
    keys[0, :, 0] = torch.arange(n).float()
    keys[1, :, 0] = -torch.arange(n).float()
    queries = torch.zeros(4, dim)
    queries[:, 0] = 1
    rows = torch.tensor([[45, 46, 47, 48, 49], [0, 1, 2, -1, -1]], dtype=torch.int32)
    assert recall_of(Heard(queries, rows, keys, 1.0), 5, "mean") == pytest.approx((1.0 + 0.6) / 2)
    assert recall_of(Heard(queries, rows - rows - 1, keys, 1.0), 5, "mean") == 0


class GraphIndex(DeviceIndex):
    """Selects the best positions of queries [1, H, D] among fixed scores: enough to be overheard."""

    def plan(self, length: int) -> tuple[int, ...]:
        return ()

    def attended(self, length: int) -> int:
        return 2

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None: ...

    def stage(self, slot: int, start: int, keys: Tensor) -> None: ...

    def commit(self, slot: int, start: int, count: int) -> None: ...

    def launch_select(self, queries: Tensor, batch: DeviceBatch) -> Tensor | None:
        return queries.topk(2, dim=-1).indices.int()

    @property
    def bytes_per_token(self) -> float:
        return 0.0


def test_device_selections_are_copied() -> None:
    """A graph overwrites its tensors at the next step: what was heard must not change with them."""
    table = ExtentTable(1, 1, 1)
    cpu = torch.device("cpu")
    index = GraphIndex(IndexContext(0, 1, 1, 4, 1.0, None, {}, table, [4], torch.float32, cpu, library=None))
    overheard = _Overheard(index)
    batch = DeviceBatch(pack([RequestState(0, 0, 4, 0, 0, 0, 0, 4, False)]), table.device_table)
    queries = torch.tensor([[[1.0, 5.0, 3.0, 2.0]]])
    rows = index.launch_select(queries, batch)
    assert rows is not None
    assert rows.tolist() == [[[1, 2]]]
    queries.zero_(), rows.zero_()
    assert overheard.queries is not None
    assert overheard.rows is not None
    assert (overheard.queries.tolist(), overheard.rows.tolist()) == ([[[1.0, 5.0, 3.0, 2.0]]], [[[1, 2]]])


def test_listening_changes_no_token(model: Path, build_engine: BuildEngine) -> None:
    directory = build_engine(model, "pariskv", *WINDOW, *LIMITS, "--pariskv.top_k", "12")
    request = Request(tuple(range(5, 105)), 30, SamplingParams(temperature=1.0, seed=3))
    plain, overheard = Engine.load(directory), Engine.load(directory)
    Listener(overheard, [0, 1])
    assert plain.generate([request]) == overheard.generate([request])


BAD = {
    "steps": (["--steps", "0"], "--steps = 0: must be >= 1"),
    "layers": (["--layers", "0,3"], "--layers = '0,3': must be a comma list of layers below 3"),
    "short text": (["--prompt_tokens", "5000"], "lower it or give a longer one"),
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
    assert "method 'full': must have fields top_k and group_reduce" in capsys.readouterr().err
