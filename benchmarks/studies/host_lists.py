"""CTkvr's lists of a prompt on the CPU, PyTorch's and the compiled: `python benchmarks/studies/host_lists.py`.

Each time is of one layer, the contestants in turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvseek.benchmarks.studies.host_cases import KERNEL, PYTORCH, SHAPES, add_flags, begin
from kvseek.benchmarks.timing import interleave
from kvseek.core.cpu_library import CpuLibrary
from kvseek.measurement.flags import numbers
from kvseek.measurement.machine import describe
from kvseek.measurement.output import run_command
from kvseek.plugins.ctkvr.build import build_lists
from kvseek.plugins.ctkvr.config import Config
from kvseek.plugins.ctkvr.native_build import write_lists

PLACES = 1280  # of a list


def measure(shape: str, dtype: torch.dtype, tokens: int, repeats: int, library: CpuLibrary) -> dict[str, Any]:
    """Time both contestants on a prompt of `tokens` retrieval tokens, with the centroids that it gets."""
    heads, kv_heads, dim = SHAPES[shape]
    centroids, scaling = Config().most_prompt_centroids(tokens), dim**-0.5
    queries = (2 * torch.randn(heads, centroids, dim)).to(dtype)
    keys = torch.randn(kv_heads, tokens, dim).to(dtype)
    lists = torch.empty(kv_heads, centroids, PLACES, dtype=torch.int32)
    contestants: dict[str, Callable[[], object]] = {
        PYTORCH: partial(build_lists, queries, keys, PLACES, scaling),
        KERNEL: partial(write_lists, library, queries, keys, lists, scaling),
    }
    samples = interleave(contestants, repeats, 1, 1)
    expected = build_lists(queries, keys, PLACES, scaling).sort(dim=-1).values
    return {
        "shape": shape,
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": tokens,
        "centroids": centroids,
        "multiply_adds": heads * centroids * tokens * dim,
        "equal_lists": (lists.sort(dim=-1).values == expected).all(dim=-1).double().mean().item(),
        "seconds": {name: values.summary() for name, values in samples.items()},
    }


def print_report(document: dict[str, Any]) -> None:
    """A line for each shape, dtype and length: smallest times, their ratio, and the share of lists with the same places."""
    columns = (f"{PYTORCH} ms", f"{KERNEL} ms", "times as fast", "equal lists")
    table = Table("shape", "dtype", "tokens", "centroids", *columns)
    for entry in document["results"]:
        old, new = (entry["seconds"][name]["min"] for name in (PYTORCH, KERNEL))
        case = (entry["shape"], entry["dtype"], str(entry["tokens"]), str(entry["centroids"]))
        table.add_row(
            *case, f"{old * 1e3:,.1f}", f"{new * 1e3:,.1f}", f"{old / new:.1f}", f"{entry['equal_lists']:.4f}"
        )
    console = Console(width=120)
    console.print(f"{document['machine']['cpu']}, {document['threads']} threads, lists of {PLACES} places")
    console.print(table)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="6000", help="comma list of retrieval tokens (default: %(default)s)")
    add_flags(parser)
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured, as it goes into the result file."""
    kinds, library = begin(arguments)
    lengths = numbers("tokens", arguments.tokens, 1)
    cases = [(*kind, tokens) for kind in kinds for tokens in lengths]
    return {
        "benchmark": "host_lists",
        "machine": describe(),
        "threads": arguments.threads,
        "places": PLACES,
        "results": [measure(*case, arguments.repeats, library) for case in cases],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns 0, or 1 after printing why not."""
    return run_command(argv, parse, run, print_report)


if __name__ == "__main__":
    sys.exit(main())
