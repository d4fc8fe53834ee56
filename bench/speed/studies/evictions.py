"""What an eviction costs the decode steps beside it: `python bench/speed/studies/evictions.py --contexts 131072,1048576`.

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
from functools import partial
from typing import Any

import torch

from kvseek.bench.engines import free_memory
from kvseek.bench.output import Figure, command, figure
from kvseek.bench.speed.device.bench import Bench
from kvseek.bench.speed.device.decode import contestant_alone
from kvseek.bench.speed.device.filling import Filler
from kvseek.bench.speed.device.memory_plan import Cell
from kvseek.bench.speed.studies.common import make_bench, print_figures, result, study_parser
from kvseek.bench.variants import Variant
from kvseek.core.errors import CapacityError

WARM_STEPS = 20  # that are not counted: the first one captures the graph
FIGURES: dict[str, Figure] = {
    "tokens": lambda entry: f"{entry['context']:,}",
    "rows": lambda entry: str(entry["offload"]),
    **{f"{name}\nms": figure(f"{name}_seconds", ".2f", 1e3) for name in ("step", "excess", "longest", "shown")},
}


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


def run(own: argparse.Namespace) -> dict[str, Any]:
    """Every method, context and place."""
    bench, results = make_bench(own), list[dict[str, Any]]()
    filler = bench.filler()
    for variant in list(bench.variants):
        bench.load_alone(variant)
        for cell in bench.cells:
            for offload in bench.arguments.offload:
                free_memory()
                results.append(measure(bench, variant, cell, offload, filler))
    return result("evictions", bench, results)


DEFAULTS = {"methods": "nested,pariskv", "contexts": "131072", "offload": "always,never", "host_memory": "108GiB"}
main = command(study_parser(__doc__, **DEFAULTS).parse_args, run, partial(print_figures, figures=FIGURES))


if __name__ == "__main__":
    sys.exit(main())
