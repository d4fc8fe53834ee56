"""Draw milliseconds per decode step, from result files of the GPU benchmark, as bars of an SVG; print them as a table.

    python benchmarks/plot.py
    python benchmarks/plot.py RESULT.json ... --output PICTURE.svg

A group of bars for each context, for each method a bar for each place where its rows lay, batch 1. The baseline is `full`, with
its rows in GPU memory. Files are results of `kvseek bench --shape`; several may hold parts of one picture (other contexts, other
methods), but none may hold a bar that another one holds. Without files it draws those that README.md shows:

    kvseek bench --shape llama-3.1-8b --methods full,nested,pariskv,prkv,clusterkv,ctkvr --offload never,always \\
        --contexts 131072 --steps 40 --output benchmarks/results/methods-h200-block-means.json
    kvseek bench --shape llama-3.1-8b --methods full,nested --offload never,always \\
        --contexts 524288 --steps 40 --output benchmarks/results/decode-512k-h200-layers-together.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from kvseek.benchmarks.svg import element, picture, put_text, written

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
DEFAULTS = tuple(RESULTS / f"{name}.json" for name in ("methods-h200-block-means", "decode-512k-h200-layers-together"))
BASELINE = "full"
PLACES = {"never": "in GPU memory", "always": "in host memory", "auto": "in GPU memory where they fit"}  # by --offload
WIDTH, LEFT, LONGEST_BAR = 820, 124, 540
BAR, METHOD_GAP, GROUP_GAP = 13, 7, 40


class PlotError(ValueError):
    """Result files that do not make one picture; the message names the file and the remedy."""


@dataclass(frozen=True)
class Bar:
    """Median milliseconds of a method's decode step with `context` tokens cached, and their ratio to the baseline's."""

    context: int
    method: str
    place: str
    milliseconds: float
    ratio: float

    @property
    def caption(self) -> str:
        """What stands beside the bar."""
        return f"{self.milliseconds:.1f} ms" + ("" if self.method == BASELINE else f", {self.ratio:.2f} ×")

    @property
    def words(self) -> str:
        """All that the bar says."""
        return f"{self.context:,} tokens, {self.method}, rows {PLACES[self.place]}: {self.milliseconds:.2f} ms"


def read(path: Path) -> dict[str, Any]:
    """A result of the GPU benchmark's decode mode; raises PlotError for any other file, or none."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlotError(
            f"{path}: no such file; python benchmarks/plot.py --help shows the command that makes it"
        ) from None
    except json.JSONDecodeError as error:
        raise PlotError(f"{path}: not JSON: {error}") from None
    if document.get("benchmark") != "device" or document.get("mode") != "decode":
        kind = f"{document.get('benchmark')}, mode {document.get('mode')}"
        raise PlotError(f"{path}: a result of benchmark {kind}; wanted decode steps of `kvseek bench --shape`")
    return document


def bars(paths: Sequence[Path], documents: Sequence[dict[str, Any]]) -> list[Bar]:
    """Bars by context, then in the files' order of methods; raises PlotError where files do not go together.

    Of a method that was measured with and without hot rows, only the measurement with them: serving has them, too. `full` is
    compared with rows in GPU memory wherever those of the others lie, so it has one bar.
    """
    if len({(document["shape"], document["dtype"], document["gpu"]["name"]) for document in documents}) > 1:
        names = ", ".join(path.name for path in paths)
        raise PlotError(f"{names}: results of several shapes, dtypes or GPUs; draw them one by one")
    found: dict[tuple[int, str, str], Bar] = {}
    for path, document in zip(paths, documents, strict=True):
        mine: dict[tuple[int, str, str], Bar] = {}
        for phase in document["phases"]:
            for cell in (cell for cell in phase["cells"] if cell["batch"] == 1):
                hot = {entry["method"] for entry in cell["results"] if entry["hot_rows"]}
                for entry in cell["results"]:
                    method, place = entry["method"], phase["offload"]
                    if method == BASELINE:
                        place = "never"
                    elif entry["to_baseline"] is None:
                        raise PlotError(f"{path}: no result of {BASELINE} with batch 1; name it first in --methods")
                    if entry["hot_rows"] or method not in hot:
                        milliseconds = entry["step_seconds"]["median"] * 1e3
                        bar = Bar(cell["context"], method, place, milliseconds, entry["to_baseline"] or 1.0)
                        mine.setdefault((bar.context, method, place), bar)
        for key in mine.keys() & found.keys():
            raise PlotError(f"{path}: {found[key].words} is in another file too; leave one out")
        found |= mine
    if not found:
        raise PlotError(f"{', '.join(path.name for path in paths)}: no result with batch 1")
    order = list(dict.fromkeys(bar.method for bar in found.values()))
    order.sort(key=lambda method: method != BASELINE)
    places = list(PLACES)
    return sorted(found.values(), key=lambda bar: (bar.context, order.index(bar.method), places.index(bar.place)))


