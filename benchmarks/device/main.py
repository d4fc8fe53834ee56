"""`kvseek bench --device cuda`: from the command line to a result file and a table."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from kvseek.core.errors import KvseekError
from kvseek.measurement.machine import describe, describe_gpu
from kvseek.measurement.output import show, write_result
from kvseek.measurement.variants import Variant

from .bench import Bench
from .decode import cells_of, run_decode
from .options import parse
from .prefill import run_prefill
from .report import print_device_report
from .results import borrow_baselines
from .throughput import run_throughput

Save = Callable[[dict[str, Any]], None]


def describe_variant(variant: Variant) -> dict[str, Any]:
    """All settings of a variant, as they go into the result file."""
    return {"settings": dataclasses.asdict(variant.settings), "cache": dataclasses.asdict(variant.cache)}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    try:
        arguments = parse(argv)
        bench = Bench(arguments, cells_of(arguments))
        mode = "throughput" if arguments.throughput else "prefill" if arguments.prefill else "decode"
        head = {"benchmark": "device", "mode": mode, "machine": describe(), "gpu": describe_gpu(bench.device)}
        head |= {"shape": arguments.shape, "dtype": arguments.dtype, "weights": arguments.weights}
        head |= {"steps": arguments.steps, "block": arguments.block, "seed": arguments.seed}
        head["methods"] = {variant.label: describe_variant(variant) for variant in arguments.methods}

        def save(part: dict[str, Any]) -> None:
            if arguments.output:
                write_result(arguments.output, {**head, **part})

        run = {"decode": run_decode, "throughput": run_throughput, "prefill": run_prefill}[mode]
        document = {**head, **run(bench, save)}
        if mode == "decode":
            borrow_baselines(document, bench.variants[0].label)
        save(document)
    except (KvseekError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    show(document, arguments.json, print_device_report)
    return 0
