"""kvseek evaluate report: every figure of the page is in a result file, and the page needs nothing but itself."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import shutil
import subprocess
from functools import reduce
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import RandomModel

from kvseek.bench.accuracy.tasks import Cell, Results
from kvseek.bench.output import write_result
from kvseek.bench.tables.results import FOLDER
from kvseek.cli.main import main

FILES = ["perplexity-cpu-smollm2", "needle-h100-128k-layers-together", "budgets-h200", "decode-cpu-8k-int8-two-cores"]


class Page(HTMLParser):
    """Headings, ids, links, and what a page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.links, self.loaded, self.headings = set[str](), list[str](), list[str](), list[str]()
        self._heading = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag names."""
        given = dict(attrs)
        self.ids.add(given.get("id") or "")
        self._heading = tag == "h2"
        if tag == "a":
            self.links.append(given["href"] or "")
        self.loaded += [
            f"{tag} {value}" for name, value in attrs if name == "src" or (tag == "link" and name == "href")
        ]
        self.loaded += [tag] if tag in ("script", "iframe", "object", "embed") else []

    def handle_data(self, data: str) -> None:
        """Note a heading's text."""
        if self._heading:
            self.headings.append(data)
            self._heading = False


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Results of the repository, and one of tasks by depth."""
    asked = Results({"depths": 2}, machines=[{"cpu": "one", "commit": "0123456"}], fingerprints={"full": "abc"})
    for length in (4096, 8192):
        asked.cells[length, "niah_single", "full"] = Cell("niah_single", length, "full", ["1", "0"], [1.0, 0.5], 1.0)
    path = tmp_path_factory.mktemp("results") / "tasks.json"
    write_result(path, asked.document())
    return [*(FOLDER / f"{name}.json" for name in FILES), path]


@pytest.fixture(scope="module")
def report(files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = tmp_path_factory.mktemp("page") / "report.html"
    assert main(["evaluate", "report", *map(str, files), "--html", str(page)]) == 0
    return page


def downloads(page: Page) -> dict[str, str]:
    """What the page's links hold, by type."""
    held = (link.removeprefix("data:").split(";base64,") for link in page.links if link.startswith("data:"))
    return {kind: base64.b64decode(text).decode() for kind, text in held}


def test_the_page_has_its_parts_and_loads_nothing(report: Path) -> None:
    page = Page(report.read_text(encoding="utf-8"))
    parts = [
        "Perplexity by budget",
        "Drift",
        "Answers by budget",
        "Speed",
        "Map by depth and length",
        "Speed and accuracy",
    ]
    assert list(dict.fromkeys(page.headings)) == [*parts, "Rows"]
    assert page.loaded == []
    assert all(link.startswith("data:") or link.removeprefix("#") in page.ids for link in page.links)


def test_every_row_is_in_its_file(report: Path, files: list[Path]) -> None:
    held = downloads(Page(report.read_text(encoding="utf-8")))
    rows: list[dict[str, Any]] = json.loads(held["application/json"])["rows"]
    assert len(list(csv.DictReader(io.StringIO(held["text/csv"])))) == len(rows) > 100
    documents = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in files}
    for row in rows:
        keys = [int(key) if key.isdecimal() else key for key in row["place"].split(".")]
        found = reduce(lambda value, key: value[key], keys, documents[row["file"]])
        if row["kind"] == "answers":
            found = 100 * "".join(found).count("1") / sum(map(len, found))
        if row["kind"] == "depth":
            found = 100 * found[round(row["at"])]
        assert row["value"] == pytest.approx(found), row
        assert row["commit"]
        assert row["machine"]
    assert {row["fingerprint"] for row in rows if row["kind"] == "depth"} == {"abc"}


def test_many_methods_stand_side_by_side(tmp_path: Path) -> None:
    """A line a method would not be told apart: each has a row with its figures at both budgets, the best first."""
    files = [FOLDER / f"perplexity-{budget}-cpu-smollm2.json" for budget in (256, 1024)]
    page = tmp_path / "report.html"
    assert main(["evaluate", "report", *map(str, files), "--html", str(page)]) == 0
    picture = page.read_text(encoding="utf-8").partition("<figure>")[2].partition("</figure>")[0]
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", picture)
    small, large = (
        {
            entry["name"].partition(":")[0]: entry
            for entry in json.loads(path.read_text(encoding="utf-8"))["results"][1:]
        }
        for path in files
    )
    names = sorted(small, key=lambda name: small[name]["percent"])
    assert [text for text in texts if text in small] == names
    assert "256 tokens" in texts, "arkvale's 240, of whole pages, count as these"
    for name in names:
        at = texts.index(name)
        for text, entry in zip(texts[at + 1 : at + 3], (small[name], large[name]), strict=True):
            value, low, high = map(float, re.findall(r"-?[\d.]+", text))
            assert value == pytest.approx(entry["percent"], abs=0.051)
            assert high - low == pytest.approx(2 * 1.96 * entry["error"], abs=0.11)


def test_files_of_other_commands_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = FOLDER / "serving-cpu-smollm2.json"
    assert main(["evaluate", "report", str(other), "--html", str(tmp_path / "page.html")]) == 1
    assert "must be of perplexity, tasks" in capsys.readouterr().err


@pytest.mark.slow
def test_all_goes_on_where_it_was(
    random_model: RandomModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is there is not measured again, and every figure but those of random weights has interval and fingerprint."""
    window = ",".join(f"cache.{name}={tokens}" for name, tokens in (("sink", 4), ("local", 16), ("full_threshold", 32)))
    flags = ["evaluate", "all", "--model", str(random_model("llama")), "--folder", str(tmp_path / "all"), "--quick"]
    flags += [
        "--methods",
        f"full,nested:{window}",
        "--top_k",
        "8",
        "--length",
        "400",
        "--text",
        "asyncio:base_events.py",
    ]
    assert main(flags) == 0
    rows = json.loads(downloads(Page((tmp_path / "all/report.html").read_text(encoding="utf-8")))["application/json"])[
        "rows"
    ]
    assert {row["kind"] for row in rows} == {"perplexity", "drift", "answers", "depth", "speed"}
    assert all(row["low"] <= row["value"] <= row["high"] and row["fingerprint"] and row["settings"] for row in rows)
    capsys.readouterr()
    (tmp_path / "all/speed.json").unlink()
    before = (tmp_path / "all/perplexity.json").read_bytes()
    assert main(flags) == 0
    assert (tmp_path / "all/perplexity.json").read_bytes() == before
    progress = capsys.readouterr().err.splitlines()
    assert [line for line in progress if "contexts" in line or "perplexity" in line] == []
    assert "steps" in progress
    assert main([*flags, "--length", "300"]) == 1
    assert "must be of {'quick': True" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_chromium_draws_it(report: Path, tmp_path: Path) -> None:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=400,900"]
    command += [f"--user-data-dir={tmp_path}", "--dump-dom", report.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert shown.count("<svg") > 10
