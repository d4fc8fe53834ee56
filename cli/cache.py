"""`kvseek cache`: what a directory of prefixes (`--disk_dir`) holds, and how to be rid of it. No engine is loaded."""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from kvseek.builder.printing import Column, print_json, table
from kvseek.core.command_line import Parser, readable, tells_errors
from kvseek.core.errors import ConfigError
from kvseek.engine.cache.prefixes.file import DamagedFileError, Entry
from kvseek.engine.cache.prefixes.folder import NEW_FILES, BusyFolderError, lock, scan

ENGINE = re.compile("[0-9a-f]{32}")  # name of an engine's folder
SHOWN = 12  # digits of keys
UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


@dataclass
class EngineFiles:
    """The files of one engine.

    Attributes
    ----------
    used_at : dict of Entry to float
        When a file was last used, in seconds since 1970.
    others : list of Path
        Files that are not the engine's.
    """

    folder: Path
    used_at: dict[Entry, float] = field(default_factory=dict)
    damaged: list[Path] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)

    @property
    def in_use(self) -> bool:
        """Whether a process serves the engine with this directory."""
        try:
            os.close(lock(self.folder))
        except BusyFolderError:
            return True
        return False

    def lines(self) -> Iterator[list[Entry]]:
        """Yield the files of each prefix, last one first: those of its own, and those that it shares with others."""
        entries = {entry.key: entry for entry in self.used_at}
        inner = {entry.before for entry in self.used_at}
        for entry in self.used_at:
            if entry.key not in inner:
                line = [entry]
                while line[-1].before in entries:
                    line.append(entries[line[-1].before])
                yield line


def read_directory(directory: Path) -> list[EngineFiles]:
    """Find out what a directory holds, by engine; raises ConfigError if there is no such directory."""
    if not directory.is_dir():
        raise ConfigError(f"{directory}: is no directory; name that which --disk_dir was given")
    engines = []
    for folder in sorted(directory.iterdir()):
        if not ENGINE.fullmatch(folder.name) or not folder.is_dir():
            continue
        files = EngineFiles(folder)
        for path, found in scan(folder):
            if isinstance(found, Entry) and found.origin.engine == folder.name:
                with contextlib.suppress(FileNotFoundError):  # a server removes files at any time
                    files.used_at[found] = path.lstat().st_mtime
            else:
                (files.damaged if isinstance(found, DamagedFileError) else files.others).append(path)
        engines.append(files)
    return engines


def document(engines: Sequence[EngineFiles]) -> list[dict[str, Any]]:
    """Describe what engines have in JSON values: sizes in bytes, times in seconds since 1970."""
    return [
        {
            "engine": engine.folder.name,
            "in_use": engine.in_use,
            "files": len(engine.used_at),
            "bytes": sum(entry.size for entry in engine.used_at),
            "damaged": [path.name for path in engine.damaged],
            "others": [path.name for path in engine.others],
            "prefixes": [
                {
                    "prefix": line[0].key.hex(),
                    "model": line[0].origin.model,
                    "method": line[0].origin.method,
                    "tokens": sum(entry.token_count for entry in line),
                    "bytes": sum(entry.size for entry in line),
                    "used_at": engine.used_at[line[0]],
                }
                for line in engine.lines()
            ],
        }
        for engine in engines
    ]


def show(engines: Sequence[dict[str, Any]], console: Console) -> None:
    """Print what `document` says of engines, a table each."""
    for engine in engines:
        prefixes = engine["prefixes"]
        name = f", {prefixes[0]['model']}, {prefixes[0]['method']}" if prefixes else ""
        state = ", in use" * engine["in_use"]
        heading = f"Engine {engine['engine']}{name}: {engine['files']:,} files, {readable(engine['bytes'])}{state}"
        rows = [
            (one["prefix"][:SHOWN], f"{one['tokens']:,}", readable(one["bytes"]), f"{_age(one['used_at'])} ago")
            for one in prefixes
        ]
        columns: list[Column] = [("prefix", "left"), ("tokens", "right"), ("bytes", "right"), ("last used", "right")]
        console.print(heading, soft_wrap=True)
        console.print(table("", *columns, rows=rows))
        for kind, names in (("damaged", engine["damaged"]), ("not this engine's", engine["others"])):
            if names:
                console.print(f"{len(names):,} files are {kind}, such as {names[0]}")
    if not engines:
        console.print("no prefixes")


