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
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from kvseek.bench.accuracy.perplexity import PARTS, by_part, losses_of, paired
from kvseek.bench.accuracy.tasks import SAMPLES, Z_95, by_depth, wilson
from kvseek.bench.output import ResultError, as_text, progress, read_result
from kvseek.bench.variants import parse_variants
from kvseek.core.errors import ConfigError

from .lines import Line, Mark, Panel, scale
from .svg import LIGHT, element, picture, put_text, round_step, rule, written

ALIKE = 0.1  # budgets that differ by no more count as one
WIDTH, LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT, LINE_HEIGHT = 820, 70, 56, 500, 260, 18
RISE = "rise of perplexity over the first engine's, %"
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
    settings : str, optional
        The method's fields as JSON; None where the file does not tell them.
    at : float
        Tokens that a step attended to (of `drift` the part of the steps, of `depth` the share of the context before the needle).
    low, high : float, optional
        The 95 % interval; None where a file has a figure without the samples that it is of.
    file, place : str
        The result file's name, and the keys that lead to the figure in it.
    """

    kind: str
    group: str
    method: str
    settings: str | None
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


def _origin(document: Document, machine: Document) -> Document:
    """Commit and machine of a figure."""
    gpu = machine.get("gpu") or document.get("gpu") or {"name": machine["cpu"]}
    return {"commit": str(document.get("code") or machine["commit"]), "machine": str(gpu["name"])}


def _settings(fields: Document | None) -> str | None:
    return None if fields is None else json.dumps(fields, sort_keys=True)


def _perplexities(document: Document, file: str) -> Iterator[Figure]:
    """Rises of all texts and of each, and by part of the steps; the intervals are those of blocks of neighbouring tokens."""
    context, first = document["prompt_tokens"], losses_of(document["results"][0])
    group = f"{document['model']}, {document['tokens']} tokens behind {context:,}"
    machines = document.get("machines") or [document["machine"]]
    for number, entry in enumerate(document["results"]):
        own: Document = {"method": entry["name"], "settings": _settings(entry.get("settings")), "context": context}
        own |= {"file": file, "fingerprint": entry.get("fingerprint")} | _origin(
            document, machines[entry.get("machine", 0)]
        )
        texts = [("all texts", entry, f"results.{number}")]
        texts += [
            (name.replace(":", "/").rpartition("/")[2], text, f"results.{number}.by_text.{place}")
            for place, (name, text) in enumerate(zip(document["texts"], entry["by_text"], strict=True))
        ]
        for name, text, place in texts:
            ends = _ends(text["percent"], text["error"], f"{place}.percent")
            yield Figure(
                PERPLEXITY, f"{group}: {name}", at=entry["attended_tokens"], value=text["percent"], **ends, **own
            )
        parts = by_part(paired(losses_of(entry), first), document["block"])
        for part, (percent, again) in enumerate(zip(entry["by_part"], parts, strict=True)):
            ends = _ends(percent, again["error"], f"results.{number}.by_part.{part}")
            yield Figure(DRIFT, group, at=part + 1, value=percent, **ends, **own)


def _ends(percent: float, error: float | None, place: str) -> Document:
    spread = None if error is None else Z_95 * error
    low, high = (None, None) if spread is None else (percent - spread, percent + spread)
    return {"low": low, "high": high, "place": place}


def _answers(document: Document, file: str) -> Iterator[Figure]:
    """Exact answers, and the right parts of niah_single by depth; Wilson's intervals, whose samples are contexts."""
    depths, machines = document["settings"].get("depths", 1), document.get("machines") or [document["machine"]]
    origins = [_origin(document, machine) for machine in machines]
    where = {name: ", ".join(dict.fromkeys(origin[name] for origin in origins)) for name in ("commit", "machine")}
    for number, cell in enumerate(document["cells"]):
        engine, contexts = cell["engine"], len(cell["right"])
        fields = document["engines"].get(engine, {}).get("method_config")
        own: Document = {
            "method": engine,
            "settings": _settings(fields),
            "context": cell["length"],
            "file": file,
            **where,
        }
        own["fingerprint"] = document.get("fingerprints", {}).get(engine)
        exact = "".join(cell["right"]).count("1") / sum(map(len, cell["right"]))
        at, group = cell["attended_share"] * cell["length"], f"{cell['task']}, {cell['length']:,} tokens"
        yield Figure(ANSWERS, group, at=at, **_share(exact, contexts, f"cells.{number}.right"), **own)
        if cell["task"] == "niah_single" and depths > 1:
            for depth, part in enumerate(by_depth(cell["parts"], depths)):
                share = _share(part, len(cell["parts"][depth::depths]), f"cells.{number}.parts")
                yield Figure(DEPTH, engine, at=depth / (depths - 1), **share, **own)


