"""A measurement from its command line to its result: flags, a file that is whole or absent, JSON or a table on the screen."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from kvseek.core.command_line import tells_errors
from kvseek.core.errors import ConfigError, KvseekError

WIDEST = 1000  # columns that no table needs
MOST_NAME = 24  # columns of a name before it is folded
NUMBERS = re.compile(r"\[[^][{}\"]*\]")  # a list without lists, objects and texts
GIB = 1 << 30

Document = dict[str, Any]
Figure = Callable[[Document], str]  # what a column says of an entry of a result


class ResultError(KvseekError):
    """A result file that is missing, is no JSON or is another measurement's; the message names the file and the remedy."""


def numbers(name: str, text: str, least: int = 1) -> list[int]:
    """A comma list of numbers, ascending, each once; raises ConfigError."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise ConfigError(f"--{name} = {text!r}: must be a comma list of numbers >= {least}; e.g. {max(least, 131072)}")
    return sorted({int(part) for part in parts})


def chosen_layers(text: str | None, layers: int) -> list[int]:
    """Layers of a comma list, all if it is left out; raises ConfigError."""
    parts = text.split(",") if text is not None else map(str, range(layers))
    chosen = [int(part) if part.isdecimal() else layers for part in parts]
    if not all(layer < layers for layer in chosen):
        raise ConfigError(f"--layers = {text!r}: must be a comma list of layers below {layers}; or leave it out")
    return chosen


def at_least_one(arguments: argparse.Namespace, *names: str) -> None:
    """Raise ConfigError if one of these flags is below 1."""
    for name in names:
        value = getattr(arguments, name)
        least = min(value) if isinstance(value, list) else value
        if least < 1:
            raise ConfigError(f"--{name} = {least}: must be >= 1; leave it out for the default")


def add_output_flags(parser: argparse.ArgumentParser, written: str = "") -> None:
    """Add --json and --output, which every measurement has; `written` says when, if not at the end."""
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--output", type=Path, help=f"write the JSON to this file too{written}")


def write_result(path: Path, document: Document) -> None:
    """Write a result file and its folder; the file is whole or absent, even if the run is ended at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(as_text(document), encoding="utf-8")
    part.replace(path)


def read_result(path: Path, **wanted: str) -> Document:
    """The document of a result file, with the values `wanted`, such as benchmark="load"; raises ResultError."""
    try:
        document: Document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ResultError(f"{path}: no such file; measure again, or name another") from None
    except json.JSONDecodeError as error:
        raise ResultError(f"{path}: not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ResultError(
            f"{path}: a {type(document).__name__}: must be an object, as tools write it; name another file"
        )
    found = {name: document.get(name) for name in wanted}
    if found != wanted:
        raise ResultError(f"{path}: is of {_listed(found)}: must be of {_listed(wanted)}; name another file")
    return document


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def as_text(document: Document) -> str:
    """The text of a result file: JSON with two blanks an indent, and a list of numbers on one line."""
    indented = json.dumps(document, indent=2)
    return NUMBERS.sub(lambda found: " ".join(found[0].split()).replace("[ ", "[").replace(" ]", "]"), indented) + "\n"


def figure(path: str, form: str = "", scale: float = 1) -> Figure:
    """A column's figure: what an entry has at `path`, keys between points, times `scale` in this form; nothing for None."""

    def write(entry: Document) -> str:
        value: Any = entry
        for key in path.split("."):
            value = value[key]
        return "" if value is None else format(value * scale if scale != 1 else value, form)

    return write


def figures_table(
    title: str, first: str, figures: Mapping[str, Figure], entries: Iterable[Document], key: str
) -> Table:
    """A table with a row for each entry: its name, which is `entry[key]`, then its figures, by their headings."""
    table = Table(Column(first, overflow="fold", max_width=MOST_NAME), title=title)
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in entries:
        table.add_row(entry[key], *(write(entry) for write in figures.values()))
    return table


def print_whole(table: Table) -> None:
    """Print a table of which nothing is cut off: on a terminal that is too narrow its lines go on below."""
    console = Console()
    console.width = max(console.width, Console(width=WIDEST).measure(table).maximum)
    console.print(table, highlight=False)


def rows(columns: Mapping[str, Figure], entries: Iterable[Document]) -> list[tuple[str, ...]]:
    """The rows of a table: its headings, and one for each entry."""
    return [tuple(columns), *(tuple(figure(entry) for figure in columns.values()) for entry in entries)]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table as Markdown; the first row has the headings."""
    heading, *lines = (f"| {' | '.join(cells)} |" for cells in rows)
    return "\n".join([heading, "|" + "---|" * len(rows[0]), *lines])


def command(
    parse: Callable[[Sequence[str] | None], argparse.Namespace],
    run: Callable[[argparse.Namespace], Document],
    print_table: Callable[..., None],
) -> Callable[..., int]:
    """The `main` of a measurement, which takes the words of its command line, or those of this process, and returns its status.

    It parses the flags, measures, writes the result to --output and shows it. `print_table` gets the document and, of a command
    that has the flag, `details`. What the user can mend (KvseekError, OSError) becomes a line on stderr, and the status 1.
    """

    @tells_errors
    def main(argv: Sequence[str] | None = None) -> int:
        arguments = parse(argv)
        document = run(arguments)
        if arguments.output:
            write_result(arguments.output, document)
        if arguments.json:
            print(as_text(document), end="")
        else:
            print_table(document, **({"details": arguments.details} if "details" in arguments else {}))
        return 0

    return main


def progress(text: str) -> None:
    """Say on stderr what is being done: a run takes minutes."""
    print(text, file=sys.stderr, flush=True)
