"""Draw milliseconds per decode step, from result files of the GPU benchmark, as bars of an SVG; print them as a table.

    python benchmarks/plot.py RESULT.json ... --output PICTURE.svg

A group of bars for each context, in it for each method a bar for each place where its rows lay, batch 1. The baseline is `full`,
with its rows in GPU memory. Files are results of `kvseek bench --shape`; several may hold parts of one picture (other contexts,
other methods), but none may hold a bar that another one holds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvseek.benchmarks.step_chart import Bar, Chart, draw

BASELINE = "full"
PLACES = {"never": "in GPU memory", "always": "in host memory", "auto": "in GPU memory where they fit"}  # by --offload


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


def bars(path: Path, document: dict[str, Any]) -> dict[tuple[int, str, str], Bar]:
    """Bars of one file, by context, method and place.

    Of a method that was measured with and without hot rows, only the measurement with them: serving has them, too. `full` has
    its rows in GPU memory wherever those of the others lie, so it has one bar.
    """
    found: dict[tuple[int, str, str], Bar] = {}
    for phase in document["phases"]:
        for cell in (cell for cell in phase["cells"] if cell["batch"] == 1):
            hot = {entry["method"] for entry in cell["results"] if entry["hot_rows"]}
            for entry in cell["results"]:
                context, method, offload = cell["context"], entry["method"], phase["offload"]
                if method in hot and not entry["hot_rows"]:
                    continue
                baseline = method == BASELINE
                if not baseline and entry["to_baseline"] is None:
                    raise PlotError(f"{path}: no result of {BASELINE} with batch 1; name it first in --methods")
                place = PLACES["never" if baseline else offload]
                ratio = None if baseline else entry["to_baseline"]
                bar = Bar(context, method, place, entry["step_seconds"]["median"] * 1e3, ratio)
                found.setdefault((context, method, place), bar)
    return found


def chart(paths: Sequence[Path]) -> Chart:
    """One picture of several result files; raises PlotError where they do not go together."""
    documents = [read(path) for path in paths]
    if len({(document["shape"], document["dtype"], document["gpu"]["name"]) for document in documents}) > 1:
        names = ", ".join(path.name for path in paths)
        raise PlotError(f"{names}: results of several shapes, dtypes or GPUs; draw them one by one")
    found: dict[tuple[int, str, str], Bar] = {}
    for path, document in zip(paths, documents, strict=True):
        own = bars(path, document)
        for key in sorted(own.keys() & found.keys()):
            raise PlotError(f"{path}: {own[key].words} is in another file too; leave one out")
        found |= own
    if not found:
        raise PlotError(f"{', '.join(path.name for path in paths)}: no result with batch 1")
    methods, places = list(dict.fromkeys([BASELINE, *(bar.method for bar in found.values())])), list(PLACES.values())
    order = sorted(found.values(), key=lambda bar: (bar.context, methods.index(bar.method), places.index(bar.place)))
    first = documents[0]
    return Chart(
        title=f"One decode step, {first['shape']} shape, {first['dtype']}, one request, one {first['gpu']['name']}",
        bars=tuple(order),
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
    """The bars as Markdown: a line for each method and place, milliseconds and in brackets the ratio to the baseline's."""
    contexts = sorted({bar.context for bar in drawn.bars})
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for bar in drawn.bars:
        ratio = "" if bar.ratio is None else f" ({bar.ratio:.2f})"
        cells.setdefault((bar.method, bar.place), {})[bar.context] = f"{bar.milliseconds:.2f}{ratio}"
    lines = [["", *(f"{context:,} tokens" for context in contexts)], ["---"] * (1 + len(contexts))]
    for (method, place), line in cells.items():
        lines.append([f"`{method}`, rows {place}", *(line.get(context, "") for context in contexts)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the picture and print its bars; returns 0, or 1 where the result files do not make one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="result files")
    parser.add_argument("--output", type=Path, required=True, help="the SVG")
    arguments = parser.parse_args(argv)
    try:
        drawn = chart(arguments.results)
    except PlotError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    arguments.output.write_text(draw(drawn), encoding="utf-8")
    print(f"{table(drawn)}\n\n{arguments.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
