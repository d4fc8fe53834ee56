"""An SVG of step times by context: panels side by side, a line and a label for each method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from .svg import LIGHT, element, picture, put_text, rule, short_number, written

WIDTH, HEIGHT = 1040, 430
TOP, BOTTOM = 84, 326  # of the plotted areas
LEFTS, PANEL_WIDTH = (66, 584), 264  # of the plotted areas; labels stand to the right of each
MARKED_CONTEXT = 131_072  # where the ratio is written out
LABEL_DISTANCE = 17  # between the lines of two labels


@dataclass(frozen=True)
class Point:
    """Median milliseconds of a method's decode step with `context` tokens cached, and their ratio to the baseline's."""

    method: str
    context: int
    milliseconds: float
    ratio: float | None


@dataclass(frozen=True)
class Panel:
    """Lines of one panel by method, each by ascending context; `note` stands below the heading."""

    heading: str
    note: str
    lines: Mapping[str, Sequence[Point]]


@dataclass(frozen=True)
class Chart:
    """One or two panels with the same axes.

    `source` are the lines below the panels; `files` go into the picture's metadata, for whoever draws it again.
    """

    title: str
    panels: tuple[Panel, ...]
    baseline: str
    source: tuple[str, ...]
    files: tuple[str, ...]

    @property
    def methods(self) -> list[str]:
        """All methods, the baseline first; a method's place is its colour."""
        named = dict.fromkeys(method for panel in self.panels for method in panel.lines)
        return [self.baseline, *(method for method in named if method != self.baseline)]

    @property
    def points(self) -> list[Point]:
        """All points of all panels."""
        return [point for panel in self.panels for line in panel.lines.values() for point in line]


class Area:
    """The plotted area of a panel: contexts on a logarithmic axis, milliseconds on a linear one from 0."""

    def __init__(self, chart: Chart, left: int) -> None:
        contexts = [point.context for point in chart.points]
        self.left, self.right = left, left + PANEL_WIDTH
        self.low, self.high = math.log2(min(contexts)), math.log2(max(contexts))
        powers = range(math.ceil(self.low), math.floor(self.high) + 1)
        self.ticks = sorted({*(2**power for power in powers), max(contexts)})
        self.top_milliseconds = 5 * math.ceil(max(point.milliseconds for point in chart.points) / 5)

    def x(self, context: int) -> float:
        """Of a context; the middle if there is one context only."""
        span = self.high - self.low
        share = (math.log2(context) - self.low) / span if span else 0.5
        return round(self.left + share * PANEL_WIDTH, 1)

    def y(self, milliseconds: float) -> float:
        """Of a time."""
        return round(BOTTOM - milliseconds / self.top_milliseconds * (BOTTOM - TOP), 1)


def draw(chart: Chart) -> str:
    """The SVG's text; the same chart gives the same bytes."""
    if len(chart.panels) > len(LEFTS) or len(chart.methods) > len(LIGHT):
        raise ValueError(
            f"{len(chart.panels)} panels of {len(chart.methods)} methods; at most {len(LEFTS)} of {len(LIGHT)}"
        )
    root = picture(WIDTH, HEIGHT, chart.title, description(chart), chart.files)
    put_text(root, chart.title, LEFTS[0] - 40, 26, "title")
    for panel, left in zip(chart.panels, LEFTS, strict=False):
        area = Area(chart, left)
        _axes(root, area, panel)
        for method, line in panel.lines.items():
            _line(root, area, line, chart.methods.index(method))
        _labels(root, area, panel, chart.methods)
        if len(chart.methods) > 1:
            _ratios(root, area, panel, chart)
    for index, words in enumerate(reversed(chart.source)):
        put_text(root, words, LEFTS[0] - 40, HEIGHT - 12 - 16 * index, "small")
    return written(root)


def description(chart: Chart) -> str:
    """Every point in words, for readers who do not see the picture."""
    sentences = []
    for panel in chart.panels:
        for method, line in panel.lines.items():
            times = ", ".join(f"{short_number(point.context)} {point.milliseconds:.2f} ms" for point in line)
            sentences.append(f"{panel.heading} ({panel.note}), {method}: {times}.")
    return " ".join(sentences)


def spread(wanted: Sequence[float], distance: float) -> list[float]:
    """Heights of labels, at least `distance` apart and in the order of the wanted ones, near to those.

    Labels that are too close become a block, which lies around the mean of what its labels want.
    """
    blocks: list[list[float]] = []  # wanted heights of the labels of each block, ascending
    for height in sorted(wanted):
        blocks.append([height])
        while len(blocks) > 1 and _block(blocks[-2], distance)[-1] + distance > _block(blocks[-1], distance)[0]:
            last = blocks.pop()
            blocks[-1].extend(last)
    heights = [height for block in blocks for height in _block(block, distance)]
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    return [heights[order.index(index)] for index in range(len(wanted))]


