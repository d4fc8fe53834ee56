"""What benchmarks print of the result files that the documents cite: figures that matter first, numbers whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.conftest import ROOT

from kvseek.bench.speed.decode import print_report
from kvseek.bench.speed.device.main import print_report as print_device_report

RESULTS = ROOT / "bench" / "results"
FILES = (
    "decode-cpu-8k-int8-two-cores.json",
    "methods-h200.json",
    "throughput-nested-int8-h200.json",
    "prefill-sparse-h200.json",
    "ranks-h200-1m-auto.json",
)


def read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return document


def times(document: dict[str, Any]) -> list[str]:
    """The time of every step or prompt as the first table has it."""
    if document["benchmark"] == "decode":
        return [
            f"{one['tpot_seconds']['median'] * 1e3:.1f}" for part in document["contexts"] for one in part["results"]
        ]
    if document.get("mode") == "decode" and document["benchmark"] == "device":
        cells = [cell for phase in document["phases"] for cell in phase["cells"]]
        return [f"{one['step_seconds']['median'] * 1e3:.2f}" for cell in cells for one in cell["results"]]
    scale = 1.0 if document["mode"] == "prefill" else 1e3
    key = "step_seconds" if document["mode"] == "throughput" else "seconds"
    return [f"{one[key]['median'] * scale:.2f}" for one in document["results"]]


@pytest.mark.parametrize("details", [False, True])
@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("name", FILES)
def test_numbers_are_whole_on_every_terminal(
    name: str, columns: int, details: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    document = read(name)
    (print_report if document["benchmark"] == "decode" else print_device_report)(document, details)
    printed = capsys.readouterr().out
    assert "…" not in printed
    words, wanted = printed.split(), times(document)
    assert wanted
    assert [time for time in wanted if time not in words] == []


@pytest.mark.parametrize(("name", "more"), [(FILES[0], "parts of a step"), (FILES[1], "floor of")])
def test_details_are_printed_if_asked_for(name: str, more: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = read(name)
    show = print_report if document["benchmark"] == "decode" else print_device_report
    show(document)
    short = capsys.readouterr().out
    assert more not in short
    assert "--details" in short
    show(document, True)
    assert more in capsys.readouterr().out
