"""`kvseek bench --device cuda`: from the command line to a result file and a table."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from kvseek.measurement.machine import describe, describe_gpu
from kvseek.measurement.output import run_command, write_result
from kvseek.measurement.variants import Variant

from .bench import Bench
from .decode import cells_of, run_decode
from .options import parse
from .prefill import run_prefill
from .report import print_device_report
from .results import borrow_baselines
from .throughput import run_throughput


def describe_variant(variant: Variant) -> dict[str, Any]:
    """All settings of a variant, as they go into the result file."""
    return {"settings": dataclasses.asdict(variant.settings), "cache": dataclasses.asdict(variant.cache)}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured, as it goes into the result file, which is written whenever it has grown."""
    bench = Bench(arguments, cells_of(arguments))
    mode = "throughput" if arguments.throughput else "prefill" if arguments.prefill else "decode"
    head = {"benchmark": "device", "mode": mode, "machine": describe(), "gpu": describe_gpu(bench.device)}
    head |= {"shape": arguments.shape, "dtype": arguments.dtype, "weights": arguments.weights}
    head |= {"steps": arguments.steps, "block": arguments.block, "seed": arguments.seed}
    head["methods"] = {variant.label: describe_variant(variant) for variant in arguments.methods}

    def save(part: dict[str, Any]) -> None:
        if arguments.output:
            write_result(arguments.output, {**head, **part})

    measure = {"decode": run_decode, "throughput": run_throughput, "prefill": run_prefill}[mode]
    document = {**head, **measure(bench, save)}
    if mode == "decode":
        borrow_baselines(document, bench.variants[0].label)
    return document


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    return run_command(argv, parse, run, print_device_report)
