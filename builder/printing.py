"""How the builder prints: tables and progress for people, JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import JustifyMethod
from rich.table import Table

Column = tuple[str, JustifyMethod]
Advance = Callable[[int], None]
"""Moves a progress bar on by so many of its steps."""


def table(title: str, *columns: Column, rows: Iterable[Sequence[str]]) -> Table:
    """A table of text: columns as (heading, alignment); headings are left out if all but the last are empty."""
    made = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    made.show_header = any(heading for heading, _ in columns[:-1])
    for heading, justify in columns:
        made.add_column(heading, justify=justify, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def print_json(document: dict[str, Any]) -> None:
    """Print a document to the standard output, for machines: nothing else goes there."""
    print(json.dumps(document, indent=2))