def _share(share: float, samples: int, place: str) -> Document:
    low, high = (100 * end for end in wilson(share, samples))
    return {"value": 100 * share, "low": low, "high": high, "place": place}


def _device_steps(document: Document, file: str) -> Iterator[Figure]:
    for phase_number, phase in enumerate(document["phases"]):
        for cell_number, cell in enumerate(phase["cells"]):
            for number, entry in enumerate(cell["results"]):
                if cell["batch"] != 1 or entry["to_baseline"] is None:
                    continue
                place = f"phases.{phase_number}.cells.{cell_number}.results.{number}"
                fields = document["methods"].get(entry["method"], {}).get("settings")
                hot = ", hot rows" if entry["hot_rows"] else ""
                group = f"{document['shape']}, {cell['context']:,} tokens, offload {phase['offload']}{hot}"
                alone = entry.get("baseline_of_another_phase", False)
                base = [] if alone else cell["results"][0]["samples"]
                own = {
                    "method": entry["method"],
                    "settings": _settings(fields),
                    "context": cell["context"],
                    "file": file,
                }
                yield _speed(document, entry, base, group, place, own)


def _cpu_steps(document: Document, file: str) -> Iterator[Figure]:
    for part_number, part in enumerate(document["contexts"]):
        for number, entry in enumerate(part["results"]):
            if not entry["reference"]:
                place = f"contexts.{part_number}.results.{number}"
                group = f"{document['model']}, {part['context']:,} tokens"
                fields = entry.get("settings")
                own = {"method": entry["name"], "settings": _settings(fields), "context": part["context"], "file": file}
                yield _speed(document, entry, part["results"][0]["samples"], group, place, own)


def _speed(document: Document, entry: Document, base: Sequence[float], group: str, place: str, own: Document) -> Figure:
    """The ratio of the medians of two contestants' steps in turns; its interval by a bootstrap over steps (Efron 1979)."""
    ratio, samples, low, high = entry["to_baseline"], entry["samples"], None, None
    if len(base) > 1 and len(samples) > 1:
        draw = np.random.default_rng(0).choice
        ours, theirs = (np.median(draw(one, (SAMPLES, len(one))), axis=1) for one in (samples, base))
        # Of a shift of the ratio: the file's is over the baseline's turns with this contestant, the samples are of all turns.
        shifts = ours / theirs * (np.median(base) / np.median(samples))
        low, high = (float(ratio * end) for end in np.quantile(shifts, (0.025, 0.975))) if ratio != 1 else (1.0, 1.0)
    ends: Document = {
        "low": low,
        "high": high,
        "place": f"{place}.to_baseline",
        "fingerprint": entry.get("fingerprint"),
    }
    return Figure(
        SPEED, group, at=entry["attended_tokens"], value=ratio, **ends, **own, **_origin(document, document["machine"])
    )


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
        found += READERS[kind](document, path.name)
    return found


def draw(
    title: str, below: str, beside: str, lines: dict[str, list[Mark]], files: Iterable[str], logarithmic: bool
) -> ElementTree.Element:
    """A picture of lines, with what they are called beside them; `logarithmic` is about the axis to the right."""
    height = max(TOP + PLOT_HEIGHT + 56, TOP + LINE_HEIGHT * (len(lines) + 1))
    words = " ".join(f"{mark.words}." for line in lines.values() for mark in line)
    root = picture(WIDTH, height, f"{title}: {beside}", words, list(files))
    put_text(root, title, LEFT - 44, 24, "title")
    colours = len(LIGHT)
    drawn = [Line(marks, place % colours, place >= colours) for place, marks in enumerate(lines.values())]
    Panel(beside, below, drawn, logarithmic).draw(root, LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT)
    for place, name in enumerate(lines):
        put_text(root, name, LEFT + PLOT_WIDTH + 20, TOP + LINE_HEIGHT * place, f"label t{place % colours}")
    return root


