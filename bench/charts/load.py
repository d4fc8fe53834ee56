"""Draw a load test's result as an SVG.

    python -m kvseek.bench.charts.load RESULT.json --output PICTURE.svg

Panels of throughput, time to first token and time per output token: of bench/load/main.py by concurrency and by the prompt's
length, a colour for each tool; of bench/load/served.py a row for each load, a colour for each method. A full line is the median,
a dashed one the 99th percentile. Axes are logarithmic, but for those of throughput and of the time per output token upwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from kvseek.bench.load.report import SERVER, captions
from kvseek.bench.output import ResultError, read_result

from .svg import draw_command, element, picture, put_text, round_step, rule, short_number, written

WIDTH, HEAD, ROW, FOOT = 1040, 100, 270, 16
LEFTS, PANEL_WIDTH, PANEL_HEIGHT = (70, 410, 750), 250, 180
BENCHMARKS = ("load", "served")
QUANTITIES = (  # of the columns: heading, key of a result, scale, percentiles, whether the axis is logarithmic
    ("output tokens per second", "tokens_per_second", 1, (), False),
    ("time to first token, s", "ttft_seconds", 1, ("p50", "p99"), True),
    ("time per output token, ms", "tpot_seconds", 1e3, ("p50", "p99"), False),
)


@dataclass(frozen=True)
class Row:
    """Results of a row of panels: what stands below, and the keys of what they differ in and of what has a line each."""

    below: str
    over: str
    line: str
    results: list[dict[str, Any]]


def rows_of(document: dict[str, Any]) -> list[Row]:
    """The rows of a document; raises ResultError if it is no load test's."""
    results = document["results"]
    if document["benchmark"] == "load":
        prompt, concurrency = (document["base"][name] for name in ("prompt_tokens", "concurrency"))
        by_concurrency = [result for result in results if result["prompt_tokens"] == prompt]
        by_prompt = [result for result in results if result["concurrency"] == concurrency]
        return [
            Row(f"concurrency (prompts of {prompt:,} tokens)", "concurrency", "tool", by_concurrency),
            Row(f"prompt, tokens (concurrency {concurrency})", "prompt_tokens", "tool", by_prompt),
        ]
    loads: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        if result["asked"] == SERVER:
            loads.setdefault(result["load"], []).append(result)
    if not loads:
        raise ResultError("no result of a server by concurrency or rate; measure mixture, arrivals or reasoning")
    found = []
    for load, own in loads.items():
        over, words = ("concurrency", "concurrency") if own[0]["rate"] is None else ("rate", "requests a second")
        found.append(Row(f"{words} ({load})", over, "method", own))
    return found


@dataclass(frozen=True)
class Line:
    """One line of a panel, of a tool or a method: points (x, value) by ascending x; `colour` is one of svg.LIGHT and svg.DARK."""

    tool: str
    name: str
    points: tuple[tuple[float, float], ...]
    colour: int

    @property
    def dashes(self) -> str:
        """Of the stroke."""
        return "5 4" if self.name == "p99" else ""


class Area:
    """The plotted area of a panel; raises ResultError for values that its logarithmic axis has not."""

    def __init__(self, left: int, top: int, drawn: Sequence[Line], logarithmic: bool) -> None:
        self.left, self.top, self._logarithmic = left, top, logarithmic
        self.xs = sorted({x for line in drawn for x, _ in line.points})
        values = [value for line in drawn for _, value in line.points]
        if min(values) <= 0:
            raise ResultError(f"a result of {min(values)}: must be > 0; measure again")
        if logarithmic:
            self.ticks = [10.0**n for n in range(math.floor(math.log10(min(values))), _up(math.log10(max(values))) + 1)]
        else:
            step = round_step(max(values) / 4)
            self.ticks = [step * n for n in range(_up(max(values) / step) + 1)]

    def x(self, number: float) -> float:
        """Of a concurrency, a rate or a length."""
        low, high = math.log2(self.xs[0]), math.log2(self.xs[-1])
        share = (math.log2(number) - low) / (high - low) if high > low else 0.5
        return round(self.left + share * PANEL_WIDTH, 1)

    def y(self, value: float) -> float:
        """Of a value."""
        low, high, at = self.ticks[0], self.ticks[-1], value
        if self._logarithmic:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        return round(self.top + PANEL_HEIGHT - (at - low) / (high - low) * PANEL_HEIGHT, 1)


