"""Draw a load test's result as an SVG.

    python -m kvseek.bench.charts.load RESULT.json --output PICTURE.svg

Six panels: throughput, time to first token and time per output token, by concurrency and by the prompt's length; a colour for
each tool, a full line for the median and a dashed one for the 99th percentile. Axes are logarithmic, those of throughput and
of the time per output token linear in their height.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from kvseek.bench.load.report import captions
from kvseek.bench.output import ResultError, read_result

from .svg import draw_command, element, picture, put_text, rule, short_number, written

WIDTH, HEIGHT = 1040, 656
LEFTS, PANEL_WIDTH = (70, 410, 750), 250
TOPS, PANEL_HEIGHT = (100, 370), 180
COLOURS = {"perf_analyzer": 1, "aiperf": 2}  # of svg.LIGHT and svg.DARK
QUANTITIES = (  # of the columns: heading, key of a result, scale, percentiles, whether the axis is logarithmic
    ("output tokens per second", "tokens_per_second", 1, (), False),
    ("time to first token, s", "ttft_seconds", 1, ("p50", "p99"), True),
    ("time per output token, ms", "tpot_seconds", 1e3, ("p50", "p99"), False),
)
AXES = (  # of the rows: heading, and the keys in which the results of a row differ and which they share
    ("concurrency", "concurrency", "prompt_tokens"),
    ("prompt, tokens", "prompt_tokens", "concurrency"),
)


@dataclass(frozen=True)
class Line:
    """One line of a panel: points (x, value) by ascending x."""

    tool: str
    name: str
    points: tuple[tuple[int, float], ...]

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
            step = _round_step(max(values) / 4)
            self.ticks = [step * n for n in range(_up(max(values) / step) + 1)]

    def x(self, number: int) -> float:
        """Of a concurrency or a length."""
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


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... (or 0.1, 0.2, ...) that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * 0.999)


def draw(document: dict[str, Any], file: str) -> str:
    """The SVG's text; the same document gives the same bytes."""
    title, results = f"Load test of {document['engine']['name']}", document["results"]
    root = picture(WIDTH, HEIGHT, title, " ".join(captions(document)), [file])
    put_text(root, title, LEFTS[0] - 44, 26, "title")
    tools = [tool for tool in COLOURS if any(result["tool"] == tool for result in results)]
    for number, line in enumerate(Line(tool, name, ()) for name in ("median", "p99") for tool in tools):
        left = LEFTS[0] + 200 * number
        _polyline(root, [(left, 50), (left + 26, 50)], line)
        put_text(root, f"{line.tool}, {line.name}", left + 32, 54, f"label t{COLOURS[line.tool]}")
    for (over, key, other), top in zip(AXES, TOPS, strict=True):
        shared = document["base"][other]
        row = [result for result in results if result[other] == shared]
        named = f"prompts of {shared:,} tokens" if other == "prompt_tokens" else f"concurrency {shared}"
        for (heading, quantity, scale, names, logarithmic), left in zip(QUANTITIES, LEFTS, strict=True):
            drawn = [
                Line(
                    tool,
                    name,
                    tuple(sorted((r[key], scale * _value(r[quantity], name)) for r in row if r["tool"] == tool)),
                )
                for tool in dict.fromkeys(result["tool"] for result in row)
                for name in names or ("",)
            ]
            if drawn:
                _panel(root, Area(left, top, drawn, logarithmic), drawn, f"{over} ({named})", heading)
    for number, words in enumerate((*captions(document), f"From {file}")):
        put_text(root, words, LEFTS[0] - 44, HEIGHT - 44 + 16 * number, "small")
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
        put_text(root, short_number(number), x, bottom + 20, "", "middle")
    put_text(root, below, area.left + PANEL_WIDTH / 2, bottom + 40, "", "middle")
    for line in drawn:
        places = [(area.x(number), area.y(value)) for number, value in line.points]
        _polyline(root, places, line)
        for (number, value), (x, y) in zip(line.points, places, strict=True):
            circle = {"class": f"f{COLOURS[line.tool]}", "cx": f"{x:g}", "cy": f"{y:g}", "r": "3"}
            marker = element(root, "circle", circle)
            element(marker, "title", text=" ".join(filter(None, (line.tool, line.name, f"{number:,}: {value:.4g}"))))


def _polyline(root: ElementTree.Element, places: Sequence[tuple[float, float]], line: Line) -> None:
    attributes = {"class": f"line s{COLOURS[line.tool]}", "points": " ".join(f"{x:g},{y:g}" for x, y in places)}
    element(root, "polyline", attributes | ({"stroke-dasharray": line.dashes} if line.dashes else {}))


def _drawn(paths: Sequence[Path]) -> tuple[str, str]:
    if len(paths) != 1:
        raise ResultError(f"{len(paths)} result files: must be one, whose load the picture shows; draw them one by one")
    return draw(read_result(paths[0], benchmark="load"), paths[0].name), ""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the picture; returns 0, or 1 where that is not possible."""
    return draw_command(argv, __doc__ or "", _drawn)


if __name__ == "__main__":
    raise SystemExit(main())