def draw_side_by_side(
    title: str, below: str, methods: dict[str, dict[int, Mark]], files: Iterable[str], best: int
) -> ElementTree.Element:
    """Many methods one below the other, the best first, with a mark and a figure for each budget of tokens.

    `best` is -1 where large values are good, else 1.
    """
    budgets = sorted({budget for own in methods.values() for budget in own})
    names = sorted(methods, key=lambda name: [best * methods[name][b].y for b in budgets if b in methods[name]])
    colour = {budget: 1 + place % (len(LIGHT) - 1) for place, budget in enumerate(budgets)}
    step, left, wide = 12 * len(budgets) + 10, 150, 150
    width, height = left + PLOT_WIDTH + wide * len(budgets), TOP + step * len(names)
    words = " ".join(f"{mark.words}." for name in names for mark in methods[name].values())
    root = picture(width, height + 56, f"{title}: {below}", words, list(files))
    put_text(root, title, LEFT - 44, 24, "title")
    values = [end for own in methods.values() for m in own.values() for end in (m.y, m.low, m.high) if end is not None]
    unit = round_step((max(values) - min(values)) / 6 or 1)
    ticks = [unit * n for n in range(math.floor(min(values) / unit), math.ceil(max(values) / unit) + 1)]
    x = scale(ticks[0], ticks[-1], left, PLOT_WIDTH - 20)
    for tick in ticks:
        rule(root, (x(tick), TOP), (x(tick), height), "axis" if tick == 0 else "grid")
        put_text(root, f"{tick:g}", x(tick), height + 18, "", "middle")
    put_text(root, below, left + PLOT_WIDTH / 2, height + 40, "", "middle")
    for place, budget in enumerate(budgets):
        at = left + PLOT_WIDTH + wide * place
        put_text(root, f"{budget:,} tokens", at, TOP - 12, f"heading t{colour[budget]}")
    for row, name in enumerate(names):
        top = TOP + step * row
        put_text(root, name, left - 12, top + step / 2 + 4, "label", "end")
        for place, budget in enumerate(budgets):
            if budget not in methods[name]:
                continue
            mark, y, at = methods[name][budget], top + 11 + 12 * place, left + PLOT_WIDTH + wide * place
            if mark.low is not None and mark.high is not None:
                rule(root, (x(mark.low), y), (x(mark.high), y), f"line s{colour[budget]}")
            link = element(root, "a", {"href": mark.link})
            circle = {"class": f"f{colour[budget]}", "cx": f"{x(mark.y):g}", "cy": f"{y:g}", "r": "4"}
            element(element(link, "circle", circle), "title", text=mark.words)
            ends = "" if mark.low is None or mark.high is None else f" [{_tenths(mark.low)}, {_tenths(mark.high)}]"
            put_text(root, f"{_tenths(mark.y)}{ends}", at, top + step / 2 + 4, "label")
    return root


def _tenths(value: float) -> str:
    return f"{round(value, 1) + 0.0:.1f}"  # not -0.0


def by_budget(found: Sequence[Figure], marks: Sequence[Mark], members: Sequence[int]) -> dict[str, dict[int, Mark]]:
    """Marks of the methods that have a number of rows, by the tokens that they choose, window included.

    Methods that choose pages have some tokens fewer: budgets within a tenth of a larger one count as that.
    """
    listed: dict[str, dict[int, Mark]] = {}
    for number in members:
        (variant,) = parse_variants(found[number].method)
        if hasattr(variant.settings, "top_k"):
            budget = variant.settings.top_k + variant.cache.sink + variant.cache.local
            listed.setdefault(variant.method, {})[budget] = marks[number]
    budgets = sorted({budget for own in listed.values() for budget in own})
    larger = {one: max(other for other in budgets if other <= one / (1 - ALIKE)) for one in budgets}
    return {name: {larger[budget]: mark for budget, mark in own.items()} for name, own in listed.items()}


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
            link = element(root, "a", {"href": mark.link})
            size = {"x": f"{x}", "y": f"{y}", "width": f"{side - 2}", "height": f"{side - 2}"}
            square = element(link, "rect", {"class": "f1", "fill-opacity": f"{0.08 + mark.y / 125:.2f}", **size})
            element(square, "title", text=mark.words)
            put_text(link, f"{mark.y:.0f}", x + 21, y + 26, "label", "middle")
    for column, depth in enumerate(depths):
        put_text(root, f"{100 * depth:.0f} %", LEFT + 51 + side * column, TOP + side * len(contexts) + 16, "", "middle")
    put_text(root, "tokens by depth of the needle; right parts in %", LEFT - 44, height - 12, "small")
    return root


