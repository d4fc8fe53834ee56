"""`kvseek bench --device cuda`: from the command line to a result file and a table."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvseek.engine.errors import KvseekError

from .device_decode import cells_of, run_decode
from .device_options import parse
from .device_prefill import run_prefill
from .device_report import print_device_report
from .device_results import borrow_baselines
from .device_setup import Bench
from .device_throughput import run_throughput
from .machine import describe, describe_gpu

Save = Callable[[dict[str, Any]], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    try:
        arguments = parse(argv)
        bench = Bench(arguments, cells_of(arguments))
        mode = "throughput" if arguments.throughput else "prefill" if arguments.prefill else "decode"
        head = {"benchmark": "device", "mode": mode, "machine": describe(), "gpu": describe_gpu(bench.device)}
        head |= {"shape": arguments.shape, "dtype": arguments.dtype, "weights": arguments.weights}
        head |= {"steps": arguments.steps, "block": arguments.block, "seed": arguments.seed}

        def save(part: dict[str, Any]) -> None:
            if arguments.output:
                write(arguments.output, {**head, **part})

        run = {"decode": run_decode, "throughput": run_throughput, "prefill": run_prefill}[mode]
        document = {**head, **run(bench, save)}
        if mode == "decode":
            borrow_baselines(document, bench.methods[0])
        save(document)
    except (KvseekError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(document, indent=2))
    else:
        print_device_report(document)
    return 0


def write(path: Path, document: dict[str, Any]) -> None:
    """Write a result file, whole or not at all: a run may be ended at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    part.replace(path)
