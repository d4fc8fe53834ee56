"""The documents' tables and pictures are what `make tables` writes from the result files; and every result file is shown."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from tests.conftest import ROOT

from kvseek.bench import documents
from kvseek.bench.output import ResultError, as_text
from kvseek.bench.tables import FOLDER, TABLES, Results, TableError

MOST_BYTES = 500 << 10  # of a result file
FILES = sorted(FOLDER.glob("*.json"))


def test_the_documents_show_the_result_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert documents.main(["--check"]) == 0, capsys.readouterr().err


def test_every_table_is_in_a_document() -> None:
    texts = [path.read_text(encoding="utf-8") for pattern in documents.DOCUMENTS for path in ROOT.glob(pattern)]
    shown = {found["name"] for text in texts for found in documents.BLOCK.finditer(text)}
    assert sorted(set(TABLES) - shown) == [], "show these tables, or delete them in bench/tables.py"


def test_every_result_file_is_read_by_a_table_or_a_picture() -> None:
    results = Results()
    for make in (*TABLES.values(), *documents.PICTURES.values()):
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
