"""Draw a load test's result as an SVG.

    python -m kvseek.benchmarks.load.chart RESULT.json --output PICTURE.svg

Six panels: throughput, time to first token and time per output token, by concurrency and by the prompt's length; a colour for
each tool, a full line for the median and a dashed one for the 99th percentile. Axes are logarithmic, those of throughput and
of the time per output token linear in their height.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from kvseek.benchmarks.svg import element, picture, put_text, rule, short_number, written

from .cells import LoadTestError
from .table import captions

WIDTH, HEIGHT = 1040, 656
LEFTS, PANEL_WIDTH = (70, 410, 750), 250
TOPS, PANEL_HEIGHT = (100, 370), 180
COLOURS = {"perf_analyzer": 1, "aiperf": 2}  # of svg.LIGHT and svg.DARK


@dataclass(frozen=True)
class Quantity:
    """What a column of panels shows: `key` of a result, times `scale`; `names` are its percentiles, if it has any."""

    heading: str
    key: str
    scale: float
    names: tuple[str, ...]
    logarithmic: bool


@dataclass(frozen=True)
class Axis:
    """What a row of panels is drawn over: the results of a document that differ in `key` and share `other`."""

    heading: str
    key: str
    other: str


QUANTITIES = (
    Quantity("output tokens per second", "tokens_per_second", 1, (), False),
    Quantity("time to first token, s", "ttft_seconds", 1, ("p50", "p99"), True),
    Quantity("time per output token, ms", "tpot_seconds", 1e3, ("p50", "p99"), False),
)
AXES = (Axis("concurrency", "concurrency", "prompt_tokens"), Axis("prompt, tokens", "prompt_tokens", "concurrency"))


@dataclass(frozen=True)
class Line:
    """One line of a panel: points (x, value) by ascending x."""

    tool: str
    name: str
    points: tuple[tuple[int, float], ...]


def lines(document: dict[str, Any], axis: Axis, quantity: Quantity) -> list[Line]:
    """The lines of a panel."""
    shared = document["base"][axis.other]
    found = []
    for tool in COLOURS:
        results = [r for r in document["results"] if r["tool"] == tool and r[axis.other] == shared]
        for name in quantity.names or ("",) if results else ():
            points = ((r[axis.key], quantity.scale * _value(r[quantity.key], name)) for r in results)
            found.append(Line(tool, name, tuple(sorted(points))))
    return found


def _value(value: Any, name: str) -> float:
    return float(value[name] if name else value)


class Area:
    """The plotted area of a panel; raises LoadTestError for values that its logarithmic axis has not."""

    def __init__(self, left: int, top: int, drawn: Sequence[Line], logarithmic: bool) -> None:
        self.left, self.top, self._logarithmic = left, top, logarithmic
        self.xs = sorted({x for line in drawn for x, _ in line.points})
        values = [value for line in drawn for _, value in line.points]
        if min(values) <= 0:
            raise LoadTestError(f"a result of {min(values)}: must be > 0; measure again")
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
    title = f"Load test of {document['engine']['name']}"
    root = picture(WIDTH, HEIGHT, title, " ".join(captions(document)), [file])
    put_text(root, title, LEFTS[0] - 44, 26, "title")
    _legend(root, [tool for tool in COLOURS if any(r["tool"] == tool for r in document["results"])])
    for axis, top in zip(AXES, TOPS, strict=True):
        for quantity, left in zip(QUANTITIES, LEFTS, strict=True):
            drawn = lines(document, axis, quantity)
            if drawn:
                area = Area(left, top, drawn, quantity.logarithmic)
                _axes(root, area, f"{axis.heading} ({_shared(document, axis)})", quantity.heading)
                for line in drawn:
                    _line(root, area, line)
    for number, words in enumerate((*captions(document), f"From {file}")):
        put_text(root, words, LEFTS[0] - 44, HEIGHT - 44 + 16 * number, "small")
    return written(root)


def _shared(document: dict[str, Any], axis: Axis) -> str:
    number = document["base"][axis.other]
    return f"prompts of {number:,} tokens" if axis.other == "prompt_tokens" else f"concurrency {number}"


def _legend(root: ElementTree.Element, tools: Sequence[str]) -> None:
    entries = [(tool, f"{tool}, median", "") for tool in tools] + [(tool, f"{tool}, p99", "5 4") for tool in tools]
    for number, (tool, words, dashes) in enumerate(entries):
        left = LEFTS[0] + 200 * number
        _polyline(root, [(left, 50), (left + 26, 50)], tool, dashes)
        put_text(root, words, left + 32, 54, f"label t{COLOURS[tool]}")


def _axes(root: ElementTree.Element, area: Area, below: str, above: str) -> None:
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


def _line(root: ElementTree.Element, area: Area, line: Line) -> None:
    places = [(area.x(number), area.y(value)) for number, value in line.points]
    _polyline(root, places, line.tool, "5 4" if line.name == "p99" else "")
    for (number, value), (x, y) in zip(line.points, places, strict=True):
        circle = {"class": f"f{COLOURS[line.tool]}", "cx": f"{x:g}", "cy": f"{y:g}", "r": "3"}
        marker = element(root, "circle", circle)
        element(marker, "title", text=" ".join(filter(None, (line.tool, line.name, f"{number:,}: {value:.4g}"))))


def _polyline(root: ElementTree.Element, places: Sequence[tuple[float, float]], tool: str, dashes: str) -> None:
    attributes = {"class": f"line s{COLOURS[tool]}", "points": " ".join(f"{x:g},{y:g}" for x, y in places)}
    element(root, "polyline", attributes | ({"stroke-dasharray": dashes} if dashes else {}))


def read(path: Path) -> dict[str, Any]:
    """A result of the load test; raises LoadTestError for any other file, or none."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadTestError(f"{path}: no such file; make perf writes one") from None
    except json.JSONDecodeError as error:
        raise LoadTestError(f"{path}: not JSON: {error}") from None
    if document.get("benchmark") != "load":
        raise LoadTestError(f"{path}: a result of benchmark {document.get('benchmark')}; wanted one of make perf")
    return document


def main(argv: Sequence[str] | None = None) -> int:
    """Write the picture; returns 0, or 1 where that is not possible."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="what benchmarks/load/main.py wrote")
    parser.add_argument("--output", type=Path, required=True, help="the SVG")
    arguments = parser.parse_args(argv)
    try:
        arguments.output.write_text(draw(read(arguments.result), arguments.result.name), encoding="utf-8")
    except (LoadTestError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(arguments.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
