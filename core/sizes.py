"""Amounts of memory, as people write and read them."""

from __future__ import annotations

import argparse
import re
from decimal import Decimal

UNITS = {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
FACTORS = {unit.lower(): factor for unit, factor in UNITS.items()} | {"": 1, "b": 1}
BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)")


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
