"""What kvseek's charts are drawn with: an SVG's frame, texts, rules and colours.

Drawn by hand because the repository holds the pictures and tests compare them byte for byte: a plotting library writes other
bytes with each of its versions, and cannot follow the reader's light or dark mode. Lengths are SVG user units, 1 px unscaled.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

from kvseek.core.command_line import tells_errors

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


def picture(width: int, height: int, title: str, description: str, files: Sequence[str]) -> ElementTree.Element:
    """An empty picture. `description` is for readers who do not see it; `files`, its sources, go into its metadata."""
    size = {"width": f"{width}", "height": f"{height}", "viewBox": f"0 0 {width} {height}"}
    root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", **size})
    element(root, "title", text=title)
    element(root, "desc", text=description)
    element(root, "metadata", text=" ".join(files))
    element(root, "style", text=_style())
    element(root, "rect", {"class": "ground", "width": f"{width}", "height": f"{height}"})
    return root


def written(root: ElementTree.Element) -> str:
    """The SVG's text; the same picture gives the same bytes."""
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _style() -> str:
    light = STYLE.format(ink="#1f2328", faint="#59636e", ground="#ffffff", grid="#e3e7ec") + _colours(LIGHT)
    dark = STYLE.format(ink="#e6edf3", faint="#9aa4af", ground="#0d1117", grid="#262c34") + _colours(DARK)
    return f"{light}\n    @media (prefers-color-scheme: dark) {{{dark}\n    }}\n  "


def _colours(colours: Sequence[str]) -> str:
    return "".join(
        f"\n    .s{index} {{ stroke: {colour}; }} .f{index}, text.t{index} {{ fill: {colour}; }}"
        for index, colour in enumerate(colours)
    )


def short_number(count: int) -> str:
    """Multiples of 1,024 as so many K, other numbers as they are."""
    return f"{count:,}" if count % 1024 else f"{count // 1024}K"


def round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... (or 0.1, 0.2, ...) that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * 0.999)


def rule(root: ElementTree.Element, start: tuple[float, float], end: tuple[float, float], kind: str) -> None:
    """Draw a straight line of a class of the style sheet."""
    (x1, y1), (x2, y2) = start, end
    element(root, "line", {"class": kind, "x1": f"{x1:g}", "y1": f"{y1:g}", "x2": f"{x2:g}", "y2": f"{y2:g}"})


def put_text(
    root: ElementTree.Element, text: str, x: float, y: float, kind: str, anchor: str = "start"
) -> ElementTree.Element:
    """Write a text whose base line is at `y`."""
    return element(root, "text", {"class": kind, "x": f"{x:g}", "y": f"{round(y, 1):g}", "text-anchor": anchor}, text)


def element(
    parent: ElementTree.Element, tag: str, attributes: dict[str, str] | None = None, text: str | None = None
) -> ElementTree.Element:
    """Add an element to another one."""
    added = ElementTree.SubElement(parent, tag, attributes or {})
    added.text = text
    return added


@tells_errors
def draw_command(
    argv: Sequence[str] | None, description: str, draw: Callable[[Sequence[Path]], tuple[str, str]]
) -> int:
    """Write the picture of the result files that the flags name; returns 0, or 1 where they do not make one.

    `draw` returns the SVG's text, and what is printed of it.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="result files")
    parser.add_argument("--output", type=Path, required=True, help="the SVG")
    arguments = parser.parse_args(argv)
    text, printed = draw(arguments.results)
    arguments.output.write_text(text, encoding="utf-8")
    print(*filter(None, (printed, arguments.output)), sep="\n\n")
    return 0
