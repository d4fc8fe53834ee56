"""The picture of step times by context: it holds what the results hold."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.conftest import ROOT

from kvseek.benchmarks import plot
from kvseek.benchmarks.step_chart import spread

SVG = "{http://www.w3.org/2000/svg}"
PICTURE = ROOT / "docs/decode-step.svg"


def entry(method: str, milliseconds: float, ratio: float | None = 1.0, hot: bool = False) -> dict[str, Any]:
    return {"method": method, "hot_rows": hot, "step_seconds": {"median": milliseconds / 1e3}, "to_baseline": ratio}


def result_file(path: Path, cells: dict[int, list[dict[str, Any]]], offload: str = "never", batch: int = 1) -> Path:
    """A result file of the GPU benchmark, with the entries of each context."""
    parts = [{"context": context, "batch": batch, "results": results} for context, results in cells.items()]
    document = {
        "benchmark": "device",
        "mode": "decode",
        "shape": "llama-3.1-8b",
        "dtype": "bfloat16",
        "gpu": {"name": "Test GPU"},
        "steps": 40,
        "machine": {"commit": "0123456789abcdef"},
        "phases": [{"offload": offload, "cells": parts}],
    }
    path.write_text(json.dumps(document))
    return path


def markers(picture: Path) -> dict[str, tuple[float, float]]:
    """Place of each marker, by what it says."""
    circles = ElementTree.parse(picture).iter(f"{SVG}circle")
    return {
        str(circle.findtext(f"{SVG}title")): (float(circle.attrib["cx"]), float(circle.attrib["cy"]))
        for circle in circles
    }


def test_the_readme_shows_the_picture() -> None:
    assert f"({PICTURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_markers_lie_where_the_results_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = {
        16384: [entry("full", 10), entry("fast", 5, 0.5), entry("fast", 4, 0.4, hot=True)],
        32768: [entry("full", 20), entry("fast", 6, 0.3)],
        65536: [entry("full", 40)],
    }
    file, picture = result_file(tmp_path / "one.json", cells), tmp_path / "one.svg"
    assert plot.main([str(file), "--output", str(picture)]) == 0
    assert capsys.readouterr().out.splitlines()[2:4] == [
        "| `full` (Keys and values in GPU memory; all methods) | 10.00 | 20.00 | 40.00 |",
        "| `fast` (Keys and values in GPU memory; all methods) | 4.00 (0.40) | 6.00 (0.30) |  |",
    ]
    found = markers(picture)
    assert set(found) == {
        "full, 16,384 tokens: 10.000 ms, 1.000 × full",
        "full, 32,768 tokens: 20.000 ms, 1.000 × full",
        "full, 65,536 tokens: 40.000 ms, 1.000 × full",
        "fast, 16,384 tokens: 4.000 ms, 0.400 × full",
        "fast, 32,768 tokens: 6.000 ms, 0.300 × full",
    }
    (x1, y1), (x2, y2), (x3, y3) = (found[text] for text in sorted(found) if text.startswith("full"))
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.11)  # contexts that double lie equally far apart
    assert (y1 - y3) == pytest.approx(1.5 * (y2 - y3), abs=0.31)  # milliseconds are linear


def test_panels_by_the_place_of_the_rows(tmp_path: Path) -> None:
    device = result_file(tmp_path / "device.json", {16384: [entry("full", 10), entry("fast", 5, 0.5)]})
    host = result_file(tmp_path / "host.json", {16384: [entry("full", 10), entry("fast", 7, 0.7)]}, "always")
    picture = plot.chart([host, device])
    assert [panel.heading for panel in picture.panels] == [
        "Keys and values in GPU memory",
        "Keys and values in host memory",
    ]
    assert [panel.lines["fast"][0].milliseconds for panel in picture.panels] == [5, 7]
    assert picture.files == ("host.json", "device.json")


@pytest.mark.parametrize(
    ("cells", "batch", "message"),
    [
        ({16384: [entry("full", 10)]}, 4, "no result with batch 1"),
        (
            {16384: [entry("fast", 5, None)]},
            1,
            "offload never: no result of full with batch 1; name it first in --methods",
        ),
    ],
)
def test_results_without_a_line_to_draw(tmp_path: Path, cells: dict[int, Any], batch: int, message: str) -> None:
    with pytest.raises(plot.PlotError, match=re.escape(message)):
        plot.chart([result_file(tmp_path / "one.json", cells, batch=batch)])


def test_a_point_that_two_files_hold(tmp_path: Path) -> None:
    files = [result_file(tmp_path / name, {16384: [entry("full", 10)]}) for name in ("one.json", "two.json")]
    with pytest.raises(
        plot.PlotError, match=r"two\.json: full at 16,384 tokens, offload never, is in another file too"
    ):
        plot.chart(files)


def test_files_that_are_no_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing, other = tmp_path / "missing.json", tmp_path / "other.json"
    other.write_text('{"benchmark": "device", "mode": "prefill"}')
    for path, message in ((missing, "no such file"), (other, "a result of benchmark device, mode prefill")):
        assert plot.main([str(path), "--output", str(tmp_path / "none.svg")]) == 1
        assert f"error: {path}: {message}" in capsys.readouterr().err
    assert not (tmp_path / "none.svg").exists()


def test_labels_stay_apart_and_in_order() -> None:
    assert spread([10, 100, 50], 17) == [10, 100, 50]
    assert spread([50, 50, 50], 10) == [40, 50, 60]
    heights = spread([100, 102, 104, 119, 300], 17)
    assert heights == sorted(heights)
    assert all(low + 17 <= high + 1e-9 for low, high in itertools.pairwise(heights))
    assert heights[-1] == 300
