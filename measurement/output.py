"""A measurement from its command line to its result: a file that is whole or absent, and JSON or a table on the screen."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from kvseek.core.errors import KvseekError, text_of

WIDEST = 1000  # columns that no table needs
MOST_NAME = 24  # columns of a name before it is folded
NUMBERS = re.compile(r"\[[^][{}\"]*\]")  # a list without lists, objects and texts


def write_result(path: Path, document: dict[str, Any]) -> None:
    """Write a result file and its folder; the file is whole or absent, even if the run is ended at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(as_text(document), encoding="utf-8")
    part.replace(path)


def as_text(document: dict[str, Any]) -> str:
    """The text of a result file: JSON with two blanks an indent, and a list of numbers on one line."""
    indented = json.dumps(document, indent=2)
    return NUMBERS.sub(lambda found: " ".join(found[0].split()).replace("[ ", "[").replace(" ]", "]"), indented) + "\n"


def show(document: dict[str, Any], as_json: bool, print_table: Callable[[dict[str, Any]], None]) -> None:
    """Print a result as JSON, or as `print_table` does."""
    if as_json:
        print(as_text(document), end="")
    else:
        print_table(document)


def named(heading: str) -> Column:
    """Make a column of names, which may be long: they are folded, and leave the room to the numbers."""
    return Column(heading, overflow="fold", max_width=MOST_NAME)


def print_whole(table: Table) -> None:
    """Print a table whose numbers are never cut off: on a terminal that is too narrow its lines go on below.

    Its columns of numbers are to be no_wrap, and their headings to have line ends in the place of spaces.
    """
    console = Console()
    console.width = max(console.width, Console(width=WIDEST).measure(table).minimum)
    console.print(table, highlight=False)


def run_command(
    argv: Sequence[str] | None,
    parse: Callable[[Sequence[str] | None], argparse.Namespace],
    run: Callable[[argparse.Namespace], dict[str, Any]],
    print_table: Callable[..., None],
    prefix: str = "error",
) -> int:
    """Parse the flags, measure, write the result to --output and show it; returns the exit status.

    `print_table` gets the document and, of a command that has the flag, `details`. What the user can mend (KvseekError, OSError)
    becomes a line on stderr that begins with `prefix`, and the status 1.
    """
    try:
        arguments = parse(argv)
        document = run(arguments)
        if arguments.output:
            write_result(arguments.output, document)
    except (KvseekError, OSError) as error:
        print(f"{prefix}: {text_of(error)}", file=sys.stderr)
        return 1
    details = {"details": arguments.details} if "details" in arguments else {}
    show(document, arguments.json, partial(print_table, **details))
    return 0
