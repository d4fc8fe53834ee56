"""Lines over axes: the panels of load tests and of the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from .svg import element, put_text, round_step, rule, short_number

NARROWEST = 34  # between two numbers below an axis, so that they do not lie on each other


@dataclass(frozen=True)
class Mark:
    """A point: its place, what it says, its interval upwards, and the part of the page that it leads to."""

    x: float
    y: float
    words: str
    low: float | None = None
    high: float | None = None
    link: str = ""


@dataclass(frozen=True)
class Line:
    """Marks that are joined by ascending x; `colour` is one of svg.LIGHT and svg.DARK."""

    marks: Sequence[Mark]
    colour: int
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """Lines of one quantity; `zero`: a linear axis upwards begins there even if no value does."""

    above: str
    below: str
    lines: Sequence[Line]
    log_x: bool = True
    log_y: bool = False
    zero: bool = False

    def ticks(self) -> list[float]:
        """The values that a grid line stands at."""
        values = [
            value for line in self.lines for m in line.marks for value in (m.y, m.low, m.high) if value is not None
        ]
        least, most = min(values), max(values)
        if self.log_y:
            low = math.floor(math.log10(least))
            return [10.0**power for power in range(low, max(low + 1, math.ceil(math.log10(most))) + 1)]
        least = min(0.0, least) if self.zero else least
        step = round_step((most - least) / 5 or 1)
        low = math.floor(least / step)
        return [step * number for number in range(low, max(low + 1, math.ceil(most / step)) + 1)]

    def draw(self, root: ElementTree.Element, left: int, top: int, width: int, height: int) -> None:
        """Draw the panel, whose plotted area these are; its headings and numbers stand around it."""
        ticks, bottom = self.ticks(), top + height
        y = scale(ticks[0], ticks[-1], bottom, -height, self.log_y)
        put_text(root, self.above, left, top - 12, "heading")
        for tick in ticks:
            kind = "axis" if tick == 0 or (tick == ticks[0] and ticks[0] > 0) else "grid"
            rule(root, (left, y(tick)), (left + width, y(tick)), kind)
            put_text(root, f"{round(tick, 6):g}", left - 8, y(tick) + 4, "", "end")
        xs = sorted({mark.x for line in self.lines for mark in line.marks})
        x, shown = scale(xs[0], xs[-1], left + 12, width - 24, self.log_x), -math.inf
        for number in xs:
            rule(root, (x(number), bottom), (x(number), bottom + 5), "axis")
            if x(number) - shown >= NARROWEST:
                shown = x(number)
                words = short_number(round(number)) if number >= 10 else f"{number:.2g}"
                put_text(root, words, shown, bottom + 20, "", "middle")
        put_text(root, self.below, left + width / 2, bottom + 40, "", "middle")
        for line in self.lines:
            places = [(mark, x(mark.x), y(mark.y)) for mark in sorted(line.marks, key=lambda mark: mark.x)]
            polyline(root, [(at_x, at_y) for _, at_x, at_y in places], line)
            for mark, at_x, at_y in places:
                if mark.low is not None and mark.high is not None:
                    rule(root, (at_x, y(mark.low)), (at_x, y(mark.high)), f"line s{line.colour}")
                parent = element(root, "a", {"href": mark.link}) if mark.link else root
                circle = {"class": f"f{line.colour}", "cx": f"{at_x:g}", "cy": f"{at_y:g}", "r": "3.5"}
                element(element(parent, "circle", circle), "title", text=mark.words)


def polyline(root: ElementTree.Element, places: Sequence[tuple[float, float]], line: Line) -> None:
    """Draw the stroke of a line through these places."""
    attributes = {"class": f"line s{line.colour}", "points": " ".join(f"{x:g},{y:g}" for x, y in places)}
    element(root, "polyline", attributes | ({"stroke-dasharray": "5 4"} if line.dashed else {}))


def scale(low: float, high: float, start: float, length: float, logarithmic: bool = False) -> Callable[[float], float]:
    """From values to lengths; a single value lies in the middle."""
    turned: Callable[[float], float] = math.log2 if logarithmic else float
    first, last = turned(low), turned(high)
    if first == last:
        return lambda value: round(start + length / 2, 1)
    return lambda value: round(start + (turned(value) - first) / (last - first) * length, 1)