def _age(used_at: float) -> str:
    age = time.time() - used_at
    number, unit = next(((age / seconds, unit) for seconds, unit in UNITS if age >= seconds), (age, "s"))
    return f"{number:.0f} {unit}"


def drop(engines: Sequence[EngineFiles], keys: Sequence[str], older_than: float | None, everything: bool) -> list[Path]:
    """Remove prefixes, but not what others that stay begin with; returns the files that are gone.

    Parameters
    ----------
    keys : sequence of str
        Beginnings of the prefixes' keys.
    older_than : float or None
        Hours: all that have not been used for so long.

    Raises
    ------
    ConfigError
        If a key is no prefix's, or that of several; or a process uses the files of an engine: then nothing is removed.
    """
    for key in keys:
        found = [
            line[0].key.hex() for engine in engines for line in engine.lines() if line[0].key.hex().startswith(key)
        ]
        if len(found) != 1:
            raise ConfigError(
                f"{key}: is the beginning of {len(found)} prefixes: must be that of one; see kvseek cache list"
            )
    chosen = {engine.folder: _chosen(engine, keys, older_than, everything) for engine in engines}
    with contextlib.ExitStack() as locks:
        for folder, paths in chosen.items():
            if paths:
                descriptor = lock(folder)
                locks.callback(os.close, descriptor)
        for paths in chosen.values():
            for path in paths:
                path.unlink(missing_ok=True)
    return [path for paths in chosen.values() for path in paths]


def _chosen(engine: EngineFiles, keys: Sequence[str], older_than: float | None, everything: bool) -> list[Path]:
    oldest = None if older_than is None else time.time() - 3600 * older_than
    leaving, staying = set[Entry](), set[Entry]()
    for line in engine.lines():
        named = any(line[0].key.hex().startswith(key) for key in keys)
        old = oldest is not None and engine.used_at[line[0]] < oldest
        (leaving if everything or named or old else staying).update(line)
    paths = [entry.path for entry in leaving - staying]
    return [*paths, *engine.damaged, *engine.folder.glob(NEW_FILES)] if everything else paths


def make_parser() -> Parser:
    """Make the parser of `kvseek cache`."""
    parser = Parser(prog="kvseek cache", description="Prefixes that --disk_dir keeps (docs/conversations.md).")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser(
        "list", help="show the prefixes of each engine: tokens, bytes, when they were last used"
    )
    listing.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    dropping = commands.add_parser("drop", help="remove prefixes; refused while a server uses them")
    dropping.add_argument("keys", nargs="*", metavar="PREFIX", help="the prefix that `list` shows, or its first digits")
    dropping.add_argument("--all", action="store_true", help="all of them")
    dropping.add_argument("--older_than", type=float, metavar="HOURS", help="those that have not been used for so long")
    for command in (listing, dropping):
        command.add_argument("--disk_dir", type=Path, required=True, help="the directory that kvseek serve was given")
        command.add_argument("--engine", default="", help="of one engine alone: the first digits that `list` shows")
    return parser


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run `kvseek cache`; returns the exit status."""
    arguments = make_parser().parse_args(argv)
    engines = [one for one in read_directory(arguments.disk_dir) if one.folder.name.startswith(arguments.engine)]
    if arguments.engine and not engines:
        raise ConfigError(
            f"--engine = {arguments.engine!r}: no engine in {arguments.disk_dir} begins so; see kvseek cache list"
        )
    if arguments.command == "list":
        if arguments.json:
            print_json({"engines": document(engines)})
        else:
            show(document(engines), Console())
        return 0
    ways = (bool(arguments.keys), arguments.all, arguments.older_than is not None)
    if sum(ways) != 1:
        raise ConfigError("name what to drop: either prefixes, or --all, or --older_than HOURS")
    hours = arguments.older_than
    if hours is not None and not 0 <= hours < math.inf:
        raise ConfigError(f"--older_than = {hours:g}: must be >= 0 and finite; give --all to drop all")
    gone = drop(engines, arguments.keys, arguments.older_than, arguments.all)
    print(f"{len(gone):,} files are removed")
    return 0
