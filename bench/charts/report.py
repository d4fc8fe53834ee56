"""One self-contained HTML page of result files: what methods lose by budget, and what their steps take.

    kvseek evaluate report RESULT.json ... --html PAGE.html

Takes results of `kvseek evaluate perplexity` and `tasks`, and of `kvseek bench` on a CPU or a GPU. Every figure is a row with the
file and the place in it that it was read from, machine, commit and fingerprint; marks of pictures lead to their rows. The page
has no scripts and asks no network: the rows are downloaded from links that hold them.
"""

from __future__ import annotations

import argparse
import base64
import csv
import html
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from kvseek.bench.accuracy.perplexity import PARTS
from kvseek.bench.accuracy.tasks import Z_95, by_depth, wilson
from kvseek.bench.output import ResultError, as_text, progress, read_result
from kvseek.core.errors import ConfigError

from .svg import LIGHT, element, picture, put_text, round_step, rule, short_number, written

WIDTH, LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT, LINE = 820, 70, 56, 500, 260, 18
PERPLEXITY, DRIFT, ANSWERS, DEPTH, SPEED = "perplexity", "drift", "answers", "depth", "speed"
UNITS = {PERPLEXITY: "%", DRIFT: "%", ANSWERS: "% exact", DEPTH: "% of parts", SPEED: "× full"}
Document = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """A measured figure and where it is from.

    Attributes
    ----------
    group : str
        What it may be compared within: model, texts and sizes, or the task.
    rows : int, optional
        Rows that a step selects for each KV head; None where the method has no such number or the file does not tell it.
    at : float
        Tokens that a step attended to (of `drift` the part of the steps, of `depth` the share of the context before the needle).
    low, high : float, optional
        The 95 % interval.
    file, place : str
        The result file's name, and the keys that lead to the figure in it.
    """

    kind: str
    group: str
    method: str
    rows: int | None
    context: int
    at: float
    value: float
    low: float | None
    high: float | None
    file: str
    place: str
    fingerprint: str | None
    commit: str
    machine: str


def _machine(document: Document) -> tuple[str, str]:
    """Commit and machine of a document, of several all."""
    machines = document.get("machines") or [document["machine"]]
    gpus = (machine.get("gpu") or document.get("gpu") or {"name": machine["cpu"]} for machine in machines)
    commits = [str(document["code"])] if "code" in document else [str(machine["commit"]) for machine in machines]
    return ", ".join(dict.fromkeys(commits)), ", ".join(dict.fromkeys(str(gpu["name"]) for gpu in gpus))


def _rows(name: str, settings: Document | None) -> int | None:
    """The `top_k` of a method: as the file has recorded it, else as its name says."""
    if settings is not None:
        return settings.get("top_k")
    named = [part.rpartition("=")[2] for part in name.replace(":", ",").split(",") if part.startswith("top_k=")]
    return int(named[0]) if named else None


def _perplexities(document: Document, common: Document) -> Iterator[Figure]:
    context = document["prompt_tokens"]
    group = f"{document['model']}, {document['tokens']} tokens behind {context:,}"
    for number, entry in enumerate(document["results"]):
        own: Document = {
            "method": entry["name"],
            "rows": _rows(entry["name"], entry.get("settings")),
            "context": context,
        }
        own |= {**common, "fingerprint": entry.get("fingerprint")}
        texts = [("all texts", entry, f"results.{number}")]
        texts += [
            (name.replace(":", "/").rpartition("/")[2], text, f"results.{number}.by_text.{place}")
            for place, (name, text) in enumerate(zip(document["texts"], entry["by_text"], strict=True))
        ]
        for name, text, place in texts:
            spread = Z_95 * text["error"]
            ends: Document = {
                "low": text["percent"] - spread,
                "high": text["percent"] + spread,
                "place": f"{place}.percent",
            }
            at = entry["attended_tokens"]
            yield Figure(PERPLEXITY, f"{group}: {name}", at=at, value=text["percent"], **ends, **own)
        for part, percent in enumerate(entry["by_part"]):
            place = f"results.{number}.by_part.{part}"
            yield Figure(DRIFT, group, at=part + 1, value=percent, low=None, high=None, place=place, **own)


