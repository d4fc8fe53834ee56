"""What an eviction costs the decode steps beside it: `python benchmarks/studies/evictions.py --contexts 131072,1048576`.

Every `cache.update` tokens the oldest rows of the update buffer leave the window: a stream of their own copies them to the row
pool and adds their keys to the indexes of all layers, while the next steps run. One request of a shape with random weights and
synthetic keys decodes until that is due. *excess*: what the steps beside the eviction take in all beyond as many of the steps
before it. *shown*: host and device, between two steps, until the new places count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvseek.benchmarks.device.bench import Bench
from kvseek.benchmarks.device.decode import release
from kvseek.benchmarks.device.filling import Filler
from kvseek.benchmarks.device.memory_plan import Cell
from kvseek.benchmarks.device.options import parse
from kvseek.benchmarks.device.throughput import contestant_alone
from kvseek.core.errors import CapacityError
from kvseek.measurement.machine import describe, describe_gpu
from kvseek.measurement.output import write_result
from kvseek.measurement.variants import Variant

WARM_STEPS = 20  # that are not counted: the first one captures the graph


def measure(bench: Bench, variant: Variant, cell: Cell, offload: str, filler: Filler) -> dict[str, Any]:
    """Seconds of a method's steps alone and beside an eviction; the cell has one request."""
    contestant = contestant_alone(bench, variant, cell, offload, filler)
    cache, indexes = contestant.cache, contestant.decoder.retrieval.indexes
    length, steps = cache.lengths[0], list[float]()
    for _ in range(cache.config.update - 1):  # of whose places the first has a token already
        steps.append(contestant.step())
        cache.end_step([0], indexes)
    cache.begin_step([0], indexes)  # a contestant's tokens are one behind: now the buffer is full
    torch.cuda.synchronize()
    began = time.perf_counter()
    cache.begin_step([0], indexes)
    torch.cuda.synchronize()
    shown = time.perf_counter() - began
    if cache.lengths[0] != length + cache.config.update:
        raise CapacityError(f"{variant.label}: nothing was evicted after {len(steps)} steps")
    beside = steps[1 - cache.evict_ahead :]  # it began behind the step before these
    alone = statistics.median(steps[WARM_STEPS : -cache.evict_ahead])
    return {
        "method": variant.label,
        "context": cell.context,
        "offload": offload,
        "host_layers": cache.rows.layout.host_layers,
        "evicted": cache.config.update,
        "step_seconds": alone,
        "excess_seconds": sum(beside) - len(beside) * alone,
        "longest_seconds": max(beside),
        "shown_seconds": shown,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each method, context and place; with --output, write JSON too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", help="default: %(default)s")
    parser.add_argument("--methods", default="nested,pariskv", help="default: %(default)s")
    parser.add_argument("--contexts", default="131072", help="tokens of the request (default: %(default)s)")
    parser.add_argument("--offload", default="always,never", help="where rows lie (default: %(default)s)")
    parser.add_argument(
        "--host_memory", default="108GiB", help="pinned host memory that rows may use (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, help="write JSON there")
    own = parser.parse_args(argv)
    flags = ["--shape", own.shape, "--methods", own.methods, "--contexts", own.contexts, "--offload", own.offload]
    flags += ["--host_memory", own.host_memory]
    arguments = parse(flags)
    cells = [Cell(context, 1) for context in arguments.contexts]
    bench, results = Bench(arguments, cells, alone=True), list[dict[str, Any]]()
    filler, variants = bench.filler(), list(bench.variants)
    print(f"{'':12} {'tokens':>9} {'rows':>7} {'step ms':>8} {'excess ms':>9} {'longest ms':>10} {'shown ms':>8}")
    for variant in variants:
        bench.load_alone(variant)
        for cell in cells:
            for offload in arguments.offload:
                release()
                found = measure(bench, variant, cell, offload, filler)
                results.append(found)
                seconds = (found[f"{name}_seconds"] * 1e3 for name in ("step", "excess", "longest", "shown"))
                step, excess, longest, shown = seconds
                times = f"{step:8.2f} {excess:9.2f} {longest:10.2f} {shown:8.2f}"
                print(f"{variant.label:12} {cell.context:9,} {offload:>7} {times}", flush=True)
    if own.output:
        machine = {**describe(), "gpu": describe_gpu(bench.device)}
        write_result(own.output, {"benchmark": "evictions", "machine": machine, "shape": own.shape, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