def _block(wanted: Sequence[float], distance: float) -> list[float]:
    first = sum(wanted) / len(wanted) - (len(wanted) - 1) * distance / 2
    return [first + index * distance for index in range(len(wanted))]


def _axes(root: ElementTree.Element, area: Area, panel: Panel) -> None:
    put_text(root, panel.heading, area.left, TOP - 28, "heading")
    put_text(root, panel.note, area.left, TOP - 12, "small")
    for milliseconds in range(0, area.top_milliseconds + 1, 5):
        y = area.y(milliseconds)
        rule(root, (area.left, y), (area.right, y), "axis" if milliseconds == 0 else "grid")
        put_text(root, f"{milliseconds}", area.left - 8, y + 4, "", "end")
    for context in area.ticks:
        x = area.x(context)
        rule(root, (x, BOTTOM), (x, BOTTOM + 5), "axis")
        put_text(root, short_number(context), x, BOTTOM + 20, "", "middle")
    put_text(root, "context, tokens (K = 1,024)", (area.left + area.right) / 2, BOTTOM + 42, "", "middle")
    middle = f"rotate(-90 {area.left - 40} {(TOP + BOTTOM) / 2:g})"
    axis = put_text(root, "milliseconds per step", area.left - 40, (TOP + BOTTOM) / 2, "", "middle")
    axis.set("transform", middle)


def _line(root: ElementTree.Element, area: Area, line: Sequence[Point], colour: int) -> None:
    places = [(area.x(point.context), area.y(point.milliseconds)) for point in line]
    element(root, "polyline", {"class": f"line s{colour}", "points": " ".join(f"{x:g},{y:g}" for x, y in places)})
    for point, (x, y) in zip(line, places, strict=True):
        marker = element(root, "circle", {"class": f"f{colour}", "cx": f"{x:g}", "cy": f"{y:g}", "r": "3.4"})
        element(marker, "title", text=caption(point))


def caption(point: Point) -> str:
    """A point in words: what a browser shows when the mouse is over it."""
    ratio = "" if point.ratio is None else f", {point.ratio:.3f} × full"
    return f"{point.method}, {point.context:,} tokens: {point.milliseconds:.3f} ms{ratio}"


def _labels(root: ElementTree.Element, area: Area, panel: Panel, methods: Sequence[str]) -> None:
    """Name, time and ratio of each line's last point, to the right of the area."""
    ends = [line[-1] for line in panel.lines.values()]
    heights = spread([area.y(point.milliseconds) for point in ends], LABEL_DISTANCE)
    for point, height in zip(ends, heights, strict=True):
        colour, y = methods.index(point.method), area.y(point.milliseconds)
        start = (area.x(point.context) + 5, y)
        middle, end = (area.right + 12, round(height, 1)), (area.right + 18, round(height, 1))
        points = " ".join(f"{x:g},{y:g}" for x, y in (start, middle, end))
        element(root, "polyline", {"class": f"leader s{colour}", "points": points})
        ratio = "" if point.ratio is None or point.method == methods[0] else f", {point.ratio:.2f} ×"
        put_text(
            root, f"{point.method} {point.milliseconds:.1f} ms{ratio}", area.right + 22, height + 4, f"label t{colour}"
        )


def _ratios(root: ElementTree.Element, area: Area, panel: Panel, chart: Chart) -> None:
    """The baseline and the first other method at 128K tokens: a dashed line down to a sentence, below all lines."""
    baseline = {point.context: point for point in panel.lines[chart.baseline]}
    for point in panel.lines.get(chart.methods[1], ()):
        other = baseline.get(point.context)
        if point.context == MARKED_CONTEXT and other is not None and point.ratio is not None:
            x, height = area.x(point.context), BOTTOM - 12
            rule(root, (x, area.y(other.milliseconds)), (x, height - 14), "gap")
            share = (x - area.left) / PANEL_WIDTH
            anchor = "start" if share < 0.35 else "end" if share > 0.65 else "middle"
            times = f"{chart.baseline} {other.milliseconds:.1f} ms, {point.method} {point.milliseconds:.1f} ms"
            put_text(root, f"{short_number(point.context)}: {times}, {point.ratio:.2f} ×", x, height, "label", anchor)