def _up(number: float) -> int:
    """The next integer, and never 0 steps."""
    return max(1, math.ceil(number)) if number > 0 else math.floor(number) + 1


def draw(document: dict[str, Any], file: str) -> str:
    """The SVG's text; the same document gives the same bytes."""
    rows = rows_of(document)
    height = HEAD + ROW * len(rows) + FOOT
    title = f"Load test of {document['engine']['name']}" if document["benchmark"] == "load" else document["shape"]
    root = picture(WIDTH, height, title, " ".join(captions(document)), [file])
    put_text(root, title, LEFTS[0] - 44, 26, "title")
    colours = {
        name: 1 + place for place, name in enumerate(dict.fromkeys(r[row.line] for row in rows for r in row.results))
    }
    for number, line in enumerate(
        Line(tool, name, (), colours[tool]) for name in ("median", "p99") for tool in colours
    ):
        left = LEFTS[0] + 200 * number
        _polyline(root, [(left, 50), (left + 26, 50)], line)
        put_text(root, f"{line.tool}, {line.name}", left + 32, 54, f"label t{line.colour}")
    for place, row in enumerate(rows):
        for (heading, quantity, scale, names, logarithmic), left in zip(QUANTITIES, LEFTS, strict=True):
            drawn = []
            for tool in dict.fromkeys(result[row.line] for result in row.results):
                own = [result for result in row.results if result[row.line] == tool]
                for name in names or ("",):
                    points = sorted((result[row.over], scale * _value(result[quantity], name)) for result in own)
                    drawn.append(Line(tool, name, tuple(points), colours[tool]))
            if drawn:
                _panel(root, Area(left, HEAD + ROW * place, drawn, logarithmic), drawn, row.below, heading)
    for number, words in enumerate((*captions(document), f"From {file}")):
        put_text(root, words, LEFTS[0] - 44, height - 44 + 16 * number, "small")
    return written(root)


def _value(value: Any, name: str) -> float:
    return float(value[name] if name else value)


def _panel(root: ElementTree.Element, area: Area, drawn: Sequence[Line], below: str, above: str) -> None:
    bottom = area.top + PANEL_HEIGHT
    put_text(root, above, area.left, area.top - 12, "heading")
    for tick in area.ticks:
        y = area.y(tick)
        rule(root, (area.left, y), (area.left + PANEL_WIDTH, y), "axis" if y == bottom else "grid")
        put_text(root, f"{tick:g}", area.left - 8, y + 4, "", "end")
    for number in area.xs:
        x = area.x(number)
        rule(root, (x, bottom), (x, bottom + 5), "axis")
        shown = short_number(int(number)) if number == int(number) else f"{number:g}"
        put_text(root, shown, x, bottom + 20, "", "middle")
    put_text(root, below, area.left + PANEL_WIDTH / 2, bottom + 40, "", "middle")
    for line in drawn:
        places = [(area.x(number), area.y(value)) for number, value in line.points]
        _polyline(root, places, line)
        for (number, value), (x, y) in zip(line.points, places, strict=True):
            circle = {"class": f"f{line.colour}", "cx": f"{x:g}", "cy": f"{y:g}", "r": "3"}
            marker = element(root, "circle", circle)
            element(marker, "title", text=" ".join(filter(None, (line.tool, line.name, f"{number:,}: {value:.4g}"))))


def _polyline(root: ElementTree.Element, places: Sequence[tuple[float, float]], line: Line) -> None:
    attributes = {"class": f"line s{line.colour}", "points": " ".join(f"{x:g},{y:g}" for x, y in places)}
    element(root, "polyline", attributes | ({"stroke-dasharray": line.dashes} if line.dashes else {}))


def _drawn(paths: Sequence[Path]) -> tuple[str, str]:
    if len(paths) != 1:
        raise ResultError(f"{len(paths)} result files: must be one, whose load the picture shows; draw them one by one")
    document = read_result(paths[0])
    if document.get("benchmark") not in BENCHMARKS:
        document = read_result(paths[0], benchmark=" or ".join(BENCHMARKS))  # which says what it is of
    return draw(document, paths[0].name), ""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the picture; returns 0, or 1 where that is not possible."""
    return draw_command(argv, __doc__ or "", _drawn)


if __name__ == "__main__":
    raise SystemExit(main())
