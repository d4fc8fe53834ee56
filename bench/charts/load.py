"""Draw a load test's result as an SVG.

    python -m kvseek.bench.charts.load RESULT.json --output PICTURE.svg

Panels of throughput, time to first token and time per output token: of bench/load/main.py by concurrency and by the prompt's
length, a colour for each tool; of bench/load/served.py a row for each load, a colour for each method. A full line is the median,
a dashed one the 99th percentile. Axes are logarithmic, but for those of throughput and of the time per output token upwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from kvseek.bench.load.report import SERVER, captions
from kvseek.bench.output import ResultError, read_result

from .lines import Line, Mark, Panel, polyline
from .svg import draw_command, picture, put_text, written

WIDTH, HEAD, ROW, FOOT = 1040, 100, 270, 16
LEFTS, PANEL_WIDTH, PANEL_HEIGHT = (70, 410, 750), 250, 180
BENCHMARKS = ("load", "served")
QUANTITIES = (  # of the columns: heading, key of a result, scale, percentiles, whether the axis is logarithmic
    ("output tokens per second", "tokens_per_second", 1, ("",), False),
    ("time to first token, s", "ttft_seconds", 1, ("p50", "p99"), True),
    ("time per output token, ms", "tpot_seconds", 1e3, ("p50", "p99"), False),
)
NAMES = {"p50": "median", "p99": "p99"}


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
    for number, (name, tool) in enumerate(product(("p50", "p99"), colours)):
        left = LEFTS[0] + 200 * number
        polyline(root, [(left, 50), (left + 26, 50)], Line((), colours[tool], name == "p99"))
        put_text(root, f"{tool}, {NAMES[name]}", left + 32, 54, f"label t{colours[tool]}")
    for place, row in enumerate(rows):
        for (heading, quantity, scale, names, logarithmic), left in zip(QUANTITIES, LEFTS, strict=True):
            drawn = []
            for tool, name in product(dict.fromkeys(result[row.line] for result in row.results), names):
                own = [result for result in row.results if result[row.line] == tool]
                values = [(r[row.over], scale * (r[quantity][name] if name else r[quantity])) for r in own]
                least = min(value for _, value in values)
                if least <= 0:
                    raise ResultError(f"a result of {least}: must be > 0; measure again")
                marks = [
                    Mark(x, value, " ".join(filter(None, (tool, name, f"{x:,}: {value:.4g}")))) for x, value in values
                ]
                drawn.append(Line(marks, colours[tool], name == "p99"))
            panel = Panel(heading, row.below, drawn, log_y=logarithmic, zero=True)
            panel.draw(root, left, HEAD + ROW * place, PANEL_WIDTH, PANEL_HEIGHT)
    for number, words in enumerate((*captions(document), f"From {file}")):
        put_text(root, words, LEFTS[0] - 44, height - 44 + 16 * number, "small")
    return written(root)


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
