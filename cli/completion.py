"""`kvseek completion`: a script that completes commands and flags in a shell. Made of the commands' own parsers by shtab."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shtab

from kvseek.core.command_line import Parser

from .main import COMMANDS


def make_parser() -> Parser:
    """Make the parser of `kvseek completion`."""
    parser = Parser(
        prog="kvseek completion", description="Print a script that completes commands and flags in a shell."
    )
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS, help="for bash: source <(kvseek completion bash)")
    return parser


def whole_parser() -> Parser:
    """Make one parser of all commands; that of `kvseek bench` has the flags of both its devices."""
    whole = Parser(prog="kvseek")
    whole.add_argument("--version", action="store_true", help="print the version")
    commands: Any = whole.add_subparsers(dest="command")
    for name, (module, summary) in COMMANDS.items():
        code = importlib.import_module(module)
        parents = [make() for make in getattr(code, "PARSERS", (code.make_parser,))]
        command = commands.add_parser(name, help=summary, parents=parents, add_help=False, conflict_handler="resolve")
        for action in command._actions:
            if action.type is Path:
                action.complete = shtab.FILE
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Run `kvseek completion`; returns the exit status."""
    print(shtab.complete(whole_parser(), make_parser().parse_args(argv).shell))
    return 0
