"""Draw milliseconds per decode step, from result files of the GPU benchmark, as bars of an SVG; print them as a table.

    python -m kvseek.bench.charts.steps RESULT.json ... --output PICTURE.svg

A group of bars for each context, in it for each method a bar for each place where its rows lay, batch 1. The baseline is `full`,
with its rows in GPU memory. Files are results of `kvseek bench --shape`; several may hold parts of one picture (other contexts,
other methods), but none may hold a bar that another one holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvseek.bench.output import ResultError, markdown, read_result

from .svg import draw_command, element, picture, put_text, written

BASELINE = "full"
PLACES = {"never": "in GPU memory", "always": "in host memory", "auto": "in GPU memory where they fit"}  # by --offload
WIDTH, LEFT, LONGEST_BAR = 820, 124, 540
TOP, BAR, METHOD_GAP, GROUP_GAP, BOTTOM = 60, 13, 7, 40, 56


@dataclass(frozen=True)
class Bar:
    """Median milliseconds of a method's decode step with `context` tokens cached, its rows lying at `place`.

    `ratio` is the time over the baseline's in the same run; None for the baseline.
    """

    context: int
    method: str
    place: str
    milliseconds: float
    ratio: float | None

    @property
    def words(self) -> str:
        """All that the bar says."""
        return f"{self.context:,} tokens, {self.method}, rows {self.place}: {self.milliseconds:.2f} ms"


@dataclass(frozen=True)
class Chart:
    """Bars by ascending context, those of a method in a context next to each other.

    `source` are the lines below the bars; `files` go into the picture's metadata, for whoever draws it again.
    """

    title: str
    bars: tuple[Bar, ...]
    source: tuple[str, ...]
    files: tuple[str, ...]


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
                context, method, ratio = cell["context"], entry["method"], entry["to_baseline"]
                if method in hot and not entry["hot_rows"]:
                    continue
                baseline = method == BASELINE
                if not baseline and ratio is None:
                    raise ResultError(f"{path}: no result of {BASELINE} with batch 1; name it first in --methods")
                place = PLACES["never" if baseline else phase["offload"]]
                bar = Bar(context, method, place, entry["step_seconds"]["median"] * 1e3, None if baseline else ratio)
                found.setdefault((context, method, place), bar)
    return found


def chart(paths: Sequence[Path]) -> Chart:
    """One picture of several result files; raises ResultError where they do not go together."""
    documents, names = [read_result(path, benchmark="device", mode="decode") for path in paths], [p.name for p in paths]
    if len({(document["shape"], document["dtype"], document["gpu"]["name"]) for document in documents}) > 1:
        raise ResultError(f"{', '.join(names)}: results of several shapes, dtypes or GPUs; draw them one by one")
    found: dict[tuple[int, str, str], Bar] = {}
    for path, document in zip(paths, documents, strict=True):
        own = bars(path, document)
        for key in sorted(own.keys() & found.keys()):
            raise ResultError(f"{path}: {own[key].words} is in another file too; leave one out")
        found |= own
    if not found:
        raise ResultError(f"{', '.join(names)}: no result with batch 1; measure one")
    methods, places = list(dict.fromkeys([BASELINE, *(bar.method for bar in found.values())])), list(PLACES.values())
    order = sorted(found.values(), key=lambda bar: (bar.context, methods.index(bar.method), places.index(bar.place)))
    first = documents[0]
    steps = " or ".join(str(count) for count in sorted({document["steps"] for document in documents}))
    commits = {str(document.get("code") or document["machine"]["commit"])[:7] for document in documents}
    return Chart(
        title=f"One decode step, {first['shape']} shape, {first['dtype']}, one request, one {first['gpu']['name']}",
        bars=tuple(order),
        source=(
            f"Median of {steps} steps of random weights. × is the time over that of {BASELINE} in the same run.",
            f"From {', '.join(names)} (kvseek commit {', '.join(sorted(commits))})",
        ),
        files=tuple(names),
    )


def table(drawn: Chart) -> str:
    """The bars as Markdown: a line for each method and place, milliseconds and in brackets the ratio to the baseline's."""
    contexts = sorted({bar.context for bar in drawn.bars})
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for bar in drawn.bars:
        ratio = "" if bar.ratio is None else f" ({bar.ratio:.2f})"
        cells.setdefault((bar.method, bar.place), {})[bar.context] = f"{bar.milliseconds:.2f}{ratio}"
    heading = ("", *(f"{context:,} tokens" for context in contexts))
    lines = ((f"`{method}`, rows {place}", *map(line.get, contexts)) for (method, place), line in cells.items())
    return markdown([heading, *(tuple(cell or "" for cell in line) for line in lines)])


def draw(chart: Chart) -> str:
    """The SVG's text; the same chart gives the same bytes."""
    groups, methods = {bar.context for bar in chart.bars}, {(bar.context, bar.method) for bar in chart.bars}
    rows = (len(methods) - len(groups)) * METHOD_GAP + len(chart.bars) * BAR
    height = TOP + len(groups) * GROUP_GAP + rows + BOTTOM
    root = picture(WIDTH, height, chart.title, " ".join(f"{bar.words}." for bar in chart.bars), chart.files)
    put_text(root, chart.title, 24, 28, "title")

    def box(colour: int, x: float, y: float, width: float, words: str | None = None) -> None:
        size = {"width": f"{width:g}", "height": f"{BAR - 2}"}
        drawn = element(root, "rect", {"class": f"f{colour + 1}", "x": f"{x:g}", "y": f"{y:g}", **size})
        if words is not None:  # what a browser shows when the mouse is over it
            element(drawn, "title", text=words)

    places = list(dict.fromkeys(bar.place for bar in chart.bars))
    for number, place in enumerate(places):
        box(number, 24 + 220 * number, 44, BAR)
        put_text(root, f"keys and values {place}", 42 + 220 * number, 55, "label")
    scale, y, before = LONGEST_BAR / max(bar.milliseconds for bar in chart.bars), float(TOP), None
    for bar in chart.bars:
        if before is None or bar.context != before.context:
            y += GROUP_GAP
            put_text(root, f"{bar.context:,} tokens", 24, y - 8, "heading")
        elif bar.method != before.method:
            y += METHOD_GAP
        if before is None or (bar.context, bar.method) != (before.context, before.method):
            put_text(root, bar.method, LEFT - 10, y + BAR - 2, "label", "end")
        length = round(bar.milliseconds * scale, 1)
        box(places.index(bar.place), LEFT, y, length, bar.words)
        caption = f"{bar.milliseconds:.1f} ms" + ("" if bar.ratio is None else f", {bar.ratio:.2f} ×")
        put_text(root, caption, LEFT + length + 6, y + BAR - 3, "label")
        y, before = y + BAR, bar
    for number, words in enumerate(reversed(chart.source)):
        put_text(root, words, 24, height - 12 - 16 * number, "small")
    return written(root)


def _drawn(paths: Sequence[Path]) -> tuple[str, str]:
    made = chart(paths)
    return draw(made), table(made)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the picture and print its bars; returns 0, or 1 where the result files do not make one."""
    return draw_command(argv, __doc__ or "", _drawn)


if __name__ == "__main__":
    raise SystemExit(main())
