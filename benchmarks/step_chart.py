"""An SVG of step times: a group of bars for each context, in it a bar for each method and place of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from .svg import element, picture, put_text, written

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
    def caption(self) -> str:
        """What stands beside the bar."""
        return f"{self.milliseconds:.1f} ms" + ("" if self.ratio is None else f", {self.ratio:.2f} ×")

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


def draw(chart: Chart) -> str:
    """The SVG's text; the same chart gives the same bytes."""
    bars = chart.bars
    groups, methods = ({key(bar) for bar in bars} for key in (_group, _method))
    height = TOP + len(groups) * GROUP_GAP + (len(methods) - len(groups)) * METHOD_GAP + len(bars) * BAR + BOTTOM
    root = picture(WIDTH, height, chart.title, " ".join(f"{bar.words}." for bar in bars), chart.files)
    put_text(root, chart.title, 24, 28, "title")
    places = list(dict.fromkeys(bar.place for bar in bars))
    for number, place in enumerate(places):
        _box(root, number, (24 + 220 * number, 44), BAR)
        put_text(root, f"keys and values {place}", 42 + 220 * number, 55, "label")
    scale, y, before = LONGEST_BAR / max(bar.milliseconds for bar in bars), float(TOP), None
    for bar in bars:
        if before is None or _group(bar) != _group(before):
            y += GROUP_GAP
            put_text(root, f"{bar.context:,} tokens", 24, y - 8, "heading")
        elif _method(bar) != _method(before):
            y += METHOD_GAP
        if before is None or _method(bar) != _method(before):
            put_text(root, bar.method, LEFT - 10, y + BAR - 2, "label", "end")
        length = round(bar.milliseconds * scale, 1)
        _box(root, places.index(bar.place), (LEFT, y), length, bar.words)
        put_text(root, bar.caption, LEFT + length + 6, y + BAR - 3, "label")
        y, before = y + BAR, bar
    for number, words in enumerate(reversed(chart.source)):
        put_text(root, words, 24, height - 12 - 16 * number, "small")
    return written(root)


def _group(bar: Bar) -> int:
    return bar.context


def _method(bar: Bar) -> tuple[int, str]:
    return bar.context, bar.method


def _box(
    root: ElementTree.Element, colour: int, corner: Sequence[float], width: float, words: str | None = None
) -> None:
    x, y = corner
    size = {"width": f"{width:g}", "height": f"{BAR - 2}"}
    box = element(root, "rect", {"class": f"f{colour + 1}", "x": f"{x:g}", "y": f"{y:g}", **size})
    if words is not None:  # what a browser shows when the mouse is over it
        element(box, "title", text=words)
