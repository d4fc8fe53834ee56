"""Amounts of memory, as people write and read them."""

from __future__ import annotations

import argparse
import re
from decimal import Decimal

UNITS = {"": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)")


def memory_size(text: str) -> int:
    """Parse 80GiB, 1.5TB, 512MiB or plain bytes; raises argparse.ArgumentTypeError, which argparse puts the flag before."""
    match = SIZE.fullmatch(text)
    size = int(Decimal(match[1]) * UNITS[match[2]]) if match and match[2] in UNITS else 0
    if size < 1:
        units = ", ".join(unit for unit in UNITS if unit)
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be a number > 0 and a unit, one of {units}, or bytes without a unit; write it as 80GiB"
        )
    return size


def readable(size: float) -> str:
    """An amount with the binary unit that leaves it below 1024: 3.25 GiB, 640 B."""
    power = 0
    while abs(size) >= 1024 and power < len(BINARY) - 1:
        size, power = size / 1024, power + 1
    return f"{size:,.2f} {BINARY[power]}" if power else f"{size:,.0f} B"