def _answers(document: Document, common: Document) -> Iterator[Figure]:
    depths = document["settings"].get("depths", 1)
    for number, cell in enumerate(document["cells"]):
        engine, questions = cell["engine"], sum(map(len, cell["right"]))
        config = document["engines"].get(engine, {})
        own: Document = {
            "method": engine,
            "rows": _rows(engine, config.get("method_config")),
            "context": cell["length"],
        }
        own |= {**common, "fingerprint": document.get("fingerprints", {}).get(engine)}
        exact = "".join(cell["right"]).count("1") / questions
        low, high = (100 * end for end in wilson(exact, len(cell["right"])))
        at = cell["attended_share"] * cell["length"]
        group = f"{cell['task']}, {cell['length']:,} tokens"
        ends: Document = {"low": low, "high": high, "place": f"cells.{number}.right"}
        yield Figure(ANSWERS, group, at=at, value=100 * exact, **ends, **own)
        if cell["task"] == "niah_single" and depths > 1:
            for depth, part in enumerate(by_depth(cell["parts"], depths)):
                none: Document = {"low": None, "high": None, "place": f"cells.{number}.parts"}
                yield Figure(DEPTH, engine, at=depth / (depths - 1), value=100 * part, **none, **own)


def _device_steps(document: Document, common: Document) -> Iterator[Figure]:
    for phase_number, phase in enumerate(document["phases"]):
        for cell_number, cell in enumerate(phase["cells"]):
            for number, entry in enumerate(cell["results"]):
                if cell["batch"] != 1 or entry["to_baseline"] is None:
                    continue
                place = f"phases.{phase_number}.cells.{cell_number}.results.{number}"
                recorded = document["methods"].get(entry["method"], {}).get("settings")
                hot = ", hot rows" if entry["hot_rows"] else ""
                group = f"{document['shape']}, {cell['context']:,} tokens, offload {phase['offload']}{hot}"
                yield _speed(entry, entry["method"], recorded, group, cell["context"], place, common)


def _cpu_steps(document: Document, common: Document) -> Iterator[Figure]:
    for part_number, part in enumerate(document["contexts"]):
        for number, entry in enumerate(part["results"]):
            place = f"contexts.{part_number}.results.{number}"
            if entry["to_baseline"] is not None and not entry["reference"]:
                group = f"{document['model']}, {part['context']:,} tokens"
                yield _speed(entry, entry["name"], entry.get("settings"), group, part["context"], place, common)


def _speed(
    entry: Document, name: str, settings: Document | None, group: str, context: int, place: str, common: Document
) -> Figure:
    rows, at = _rows(name, settings), entry["attended_tokens"]
    ends: Document = {"low": None, "high": None, "place": f"{place}.to_baseline", "fingerprint": None}
    return Figure(SPEED, group, name, rows, context, at, entry["to_baseline"], **ends, **common)


READERS = {  # by what a result file says that it is
    "perplexity": _perplexities,
    "tasks": _answers,
    "needle": _answers,  # as files of `tasks` were called
    "device": _device_steps,
    "decode": _cpu_steps,
}


def figures(paths: Iterable[Path]) -> list[Figure]:
    """All figures of result files; raises ResultError for a file of another command."""
    found = list[Figure]()
    for path in paths:
        document = read_result(path)
        kind = document.get("evaluation") or document.get("benchmark")
        if kind not in READERS or (kind == "device" and document.get("mode") != "decode"):
            raise ResultError(f"{path}: is of {kind}: must be of {', '.join(READERS)} (decode steps); leave it out")
        commit, machine = _machine(document)
        found += READERS[kind](document, {"file": path.name, "commit": commit, "machine": machine})
    return found


@dataclass(frozen=True)
class Mark:
    """A point of a picture: its place, its interval upwards, what it says, and the number of the row that it leads to."""

    x: float
    y: float
    low: float | None
    high: float | None
    words: str
    row: int


