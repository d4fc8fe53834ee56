"""Draw milliseconds per decode step by context, from result files of the GPU benchmark, as an SVG; print them as a table.

    python benchmarks/plot.py RESULT.json ... --output PICTURE.svg

A panel for each place where the rows of the methods lay, a line for each method, batch 1. The baseline is `full`; the first
other method of the files is the one whose ratios are written beside its line. Files are results of `kvseek bench --shape`;
several may hold parts of one picture (other contexts, other methods), but none may hold a point that another one holds.
The README's picture is written by `make tables` (documents.py), which has the names of its files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvseek.benchmarks.step_chart import Chart, Panel, Point, draw

BASELINE = "full"
PLACES = {  # by the benchmark's --offload: heading and note of a panel
    "never": ("Keys and values in GPU memory", "all methods"),
    "always": ("Keys and values in host memory", "for comparison, full with its own in GPU memory"),
    "auto": ("Keys and values in GPU memory where they fit", "the others in host memory"),
}


class PlotError(ValueError):
    """Result files that do not make one picture; the message names the file and the remedy."""


def read(path: Path) -> dict[str, Any]:
    """A result of the GPU benchmark's decode mode; raises PlotError for any other file, or none."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlotError(f"{path}: no such file; kvseek bench --shape NAME --output FILE makes one") from None
    except json.JSONDecodeError as error:
        raise PlotError(f"{path}: not JSON: {error}") from None
    if document.get("benchmark") != "device" or document.get("mode") != "decode":
        kind = f"{document.get('benchmark')}, mode {document.get('mode')}"
        raise PlotError(f"{path}: a result of benchmark {kind}; wanted decode steps of `kvseek bench --shape`")
    return document


def points(document: dict[str, Any]) -> Iterator[tuple[str, Point]]:
    """Each measurement with batch 1, with the place of the rows (a key of PLACES).

    Of a method that was measured with and without hot rows, only the measurement with them: serving has them, too.
    """
    for phase in document["phases"]:
        for cell in phase["cells"]:
            if cell["batch"] == 1:
                hot = {entry["method"] for entry in cell["results"] if entry["hot_rows"]}
                for entry in cell["results"]:
                    if entry["hot_rows"] or entry["method"] not in hot:
                        milliseconds = entry["step_seconds"]["median"] * 1e3
                        point = Point(entry["method"], cell["context"], milliseconds, entry["to_baseline"])
                        yield phase["offload"], point


def chart(paths: Sequence[Path]) -> Chart:
    """One picture of several result files; raises PlotError where they do not go together."""
    documents = [read(path) for path in paths]
    if len({(document["shape"], document["dtype"], document["gpu"]["name"]) for document in documents}) > 1:
        names = ", ".join(path.name for path in paths)
        raise PlotError(f"{names}: results of several shapes, dtypes or GPUs; draw them one by one")
    panels: dict[str, dict[str, list[Point]]] = {}
    for path, document in zip(paths, documents, strict=True):
        for place, point in points(document):
            line = panels.setdefault(place, {}).setdefault(point.method, [])
            if any(other.context == point.context for other in line):
                raise PlotError(
                    f"{path}: {point.method} at {point.context:,} tokens, offload {place}, is in another file too; leave one out"
                )
            line.append(point)
    for place, lines in panels.items():
        if BASELINE not in lines:
            raise PlotError(f"offload {place}: no result of {BASELINE} with batch 1; name it first in --methods")
        for line in lines.values():
            line.sort(key=lambda point: point.context)
    if not panels:
        raise PlotError(f"{', '.join(path.name for path in paths)}: no result with batch 1")
    first = documents[0]
    return Chart(
        title=f"Time per decode step, {first['shape']} shape, {first['dtype']}, one request, one {first['gpu']['name']}",
        panels=tuple(Panel(*texts, panels[place]) for place, texts in PLACES.items() if place in panels),
        baseline=BASELINE,
        source=source(paths, documents),
        files=tuple(path.name for path in paths),
    )


def source(paths: Sequence[Path], documents: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """What the figures are and come from, for the lines below the picture."""
    steps = " or ".join(str(count) for count in sorted({document["steps"] for document in documents}))
    commits = ", ".join(
        sorted({str(document.get("code") or document["machine"]["commit"])[:7] for document in documents})
    )
    return (
        f"Median of {steps} steps of random weights. × is the time over that of {BASELINE} in the same run.",
        f"From {', '.join(path.name for path in paths)} (kvseek commit {commits})",
    )


def table(drawn: Chart) -> str:
    """The points as Markdown: a line for each panel and method, milliseconds and in brackets the ratio to the baseline's."""
    contexts = sorted({point.context for point in drawn.points})
    lines = [["", *(f"{context:,} tokens" for context in contexts)], ["---"] * (1 + len(contexts))]
    for panel in drawn.panels:
        for method, line in panel.lines.items():
            cells = {point.context: _cell(point) for point in line}
            lines.append(
                [f"`{method}` ({panel.heading}; {panel.note})", *(cells.get(context, "") for context in contexts)]
            )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(point: Point) -> str:
    compared = point.method != BASELINE and point.ratio is not None
    return f"{point.milliseconds:.2f}" + (f" ({point.ratio:.2f})" if compared else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the picture and print its points; returns 0, or 1 where the result files do not make one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="result files")
    parser.add_argument("--output", type=Path, required=True, help="the SVG")
    arguments = parser.parse_args(argv)
    try:
        drawn = chart(arguments.results)
        picture = draw(drawn)
    except PlotError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    arguments.output.write_text(picture, encoding="utf-8")
    print(f"{table(drawn)}\n\n{arguments.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
