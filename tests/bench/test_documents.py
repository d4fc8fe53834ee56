"""Tables and pictures of documents: they hold what the result files hold, and every result file is shown."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.conftest import ROOT

from kvseek.bench import documents
from kvseek.bench.charts import steps
from kvseek.bench.output import ResultError, as_text
from kvseek.bench.tables.results import FOLDER, Results, TableError

MOST_BYTES = 500 << 10  # of a result file
FILES = sorted(FOLDER.glob("*.json"))


def test_the_documents_show_the_result_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert documents.main(["--check"]) == 0, capsys.readouterr().err


def test_every_table_is_in_a_document() -> None:
    texts = [path.read_text(encoding="utf-8") for pattern in documents.DOCUMENTS for path in ROOT.glob(pattern)]
    shown = {found["name"] for text in texts for found in documents.BLOCK.finditer(text)}
    assert sorted(set(documents.TABLES) - shown) == [], "show these tables, or delete them in bench/tables"


def test_every_result_file_is_read_by_a_table_or_a_picture() -> None:
    results = Results()
    for make in (*documents.TABLES.values(), *documents.PICTURES.values()):
        list(make(results))
    assert sorted({path.stem for path in FILES} - set(results.read)) == [], "show these results, or delete them"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_result_files_are_as_the_tools_write_them_and_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text == as_text(json.loads(text))
    assert len(text) <= MOST_BYTES, "cut it down to what the tables read"


def test_another_figure_in_a_file_is_another_document(tmp_path: Path) -> None:
    """Writing once more changes nothing, and text around a table stays."""
    shutil.copytree(FOLDER, tmp_path / "results")
    before = "some words\n<!-- table: evictions -->\nold\n<!-- end -->\nand others\n"
    document = ROOT / "docs/measurements.md"
    text = documents.written(before, document)
    assert text.startswith("some words\n<!-- table: evictions -->\n| tokens | method |")
    assert text.endswith("<!-- end -->\nand others\n")
    assert documents.written(text, document) == text
    changed = tmp_path / "results/evictions-2m-h200.json"
    changed.write_text(re.sub(r'"step_seconds": [\d.]+', '"step_seconds": 0.5', changed.read_text(encoding="utf-8")))
    other = documents.written(text, document, tmp_path / "results")
    assert "500.00" in other
    assert "500.00" not in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table: none -->\n<!-- end -->\n", "table: none: must be one of summary, "),
        ("<!-- table: evictions -->\nand no end\n", "must be followed by a line <!-- end --> of its own"),
        ("<!-- table: evictions -->\n<!-- table: summary -->\n<!-- end -->\n", "must be followed by"),
        ("<!-- end -->\n", "must be followed by"),
    ],
)
def test_marks_that_fit_no_table(text: str, message: str) -> None:
    with pytest.raises(TableError, match=re.escape(message)):
        documents.written(text, ROOT / "docs/measurements.md")


def test_a_table_whose_file_is_gone(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match=r"evictions-1m-h100-nested\.json: no such file"):
        documents.table("evictions", ROOT / "docs/measurements.md", tmp_path)


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


def drawn(picture: Path) -> dict[str, float]:
    """Length of each bar, by what it says."""
    boxes = ElementTree.parse(picture).iter(f"{SVG}rect")
    texts = ((box.findtext(f"{SVG}title"), float(box.attrib["width"])) for box in boxes)
    return {text: width for text, width in texts if text is not None}


def files() -> list[Path]:
    """The result files of the committed picture."""
    return [
        ROOT / "bench/results" / name for name in str(ElementTree.parse(PICTURE).findtext(f"{SVG}metadata")).split()
    ]


def test_the_readme_shows_the_picture() -> None:
    assert f"({PICTURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_screen_states_what_was_measured() -> None:
    """Steps of full and nested, as the picture has them; eight requests of full and pariskv, and layers in host memory."""
    words = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    sentences = (
        r"at 131,072 tokens takes (?P<full>\S+) ms with dense attention and (?P<device>\S+) ms with the method `nested`, ",
        r"(?P<host>\S+) ms with all rows in host memory; at 524,288 tokens (?P<full_long>\S+), (?P<device_long>\S+) and ",
        r"(?P<host_long>\S+) ms\.",
    )
    stated = re.search("".join(sentences), words)
    assert stated is not None
    bars = {(bar.context, bar.method, bar.place): f"{bar.milliseconds:.1f}" for bar in steps.chart(files()).bars}
    keys = [("full", "in GPU memory"), ("nested", "in GPU memory"), ("nested", "in host memory")]
    measured = [bars[context, *key] for context in (131_072, 524_288) for key in keys]
    assert list(stated.groups()) == measured


def test_bars_are_as_long_as_the_results_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = {
        16384: [entry("full", 10), entry("fast", 5, 0.5), entry("fast", 4, 0.4, hot=True)],
        32768: [entry("full", 20), entry("fast", 6, 0.3)],
    }
    file, picture = result_file(tmp_path / "one.json", cells), tmp_path / "one.svg"
    assert steps.main([str(file), "--output", str(picture)]) == 0
    assert capsys.readouterr().out.splitlines()[2:4] == [
        "| `full`, rows in GPU memory | 10.00 | 20.00 |",
        "| `fast`, rows in GPU memory | 4.00 (0.40) | 6.00 (0.30) |",
    ]
    found = drawn(picture)
    assert {words: round(width / max(found.values()), 3) for words, width in found.items()} == {
        "16,384 tokens, full, rows in GPU memory: 10.00 ms": 0.5,
        "16,384 tokens, fast, rows in GPU memory: 4.00 ms": 0.2,
        "32,768 tokens, full, rows in GPU memory: 20.00 ms": 1.0,
        "32,768 tokens, fast, rows in GPU memory: 6.00 ms": 0.3,
    }


def test_a_bar_for_each_place_of_the_rows_and_one_for_full(tmp_path: Path) -> None:
    cells = {16384: [entry("full", 10), entry("fast", 5, 0.5)]}
    path = result_file(tmp_path / "both.json", cells)
    document = json.loads(path.read_text())
    document["phases"].append(document["phases"][0] | {"offload": "always"})
    path.write_text(json.dumps(document))
    assert [(bar.method, bar.place) for bar in steps.chart([path]).bars] == [
        ("full", "in GPU memory"),
        ("fast", "in GPU memory"),
        ("fast", "in host memory"),
    ]


@pytest.mark.parametrize(
    ("cells", "batch", "message"),
    [
        ({16384: [entry("full", 10)]}, 4, "no result with batch 1"),
        ({16384: [entry("fast", 5, None)]}, 1, "no result of full with batch 1; name it first in --methods"),
    ],
)
def test_results_without_a_bar_to_draw(tmp_path: Path, cells: dict[int, Any], batch: int, message: str) -> None:
    path = result_file(tmp_path / "one.json", cells, batch=batch)
    with pytest.raises(ResultError, match=re.escape(message)):
        steps.chart([path])


def test_a_bar_that_two_files_hold(tmp_path: Path) -> None:
    paths = [result_file(tmp_path / name, {16384: [entry("full", 10)]}) for name in ("one.json", "two.json")]
    with pytest.raises(
        ResultError, match=r"two\.json: 16,384 tokens, full, rows in GPU memory: 10\.00 ms is in another file too"
    ):
        steps.chart(paths)
