"""The parser of all commands, and amounts of memory, as people write and read them.

Dashes stand for underscores, a near miss gets a suggestion, and nothing is abbreviated.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from difflib import get_close_matches
from typing import Any, NoReturn

from .errors import KvseekError, text_of

Main = Callable[..., int]

CLOSE = 0.75  # least likeness, 0 to 1, of a word and what was meant: --nested.topk has 0.96 of --nested.top_k
UNITS = {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
FACTORS = {unit.lower(): factor for unit, factor in UNITS.items()} | {"": 1, "b": 1}
BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the known word that is nearest; empty if none is near."""
    near = get_close_matches(word, list(known), 1, CLOSE)
    return f"; did you mean {near[0]}?" if near else ""


def tells_errors(main: Main) -> Main:
    """Make a command print an error that its user can mend (KvseekError, OSError) as a line on stderr, and return status 1."""

    @functools.wraps(main)
    def told(*arguments: Any) -> int:
        try:
            return main(*arguments)
        except (KvseekError, OSError) as error:
            print(f"error: {text_of(error)}", file=sys.stderr)
            return 1

    return told


class Parser(argparse.ArgumentParser):
    """A parser whose flags may be written with dashes or underscores: --http-port is --http_port."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **options})
        self._given: list[str] = []

    @property
    def flags(self) -> list[str]:
        """Names of all flags, those of subcommands too, sorted."""
        found = {flag for action in self._actions for flag in action.option_strings if flag.startswith("--")}
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                found |= {flag for own in action.choices.values() for flag in own.flags}
        return sorted(found)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse a command line; exits with status 2 and a message on unknown flags and malformed values."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            hints = [self._hint(word) for word in unknown if word.startswith("-")]
            hint = "".join(hints) or f"; see {self.prog} --help"
            super().error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found

    def error(self, message: str) -> NoReturn:
        """End with a message; a flag that is missing may be there under a wrong name."""
        unknown = [word for word in self._given if word.startswith("--") and word.partition("=")[0] not in self.flags]
        super().error(
            message + "".join(f"; {word} is unknown{self._hint(word)}" for word in unknown if " " not in word)
        )

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse a command line; returns what is not known beside the namespace."""
        given = list(sys.argv[1:] if args is None else args)
        end = given.index("--") if "--" in given else len(given)
        self._given = [*map(self._spelled, given[:end])]
        return super().parse_known_args([*self._given, *given[end:]], namespace)

    def _spelled(self, word: str) -> str:
        """Write a flag as it was declared, with dashes or underscores; anything else stays."""
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return word
        own = {_plain(flag): flag for flag in self.flags}
        return f"{own.get(_plain(name), name)}{equals}{value}"

    def _hint(self, word: str) -> str:
        name = word.partition("=")[0]
        if hint := did_you_mean(name, self.flags):
            return hint
        ends = [flag for flag in self.flags if "." in flag and _plain(flag).endswith("." + _plain(name)[2:])]
        if ends:
            return f"; did you mean {' or '.join(ends)}?"
        group, dot, _ = name.partition(".")
        same = [flag for flag in self.flags if dot and flag.startswith(f"{group}.")]
        return f"; there are {', '.join(same)}" if same else ""


def _plain(flag: str) -> str:
    return f"--{flag[2:].replace('_', '-')}"


def memory_size(text: str) -> int:
    """Parse 80GiB, 1.5TB, 512mib or plain bytes, what every flag of a size in bytes takes.

    Raises argparse.ArgumentTypeError, which argparse puts the flag before.
    """
    match = SIZE.fullmatch(text)
    size = int(Decimal(match[1]) * FACTORS[match[2].lower()]) if match and match[2].lower() in FACTORS else 0
    if size < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be a number > 0 and a unit, one of {', '.join(UNITS)}, or bytes without a unit; write it as 80GiB"
        )
    return size


def optional_size(text: str) -> int | None:
    """Parse a size, or null for none; raises as `memory_size`."""
    return None if text == "null" else memory_size(text)


def readable(size: float) -> str:
    """An amount with the binary unit that leaves it below 1024: 3.25 GiB, 640 B."""
    power = 0
    while abs(size) >= 1024 and power < len(BINARY) - 1:
        size, power = size / 1024, power + 1
    return f"{size:,.2f} {BINARY[power]}" if power else f"{size:,.0f} B"
