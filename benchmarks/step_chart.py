"""An SVG of step times by context: panels side by side, a line and a label for each method.

Drawn by hand because the repository holds the picture and a test compares it byte for byte: a plotting library writes other
bytes with each of its versions, and cannot follow the reader's light or dark mode. Lengths are SVG user units, 1 px unscaled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

WIDTH, HEIGHT = 1040, 430
TOP, BOTTOM = 84, 326  # of the plotted areas
LEFTS, PANEL_WIDTH = (66, 584), 264  # of the plotted areas; labels stand to the right of each
MARKED_CONTEXT = 131_072  # where the ratio is written out
LABEL_DISTANCE = 17  # between the lines of two labels
# Colours of Okabe and Ito, which readers who do not see all colours can tell apart; lighter ones on a dark ground.
LIGHT = ("#454b54", "#0072b2", "#d55e00", "#00805f", "#a8487d", "#7a5c00")
DARK = ("#b6bec9", "#56b4e9", "#ff9a4d", "#3ecfa5", "#e58fc0", "#e6c34a")
STYLE = """
    text {{ font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: {ink}; }}
    .title {{ font-size: 16px; font-weight: 600; }}
    .heading {{ font-weight: 600; }}
    .label {{ font-size: 12px; }}
    .small {{ font-size: 11px; fill: {faint}; }}
    .ground {{ fill: {ground}; }}
    .grid {{ stroke: {grid}; stroke-width: 1; }}
    .axis {{ stroke: {faint}; stroke-width: 1; }}
    .gap {{ stroke: {faint}; stroke-width: 1; stroke-dasharray: 3 3; }}
    .line {{ fill: none; stroke-width: 2.2; stroke-linejoin: round; }}
    .leader {{ fill: none; stroke-width: 0.8; opacity: 0.6; }}"""


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
    size = {"width": f"{WIDTH}", "height": f"{HEIGHT}", "viewBox": f"0 0 {WIDTH} {HEIGHT}"}
    root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", **size})
    _child(root, "title", text=chart.title)
    _child(root, "desc", text=description(chart))
    _child(root, "metadata", text=" ".join(chart.files))
    _child(root, "style", text=_style())
    _child(root, "rect", {"class": "ground", "width": f"{WIDTH}", "height": f"{HEIGHT}"})
    _text(root, chart.title, LEFTS[0] - 40, 26, "title")
    for panel, left in zip(chart.panels, LEFTS, strict=False):
        area = Area(chart, left)
        _axes(root, area, panel)
        for method, line in panel.lines.items():
            _line(root, area, line, chart.methods.index(method))
        _labels(root, area, panel, chart.methods)
        if len(chart.methods) > 1:
            _ratios(root, area, panel, chart)
    for index, words in enumerate(reversed(chart.source)):
        _text(root, words, LEFTS[0] - 40, HEIGHT - 12 - 16 * index, "small")
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def description(chart: Chart) -> str:
    """Every point in words, for readers who do not see the picture."""
    sentences = []
    for panel in chart.panels:
        for method, line in panel.lines.items():
            times = ", ".join(f"{_tokens(point.context)} {point.milliseconds:.2f} ms" for point in line)
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
    _text(root, panel.heading, area.left, TOP - 28, "heading")
    _text(root, panel.note, area.left, TOP - 12, "small")
    for milliseconds in range(0, area.top_milliseconds + 1, 5):
        y = area.y(milliseconds)
        _rule(root, (area.left, y), (area.right, y), "axis" if milliseconds == 0 else "grid")
        _text(root, f"{milliseconds}", area.left - 8, y + 4, "", "end")
    for context in area.ticks:
        x = area.x(context)
        _rule(root, (x, BOTTOM), (x, BOTTOM + 5), "axis")
        _text(root, _tokens(context), x, BOTTOM + 20, "", "middle")
    _text(root, "context, tokens (K = 1,024)", (area.left + area.right) / 2, BOTTOM + 42, "", "middle")
    middle = f"rotate(-90 {area.left - 40} {(TOP + BOTTOM) / 2:g})"
    axis = _text(root, "milliseconds per step", area.left - 40, (TOP + BOTTOM) / 2, "", "middle")
    axis.set("transform", middle)


def _line(root: ElementTree.Element, area: Area, line: Sequence[Point], colour: int) -> None:
    places = [(area.x(point.context), area.y(point.milliseconds)) for point in line]
    _child(root, "polyline", {"class": f"line s{colour}", "points": " ".join(f"{x:g},{y:g}" for x, y in places)})
    for point, (x, y) in zip(line, places, strict=True):
        marker = _child(root, "circle", {"class": f"f{colour}", "cx": f"{x:g}", "cy": f"{y:g}", "r": "3.4"})
        _child(marker, "title", text=caption(point))


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
        _child(root, "polyline", {"class": f"leader s{colour}", "points": points})
        ratio = "" if point.ratio is None or point.method == methods[0] else f", {point.ratio:.2f} ×"
        _text(
            root, f"{point.method} {point.milliseconds:.1f} ms{ratio}", area.right + 22, height + 4, f"label t{colour}"
        )


def _ratios(root: ElementTree.Element, area: Area, panel: Panel, chart: Chart) -> None:
    """The baseline and the first other method at 128K tokens: a dashed line down to a sentence, below all lines."""
    baseline = {point.context: point for point in panel.lines[chart.baseline]}
    for point in panel.lines.get(chart.methods[1], ()):
        other = baseline.get(point.context)
        if point.context == MARKED_CONTEXT and other is not None and point.ratio is not None:
            x, height = area.x(point.context), BOTTOM - 12
            _rule(root, (x, area.y(other.milliseconds)), (x, height - 14), "gap")
            share = (x - area.left) / PANEL_WIDTH
            anchor = "start" if share < 0.35 else "end" if share > 0.65 else "middle"
            times = f"{chart.baseline} {other.milliseconds:.1f} ms, {point.method} {point.milliseconds:.1f} ms"
            _text(root, f"{_tokens(point.context)}: {times}, {point.ratio:.2f} ×", x, height, "label", anchor)


def _style() -> str:
    light = STYLE.format(ink="#1f2328", faint="#59636e", ground="#ffffff", grid="#e3e7ec") + _colours(LIGHT)
    dark = STYLE.format(ink="#e6edf3", faint="#9aa4af", ground="#0d1117", grid="#262c34") + _colours(DARK)
    return f"{light}\n    @media (prefers-color-scheme: dark) {{{dark}\n    }}\n  "


def _colours(colours: Sequence[str]) -> str:
    return "".join(
        f"\n    .s{index} {{ stroke: {colour}; }} .f{index}, text.t{index} {{ fill: {colour}; }}"
        for index, colour in enumerate(colours)
    )


def _tokens(count: int) -> str:
    return f"{count:,}" if count % 1024 else f"{count // 1024}K"


def _rule(root: ElementTree.Element, start: tuple[float, float], end: tuple[float, float], kind: str) -> None:
    (x1, y1), (x2, y2) = start, end
    _child(root, "line", {"class": kind, "x1": f"{x1:g}", "y1": f"{y1:g}", "x2": f"{x2:g}", "y2": f"{y2:g}"})


def _text(
    root: ElementTree.Element, text: str, x: float, y: float, kind: str, anchor: str = "start"
) -> ElementTree.Element:
    return _child(root, "text", {"class": kind, "x": f"{x:g}", "y": f"{round(y, 1):g}", "text-anchor": anchor}, text)


def _child(
    parent: ElementTree.Element, tag: str, attributes: dict[str, str] | None = None, text: str | None = None
) -> ElementTree.Element:
    child = ElementTree.SubElement(parent, tag, attributes or {})
    child.text = text
    return child
