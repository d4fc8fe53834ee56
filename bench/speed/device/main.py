"""`kvseek bench --shape`: from the command line to a result file and a table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from kvseek.bench.machine import describe, describe_gpu
from kvseek.bench.output import run_command, write_result
from kvseek.bench.speed.ranks import print_ranks, run_ranks

from .bench import Bench
from .decode import run_decode
from .options import cells_of, parse
from .prefill import run_prefill
from .report import print_device_report
from .results import borrow_baselines, describe_variant
from .throughput import run_throughput


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured, as it goes into the result file, which is written whenever it has grown."""

    def write(document: dict[str, Any]) -> None:
        if arguments.output:
            write_result(arguments.output, document)

    if arguments.tp_size is not None:
        return run_ranks(arguments, write)
    bench = Bench(arguments, cells_of(arguments), alone=arguments.throughput)
    mode = "throughput" if arguments.throughput else "prefill" if arguments.prefill else "decode"
    head = {"benchmark": "device", "mode": mode, "machine": describe(), "gpu": describe_gpu(bench.device)}
    head |= {"shape": arguments.shape, "dtype": arguments.dtype, "weights": arguments.weights}
    head |= {"steps": arguments.steps, "block": arguments.block, "seed": arguments.seed}
    head["methods"] = {variant.label: describe_variant(variant) for variant in arguments.methods}
    measure = {"decode": run_decode, "throughput": run_throughput, "prefill": run_prefill}[mode]
    document = {**head, **measure(bench, lambda part: write({**head, **part}))}
    if mode == "decode":
        borrow_baselines(document, bench.variants[0].label)
    return document


def print_report(document: dict[str, Any], details: bool = False) -> None:
    """Print the tables of a document of any kind; those of ranks have no further figures."""
    if document["benchmark"] == "ranks":
        print_ranks(document)
    else:
        print_device_report(document, details)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    return run_command(argv, parse, run, print_report)