@dataclass(frozen=True)
class Plot:
    """Lines of marks, by what they are called; `logarithmic` is about the axis to the right."""

    title: str
    below: str
    beside: str
    lines: dict[str, list[Mark]]
    logarithmic: bool = True


def _scale(low: float, high: float, start: float, length: float, logarithmic: bool = False) -> Any:
    turned = math.log2 if logarithmic else float
    ends = turned(low), turned(high)
    return lambda value: round(start + (turned(value) - ends[0]) / ((ends[1] - ends[0]) or 1) * length, 1)


def draw(plot: Plot, files: Sequence[str]) -> ElementTree.Element:
    """The picture of a plot, with what its lines are called beside it."""
    marks = [mark for line in plot.lines.values() for mark in line]
    height = max(TOP + PLOT_HEIGHT + 56, TOP + LINE * (len(plot.lines) + 1))
    words = " ".join(f"{mark.words}." for mark in marks)
    root = picture(WIDTH, height, f"{plot.title}: {plot.beside}", words, files)
    put_text(root, plot.title, LEFT - 44, 24, "title")
    put_text(root, plot.beside, LEFT, TOP - 12, "heading")
    values = [value for mark in marks for value in (mark.y, mark.low, mark.high) if value is not None]
    step = round_step((max(values) - min(values)) / 5 or 1)
    low, high = math.floor(min(values) / step), math.ceil(max(values) / step)
    high += low == high
    y = _scale(low * step, high * step, TOP + PLOT_HEIGHT, -PLOT_HEIGHT)
    xs = sorted({mark.x for mark in marks})
    x = _scale(xs[0], xs[-1], LEFT + 16, PLOT_WIDTH - 32, plot.logarithmic)
    for tick in range(low, high + 1):
        at = y(tick * step)
        rule(root, (LEFT, at), (LEFT + PLOT_WIDTH, at), "grid" if tick else "axis")
        put_text(root, f"{round(tick * step, 6):g}", LEFT - 8, at + 4, "", "end")
    shown = -math.inf
    for number in xs:
        if x(number) - shown >= 44:  # numbers that do not lie on each other
            shown = x(number)
            put_text(
                root, short_number(round(number)) if number >= 10 else f"{number:.2g}", shown, height - 34, "", "middle"
            )
    put_text(root, plot.below, LEFT + PLOT_WIDTH / 2, height - 12, "", "middle")
    for place, (name, line) in enumerate(plot.lines.items()):
        colour = place % len(LIGHT)
        ordered = sorted(line, key=lambda mark: mark.x)
        dashes = {"stroke-dasharray": "5 4"} if place >= len(LIGHT) else {}
        points = " ".join(f"{x(mark.x):g},{y(mark.y):g}" for mark in ordered)
        element(root, "polyline", {"class": f"line s{colour}", "points": points, **dashes})
        for mark in ordered:
            left = x(mark.x)
            if mark.low is not None and mark.high is not None:
                rule(root, (left, y(mark.low)), (left, y(mark.high)), f"line s{colour}")
            link = element(root, "a", {"href": f"#row-{mark.row}"})
            circle = element(
                link, "circle", {"class": f"f{colour}", "cx": f"{left:g}", "cy": f"{y(mark.y):g}", "r": "4"}
            )
            element(circle, "title", text=mark.words)
        put_text(root, name, LEFT + PLOT_WIDTH + 20, TOP + LINE * place, f"label t{colour}")
    return root