def _mark(number: int, one: Figure) -> Mark:
    ends = "" if one.low is None else f" [{one.low:.4g}, {one.high:.4g}]"
    words = f"{one.group}, {one.method}, {one.at:,.4g}: {one.value:.4g} {UNITS[one.kind]}{ends}"
    return Mark(one.at, one.value, words, one.low, one.high, f"#row-{number}")


def plots(found: Sequence[Figure]) -> Iterator[tuple[str, ElementTree.Element]]:
    """The section of each picture, and the picture."""
    sections = (
        (PERPLEXITY, "Perplexity by budget", "tokens that a step attends to", RISE),
        (DRIFT, "Drift", f"part of the steps, of {PARTS}", RISE),
        (ANSWERS, "Answers by budget", "tokens that a step attends to", "exact answers, %"),
        (SPEED, "Speed", "tokens that a step attends to", "time of a step, × full"),
    )
    marks = [_mark(number, one) for number, one in enumerate(found)]
    for kind, title, below, beside in sections:
        for group in dict.fromkeys(one.group for one in found if one.kind == kind):
            lines: dict[str, list[Mark]] = {}
            members = [number for number, one in enumerate(found) if (one.kind, one.group) == (kind, group)]
            for number in members:
                name = found[number].method
                lines.setdefault(name if kind == DRIFT else name.partition(":")[0], []).append(marks[number])
            files = dict.fromkeys(found[number].file for number in members)
            if kind != DRIFT and len(lines) > len(LIGHT):
                best = -1 if kind == ANSWERS else 1
                yield title, draw_side_by_side(group, beside, by_budget(found, marks, members), files, best)
                continue
            yield title, draw(group, below, beside, lines, files, kind != DRIFT)
    engines: dict[str, dict[tuple[int, float], Mark]] = {}
    for one, mark in zip(found, marks, strict=True):
        if one.kind == DEPTH:
            engines.setdefault(one.method, {})[one.context, one.at] = mark
    for name, cells in engines.items():
        yield "Map by depth and length", draw_map(f"niah_single, {name}", cells, [])
    yield from frontiers(found)


def frontiers(found: Sequence[Figure]) -> Iterator[tuple[str, ElementTree.Element]]:
    """Speed against perplexity: a figure of each, joined where method and settings are equal, at each context that was timed."""
    losses: dict[tuple[str, str], tuple[int, Figure]] = {}
    for number, one in enumerate(found):
        if one.kind == PERPLEXITY and one.group.endswith(": all texts") and one.settings is not None:
            losses.setdefault((one.method.partition(":")[0], one.settings), (number, one))
    groups: dict[str, dict[str, list[Mark]]] = {}
    files: dict[str, dict[str, None]] = {}
    for number, one in enumerate(found):
        key = (one.method.partition(":")[0], one.settings or "")
        plain = "weight_only" not in one.method and ":paper" not in one.method
        if one.kind == SPEED and key in losses and plain:
            loss = losses[key][1]
            words = f"{one.method}: {one.value:.3g} × full at {one.context:,} tokens; {_mark(*losses[key]).words}"
            mark = Mark(one.value, loss.value, words, loss.low, loss.high, f"#row-{number}")
            groups.setdefault(one.group, {}).setdefault(one.method, []).append(mark)
            files.setdefault(one.group, {}).update(dict.fromkeys((one.file, loss.file)))
    for group, lines in groups.items():
        below = "time of a step, × full"
        yield "Speed and accuracy", draw(group, below, "rise of perplexity, %", lines, files[group], logarithmic=False)


STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --ground: #ffffff; --faint: #59636e; --link: #0059a3; --grid: #e3e7ec; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --ground: #0d1117; --faint: #9aa4af; --link: #6cb6ff; --grid: #262c34; }
}
body { margin: 0 auto; max-width: 60rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; }
body { color: var(--ink); background: var(--ground); }
a { color: var(--link); }
figure, .table { margin: 1rem 0; overflow-x: auto; }
figure svg { max-width: 100%; min-width: 40rem; height: auto; }
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
<p class="note">No fingerprint: random weights, or the file has none. No interval: the file has no samples of the figure.</p>
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
