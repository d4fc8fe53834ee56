"""Seconds until pinned host memory is ready, by both ways of the row pool: `python benchmarks/studies/pinned_memory.py`.

The ways in turns. What one of them frees goes back to the system before the next begins.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvseek.benchmarks.device.memory_plan import GIB
from kvseek.benchmarks.timing import interleave
from kvseek.benchmarks.timing import measure as measured
from kvseek.core.cuda import cuda_device
from kvseek.core.errors import ConfigError
from kvseek.engine.cache.host_memory import available_bytes
from kvseek.engine.cache.host_pool import can_pin
from kvseek.engine.cache.pinned_memory import (
    BY_DRIVER,
    REGISTERED,
    PinnedMemory,
    allocate_by_driver,
    allocate_registered,
)
from kvseek.measurement.machine import describe
from kvseek.measurement.output import run_command

WAYS = {REGISTERED: allocate_registered, BY_DRIVER: allocate_by_driver}
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def measure(gib: float, repeats: int, device: torch.device) -> dict[str, Any]:
    """Time both ways of allocating `gib` GiB, and say how much of each lies in huge pages."""
    size, kept, huge = int(gib * GIB), list[PinnedMemory](), dict[str, int]()

    def make(way: Callable[[int, torch.device], PinnedMemory]) -> None:
        kept.append(way(size, device))

    # Freeing is no part of the time: whoever is next begins with what was kept before.
    def timed(call: Callable[[], object]) -> float:
        kept.clear()
        gc.collect()
        seconds = measured(call)
        huge[kept[0].way] = huge_bytes()
        return seconds

    samples = interleave({name: partial(make, way) for name, way in WAYS.items()}, repeats, 1, 0, timer=timed)
    kept.clear()
    return {
        "gib": gib,
        "seconds": {name: one.summary() for name, one in samples.items()},
        "huge_page_bytes": huge,
    }


def huge_bytes() -> int:
    """Bytes of the process's own memory that lie in huge pages; the driver's pages do not count among them."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    (kib,) = [line.split()[1] for line in lines if line.startswith("AnonHugePages:")]
    return int(kib) * 1024


def print_report(document: dict[str, Any]) -> None:
    """A line for each size: seconds of both ways, and how many times as fast the first is."""
    table = Table("GiB", *(f"{name} s" for name in WAYS), "times as fast", "of it in huge pages")
    for entry in document["results"]:
        medians = [entry["seconds"][name]["median"] for name in WAYS]
        share = entry["huge_page_bytes"][REGISTERED] / entry["gib"] / GIB
        times = (f"{median:.2f}" for median in medians)
        table.add_row(f"{entry['gib']:g}", *times, f"{medians[1] / medians[0]:.1f}", f"{share:.0%}")
    console = Console(width=120)
    console.print(
        f"{document['gpu']}, {document['threads']} threads, huge pages {document['huge_pages']}", markup=False
    )
    console.print(table)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", default="16", help="comma list of sizes in GiB")
    parser.add_argument("--repeats", type=int, default=1, help="timed allocations of each way")
    parser.add_argument("--output", type=Path, help="write the result as JSON to this file")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured, as it goes into the result file."""
    device, available = cuda_device(), available_bytes()
    try:
        sizes = [float(gib) for gib in arguments.gib.split(",")]
    except ValueError:
        raise ConfigError(f"--gib = {arguments.gib!r}: must be a comma list of numbers") from None
    for gib in sizes:
        if gib <= 0 or not can_pin(int(gib * GIB), available):
            raise ConfigError(f"--gib = {gib:g}: must be above 0 and leave 1 of {available / GIB:.1f} GiB free")
    if arguments.repeats < 1:
        raise ConfigError(f"--repeats = {arguments.repeats}: must be at least 1")
    torch.zeros(1, device=device)  # starts the driver
    return {
        "benchmark": "pinned_memory",
        "machine": describe(),
        "gpu": torch.cuda.get_device_name(device),
        "threads": torch.get_num_threads(),
        "huge_pages": HUGE_PAGES.read_text(encoding="ascii").strip() if HUGE_PAGES.exists() else "none",
        "results": [measure(gib, arguments.repeats, device) for gib in sizes],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns 0, or 1 after printing why not."""
    return run_command(argv, parse, run, print_report)


if __name__ == "__main__":
    sys.exit(main())