def draw_map(title: str, cells: dict[tuple[int, float], Mark], files: Sequence[str]) -> ElementTree.Element:
    """A map of an engine: contexts by the depth of the needle; the fuller a square, the more was right."""
    contexts, depths = sorted({key[0] for key in cells}), sorted({key[1] for key in cells})
    side, height = 44, TOP + 44 * len(contexts) + 56
    root = picture(WIDTH, height, title, " ".join(f"{mark.words}." for mark in cells.values()), files)
    put_text(root, title, LEFT - 44, 24, "title")
    for row, context in enumerate(contexts):
        y = TOP + side * row
        put_text(root, f"{context:,}", LEFT + 20, y + 26, "", "end")
        for column, depth in enumerate(depths):
            if (context, depth) not in cells:
                continue
            mark, x = cells[context, depth], LEFT + 30 + side * column
            link = element(root, "a", {"href": f"#row-{mark.row}"})
            size = {"x": f"{x}", "y": f"{y}", "width": f"{side - 2}", "height": f"{side - 2}"}
            square = element(link, "rect", {"class": "f1", "fill-opacity": f"{0.08 + mark.y / 125:.2f}", **size})
            element(square, "title", text=mark.words)
            put_text(link, f"{mark.y:.0f}", x + 21, y + 26, "label", "middle")
    for column, depth in enumerate(depths):
        put_text(root, f"{100 * depth:.0f} %", LEFT + 51 + side * column, TOP + side * len(contexts) + 16, "", "middle")
    put_text(root, "tokens by depth of the needle; right parts in %", LEFT - 44, height - 12, "small")
    return root


def _words(one: Figure) -> str:
    ends = "" if one.low is None else f" [{one.low:.4g}, {one.high:.4g}]"
    return f"{one.group}, {one.method}, {one.at:,.4g}: {one.value:.4g} {UNITS[one.kind]}{ends}"


def _mark(number: int, one: Figure) -> Mark:
    return Mark(one.at, one.value, one.low, one.high, _words(one), number)


def plots(found: Sequence[Figure]) -> Iterator[tuple[str, ElementTree.Element]]:
    """The section of each picture, and the picture."""
    sections = (
        (
            PERPLEXITY,
            "Perplexity by budget",
            "tokens that a step attends to",
            "rise of perplexity over the first engine's, %",
        ),
        (DRIFT, "Drift", f"part of the steps, of {PARTS}", "rise of perplexity over the first engine's, %"),
        (ANSWERS, "Answers by budget", "tokens that a step attends to", "exact answers, %"),
        (SPEED, "Speed", "tokens that a step attends to", "time of a step, × full"),
    )
    for kind, title, below, beside in sections:
        groups: dict[str, list[tuple[int, Figure]]] = {}
        for number, one in enumerate(found):
            if one.kind == kind:
                groups.setdefault(one.group, []).append((number, one))
        for group, members in groups.items():
            lines: dict[str, list[Mark]] = {}
            for number, one in members:
                name = one.method if kind == DRIFT else one.method.partition(":")[0]
                lines.setdefault(name, []).append(_mark(number, one))
            files = list(dict.fromkeys(one.file for _, one in members))
            yield title, draw(Plot(group, below, beside, lines, kind != DRIFT), files)
    engines: dict[str, dict[tuple[int, float], Mark]] = {}
    for number, one in enumerate(found):
        if one.kind == DEPTH:
            engines.setdefault(one.method, {})[one.context, one.at] = _mark(number, one)
    for name, cells in engines.items():
        yield "Map by depth and length", draw_map(f"niah_single, {name}", cells, [])
    yield from frontiers(found)


def frontiers(found: Sequence[Figure]) -> Iterator[tuple[str, ElementTree.Element]]:
    """Speed against perplexity: a figure of each, joined where method and rows are equal, at each context that was timed."""
    losses: dict[tuple[str, int], Figure] = {}
    for one in found:
        if one.kind == PERPLEXITY and one.group.endswith(": all texts") and one.rows is not None:
            losses.setdefault((one.method.partition(":")[0], one.rows), one)
    groups: dict[str, dict[str, list[Mark]]] = {}
    files: dict[str, dict[str, None]] = {}
    for number, one in enumerate(found):
        name = one.method.partition(":")[0]
        loss = losses.get((name, one.rows)) if one.kind == SPEED and one.rows is not None else None
        plain = "weight_only" not in one.method and ":paper" not in one.method
        if loss is not None and plain:
            words = f"{name}, {one.rows} rows: {one.value:.3g} × full at {one.context:,} tokens; {_words(loss)}"
            mark = Mark(one.value, loss.value, loss.low, loss.high, words, number)
            groups.setdefault(one.group, {}).setdefault(f"{name}, {one.rows} rows", []).append(mark)
            files.setdefault(one.group, {}).update(dict.fromkeys((one.file, loss.file)))
    for group, lines in groups.items():
        plot = Plot(group, "time of a step, × full", "rise of perplexity, %", lines, logarithmic=False)
        yield "Speed and accuracy", draw(plot, list(files[group]))


STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --ground: #ffffff; --faint: #59636e; --link: #0059a3; --grid: #e3e7ec; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --ground: #0d1117; --faint: #9aa4af; --link: #6cb6ff; --grid: #262c34; }
}
body { margin: 0 auto; max-width: 60rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; }
body { color: var(--ink); background: var(--ground); }
a { color: var(--link); }
figure, .table { margin: 1rem 0; overflow-x: auto; }
figure svg { max-width: 100%; min-width: 34rem; height: auto; }
table { border-collapse: collapse; font-size: .8rem; white-space: nowrap; }
th, td { padding: .2rem .6rem; text-align: left; border-bottom: 1px solid var(--grid); }
tr:target { outline: 2px solid var(--link); }
p.note { color: var(--faint); }
"""


def page(found: Sequence[Figure]) -> str:
    """The page's text; the same figures give the same bytes."""
    rows = [{"row": number, **asdict(one), "unit": UNITS[one.kind]} for number, one in enumerate(found)]
    sheet = io.StringIO()
    writer = csv.DictWriter(sheet, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    body = list[str]()
    last = ""
    for section, drawn in plots(found):
        if section != last:
            body.append(f"<h2>{html.escape(section)}</h2>")
            last = section
        body.append(f"<figure>{written(drawn)}</figure>")
    machines = dict.fromkeys(f"{one.file}: {one.machine}, commit {one.commit}" for one in found)
    listed = "".join(f"<li>{html.escape(line)}</li>" for line in machines)
    head = "".join(f"<th>{name}</th>" for name in rows[0])
    lines = "".join(
        f'<tr id="row-{row["row"]}">'
        + "".join(f"<td>{html.escape(_cell(value))}</td>" for value in row.values())
        + "</tr>"
        for row in rows
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>What kvseek's methods lose, and what their steps take</title>
<style>{STYLE}</style>
</head>
<body>
<h1>What kvseek's methods lose, and what their steps take</h1>
<p>Bars are 95 % intervals. A mark leads to its row in the <a href="#rows">table</a>, which names file, place, commit and machine.
<a download="report.csv" href="{_link("text/csv", sheet.getvalue())}">Rows as CSV</a>,
<a download="report.json" href="{_link("application/json", as_text({"rows": rows}))}">as JSON</a>.</p>
<ul>{listed}</ul>
{"".join(body)}
<h2 id="rows">Rows</h2>
<p class="note">No fingerprint: the file has none. No rows: the method has no such number, or the file does not tell it.</p>
<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>
</body>
</html>
"""


def _link(kind: str, text: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `kvseek evaluate report`."""
    parser.add_argument("results", nargs="+", type=Path, help="result files of kvseek evaluate and kvseek bench")
    parser.add_argument("--html", type=Path, required=True, help="the page")


def read(arguments: argparse.Namespace) -> None:
    """Check the flags; raises ConfigError where two files have one name, by which rows name them."""
    names = [path.name for path in arguments.results]
    if len(set(names)) < len(names):
        raise ConfigError(f"results = {', '.join(names)}: must have different names; rename one")


def run(arguments: argparse.Namespace) -> Document:
    """Write the page; the document has its rows."""
    found = figures(arguments.results)
    if not found:
        raise ResultError(f"{arguments.results[0]}: has no figure to show; measure one")
    arguments.html.write_text(page(found), encoding="utf-8")
    progress(f"{arguments.html}: {len(found)} figures")
    return {"evaluation": "report", "rows": [asdict(one) for one in found]}


def print_report(document: Document) -> None:
    """Print what is on the page, by kind."""
    for kind, unit in UNITS.items():
        count = sum(row["kind"] == kind for row in document["rows"])
        print(f"{kind}: {count} figures, {unit}")
