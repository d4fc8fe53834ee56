"""Output of a measurement's result: a file that is whole or absent, and JSON or a table on the screen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


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