def draw(paths: Sequence[Path], documents: Sequence[dict[str, Any]]) -> str:
    """The SVG's text; the same files give the same bytes."""
    drawn, first = bars(paths, documents), documents[0]
    steps = " or ".join(str(count) for count in sorted({document["steps"] for document in documents}))
    commits = ", ".join(str(document["machine"]["commit"])[:10] for document in documents)
    title = f"One decode step, {first['shape']} shape, {first['dtype']}, one request, one {first['gpu']['name']}"
    words = " ".join(f"{bar.words}." for bar in drawn)
    names = [path.name for path in paths]
    groups = len({bar.context for bar in drawn})
    methods = len({(bar.context, bar.method) for bar in drawn})
    height = 60 + groups * GROUP_GAP + methods * METHOD_GAP + len(drawn) * BAR + 56
    root = picture(WIDTH, height, title, words, names)
    put_text(root, title, 24, 28, "title")
    places = [place for place in PLACES if any(bar.place == place for bar in drawn)]
    for number, place in enumerate(places):
        x = 24 + 220 * number
        _box(root, number, (x, 44), 12)
        put_text(root, f"keys and values {PLACES[place]}", x + 18, 55, "label")
    scale, y, before = LONGEST_BAR / max(bar.milliseconds for bar in drawn), 60.0, Bar(0, "", "", 0, 0)
    for bar in drawn:
        if bar.context != before.context:
            y += GROUP_GAP
            put_text(root, f"{bar.context:,} tokens", 24, y - 8, "heading")
        if (bar.context, bar.method) != (before.context, before.method):
            y += METHOD_GAP if bar.context == before.context else 0
            put_text(root, bar.method, LEFT - 10, y + BAR - 2, "label", "end")
        _box(root, places.index(bar.place), (LEFT, y), bar.milliseconds * scale, bar.words)
        put_text(root, bar.caption, LEFT + bar.milliseconds * scale + 6, y + BAR - 3, "label")
        y, before = y + BAR, bar
    put_text(
        root,
        f"Median of {steps} steps of random weights. × is the time over that of {BASELINE} in the same run.",
        24,
        height - 28,
        "small",
    )
    put_text(root, f"From {', '.join(names)} (kvseek commits {commits})", 24, height - 12, "small")
    return written(root)


def _box(
    root: ElementTree.Element, colour: int, corner: tuple[float, float], width: float, words: str | None = None
) -> None:
    x, y = corner
    size = {"width": f"{width:.1f}", "height": f"{BAR - 2}"}
    box = element(root, "rect", {"class": f"f{colour + 1}", "x": f"{x:g}", "y": f"{y:g}", **size})
    if words is not None:
        element(box, "title", text=words)


def table(drawn: Sequence[Bar]) -> str:
    """The bars as Markdown: a line for each method and place, milliseconds and in brackets the ratio to the baseline's."""
    contexts = sorted({bar.context for bar in drawn})
    lines: dict[tuple[str, str], dict[int, str]] = {}
    for bar in drawn:
        ratio = "" if bar.method == BASELINE else f" ({bar.ratio:.2f})"
        lines.setdefault((bar.method, bar.place), {})[bar.context] = f"{bar.milliseconds:.2f}{ratio}"
    rows = [["", *(f"{context:,} tokens" for context in contexts)], ["---"] * (1 + len(contexts))]
    for (method, place), cells in lines.items():
        rows.append([f"`{method}`, rows {PLACES[place]}", *(cells.get(context, "") for context in contexts)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the picture and print its bars; returns 0, or 1 where the result files do not make one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "results", nargs="*", type=Path, default=list(DEFAULTS), help="result files (default: those above)"
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "docs/decode-step.svg", help="default: docs/decode-step.svg"
    )
    arguments = parser.parse_args(argv)
    try:
        documents = [read(path) for path in arguments.results]
        drawn, text = bars(arguments.results, documents), draw(arguments.results, documents)
    except PlotError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    arguments.output.write_text(text, encoding="utf-8")
    print(f"{table(drawn)}\n\n{arguments.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
