"""A measurement from its command line to its result: a file that is whole or absent, and JSON or a table on the screen."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvseek.core.errors import KvseekError, text_of


def write_result(path: Path, document: dict[str, Any]) -> None:
    """Write a result file and its folder; the file is whole or absent, even if the run is ended at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def show(document: dict[str, Any], as_json: bool, print_table: Callable[[dict[str, Any]], None]) -> None:
    """Print a result as JSON, or as `print_table` does."""
    if as_json:
        print(json.dumps(document, indent=2))
    else:
        print_table(document)


def run_command(
    argv: Sequence[str] | None,
    parse: Callable[[Sequence[str] | None], argparse.Namespace],
    run: Callable[[argparse.Namespace], dict[str, Any]],
    print_table: Callable[[dict[str, Any]], None],
    prefix: str = "error",
) -> int:
    """Parse the flags, measure, write the result to --output and show it; returns the exit status.

    What the user can mend (KvseekError, OSError) becomes a line on stderr that begins with `prefix`, and the status 1.
    """
    try:
        arguments = parse(argv)
        document = run(arguments)
        if arguments.output:
            write_result(arguments.output, document)
    except (KvseekError, OSError) as error:
        print(f"{prefix}: {text_of(error)}", file=sys.stderr)
        return 1
    show(document, arguments.json, print_table)
    return 0
