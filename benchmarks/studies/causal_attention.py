"""Attention of a prompt's chunk on the CPU, PyTorch's and the compiled: `python benchmarks/studies/causal_attention.py`.

Each time is of one layer, the contestants in turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvseek.benchmarks.studies.host_cases import KERNEL, PYTORCH, SHAPES, add_flags, begin
from kvseek.benchmarks.timing import interleave
from kvseek.core.cpu_library import CpuLibrary
from kvseek.engine.model import attention, native_attention
from kvseek.measurement.flags import numbers
from kvseek.measurement.machine import describe
from kvseek.measurement.output import run_command


def operations(heads: int, dim: int, past: int, chunk: int) -> int:
    """Additions and multiplications of both products, for the pairs of a query and a key that it may attend to."""
    pairs = chunk * past + chunk * (chunk + 1) // 2
    return 4 * heads * dim * pairs


def measure(shape: str, dtype: torch.dtype, past: int, chunk: int, repeats: int, library: CpuLibrary) -> dict[str, Any]:
    """Time both contestants on one chunk that follows `past` tokens."""
    heads, kv_heads, dim = SHAPES[shape]
    queries = torch.randn(chunk, heads, dim).to(dtype).transpose(0, 1)  # as a model has them
    keys, values = torch.randn(2, kv_heads, past + chunk, dim).to(dtype)
    parts = (queries, keys, values, dim**-0.5)
    contestants = {
        PYTORCH: partial(attention.causal_attention, *parts),
        KERNEL: partial(native_attention.causal_attention, *parts, library),
    }
    samples = interleave(contestants, repeats, 1, 1)
    return {
        "shape": shape,
        "dtype": str(dtype).removeprefix("torch."),
        "past": past,
        "chunk": chunk,
        "operations": operations(heads, dim, past, chunk),
        "seconds": {name: values.summary() for name, values in samples.items()},
    }


def print_report(document: dict[str, Any]) -> None:
    """A line for each shape, dtype and past: milliseconds, GFLOP/s, and how many times as fast the kernel is."""
    table = Table("shape", "dtype", "past", f"{PYTORCH} ms", f"{KERNEL} ms", "GFLOP/s", "GFLOP/s", "times as fast")
    for entry in document["results"]:
        medians = [entry["seconds"][name]["median"] for name in (PYTORCH, KERNEL)]
        times = [f"{median * 1e3:,.1f}" for median in medians]
        rates = [f"{entry['operations'] / median / 1e9:,.0f}" for median in medians]
        case = (entry["shape"], entry["dtype"], str(entry["past"]))
        table.add_row(*case, *times, *rates, f"{medians[0] / medians[1]:.2f}")
    console = Console(width=120)
    console.print(f"{document['machine']['cpu']}, {document['threads']} threads, {document['chunk']} queries")
    console.print(table)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pasts", default="0,2048,6144,32768", help="comma list of tokens before the chunk")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of the chunk")
    add_flags(parser)
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured, as it goes into the result file."""
    kinds, library = begin(arguments, "chunk")
    pasts = numbers("pasts", arguments.pasts, 0)
    cases = [(*kind, past) for kind in kinds for past in pasts]
    return {
        "benchmark": "causal_attention",
        "machine": describe(),
        "threads": arguments.threads,
        "chunk": arguments.chunk,
        "results": [measure(*case, arguments.chunk, arguments.repeats, library) for case in cases],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns 0, or 1 after printing why not."""
    return run_command(argv, parse, run, print_report)


if __name__ == "__main__":
    sys.exit(main())
