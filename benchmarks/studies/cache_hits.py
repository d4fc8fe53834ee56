"""What rows kept on the device save: one layer's selection and attention, rows in host memory, over synthetic decode steps.

    python benchmarks/studies/cache_hits.py --methods NAME,NAME:cache_steps=2,OTHER --context 32768 --budget 1024

A decoder of random weights asks random queries, in which a cache of earlier steps' rows finds little. Here the queries are
synthetic ones that look for a topic and keep to it for a while (synthetic_keys.py). Every step is a replay of a CUDA graph of one
layer's selection and attention, timed by events inside the graph; upkeep runs between two steps, untimed. Every variant is timed
with hot rows and without.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvseek.benchmarks.device.bench import Bench
from kvseek.benchmarks.device.memory_plan import GIB, Cell
from kvseek.benchmarks.device.observers import PartClock, capture_stream
from kvseek.benchmarks.device.options import DTYPES, SHORTEST, WORK_MEMORY
from kvseek.benchmarks.device.results import describe_variant
from kvseek.benchmarks.timing import Samples
from kvseek.core.errors import ConfigError
from kvseek.core.sizes import memory_size
from kvseek.measurement.machine import describe, describe_gpu
from kvseek.measurement.output import run_command
from kvseek.measurement.variants import FORM, Variant, parse_variants
from kvseek.plugins.attention.hot_rows import hit_rate

if TYPE_CHECKING:
    from kvseek.benchmarks.device.filling import Filler
    from kvseek.engine.cache.row_storage import RowStorage
    from kvseek.engine.model.graphs import DecodeStep, StepResult
    from kvseek.engine.retrieval import Retrieval
    from kvseek.plugins.batch import Batch

LAYERS = 4  # the last one is timed: methods may attend densely in the first ones
WARMUP = 8  # steps that fill the cache, not counted
MOST_STEPS = 240  # with the warm-up, fewer than the update buffer holds


class LayerRun:
    """One layer of a variant in slot 0, step after step."""

    def __init__(self, retrieval: Retrieval, queries: Tensor) -> None:
        """Capture the last layer; queries [steps, H, D] are those of the steps to come."""
        self.retrieval, self.index, self.queries = retrieval, retrieval.indexes[-1], queries
        self.hot = retrieval.hot_rows[-1] if retrieval.hot_rows else None
        self._query = torch.zeros_like(queries[:1])
        self._clock = PartClock()
        self._step = self._capture()

    @torch.inference_mode()
    def run(self, warmup: int) -> tuple[list[float], float]:
        """Device seconds of each step after the first `warmup`, and the share of their rows that were found."""
        seconds = []
        for number, query in enumerate(self.queries):
            if number == warmup and self.hot is not None:
                self.hot.hits.zero_()
            self._query.copy_(query[None])
            states, _ = self.retrieval.begin_step([0], [0])
            self._step.load(states)
            self._step.launch()
            torch.cuda.synchronize()
            seconds.append(self._clock.seconds()["layer"])
            self.index.refresh([0])
        return seconds[warmup:], hit_rate(self.retrieval.hot_rows[-1:]) or 0.0

    def _capture(self) -> DecodeStep:
        from kvseek.engine.model.graphs import DecodeStep

        cache = self.retrieval.cache
        step = DecodeStep(1, cache.padding_state(), cache.extents.device_table, self._launch)
        with torch.inference_mode():
            step.capture(capture_stream(self.queries.device), torch.cuda.graph_pool_handle())
        return step

    def _launch(self, batch: Batch) -> StepResult:
        from kvseek.engine.model.graphs import StepResult

        self._clock.restart()
        out = self.retrieval.attend(self.index.context.layer, self._query, batch)
        self._clock.part_ended("layer")
        return StepResult(out, out)


def measure(bench: Bench, variant: Variant, rows: RowStorage, filler: Filler, cell: Cell) -> list[dict[str, Any]]:
    """A variant with hot rows, if it keeps any, and without."""
    steps = bench.arguments.steps + WARMUP
    cache, found = bench.new_cache(rows, variant, [cell]), []
    for hot in (True, False):
        indexes = bench.indexes(variant, cache, [cell])
        retrieval = bench.retrieval(variant, cache, indexes, [cell], hot_rows=hot)
        filler.fill(cell, [(cache, [indexes])])
        queries = sought(bench, filler, steps)
        seconds, hits = LayerRun(retrieval, queries).run(WARMUP)
        kept = bool(retrieval.hot_rows)
        found.append(
            {
                "name": variant.label + (" hot" if kept else ""),
                "method": variant.method,
                "hot_rows": kept,
                "layer_seconds": Samples(seconds).summary(),
                "hit_rate": hits,
                "samples": seconds,
            }
        )
        if hot and not kept:
            break
    return found


def sought(bench: Bench, filler: Filler, steps: int) -> Tensor:
    """Queries [steps, H, D] of the last layer; the same for every variant."""
    filler.source.reseed(bench.arguments.seed + 1)
    queries = filler.source.queries(bench.model.num_heads, steps, bench.dtype)
    return filler.layer_queries(bench.model.num_layers - 1, queries).transpose(0, 1).contiguous()


def add_speed_ups(results: Sequence[dict[str, Any]]) -> None:
    """Add to each result how many times faster it is than its method's with the fewest rows found."""
    for entry in results:
        others = [other for other in results if other["method"] == entry["method"]]
        plain = min(others, key=lambda other: other["hit_rate"])
        entry["speed_up"] = plain["layer_seconds"]["median"] / entry["layer_seconds"]["median"]


def print_report(document: dict[str, Any]) -> None:
    """Print a row for each variant."""
    from rich.console import Console
    from rich.table import Table

    title = f"{document['shape']} {document['dtype']}, {document['context']:,} tokens on the host, {document['budget']:,} rows"
    table = Table(title=f"{title}: one layer's selection and attention, {document['steps']} steps")
    for heading in ("method", "µs", "fastest", "slowest", "found on the device", "× without"):
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for entry in document["results"]:
        times = (f"{entry['layer_seconds'][name] * 1e6:.1f}" for name in ("median", "min", "max"))
        table.add_row(entry["name"], *times, f"{entry['hit_rate']:.0%}", f"{entry['speed_up']:.2f}")
    console = Console()
    console.width = max(console.width, 100)
    console.print(table)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings; raises ConfigError."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--methods", required=True, help=f"comma list of {FORM}")
    add("--shape", default="llama-3.1-8b")
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--context", type=int, default=32_768, help="cached tokens")
    add("--budget", type=int, default=1024, help="rows of the retrieval region per KV head")
    add("--steps", type=int, default=64, help="steps that are timed")
    about = "pinned host memory that rows may use (default: 16GiB)"
    add("--host_memory", type=memory_size, metavar="SIZE", default=16 * GIB, help=about)
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="print JSON, not a table")
    add("--output", type=Path, help="write the JSON to this file too")
    arguments = parser.parse_args(argv)
    limits = {"context": (SHORTEST, 1 << 20), "budget": (1, 1 << 16), "steps": (1, MOST_STEPS)}
    for name, (low, high) in limits.items():
        value = getattr(arguments, name)
        if not low <= value <= high:
            raise ConfigError(f"--{name} = {value}: must be between {low} and {high}; leave it out for the default")
    variants = parse_variants(arguments.methods)
    arguments.methods = [variant.with_fields(top_k=arguments.budget) for variant in variants]
    for variant in arguments.methods:
        _ = variant.settings  # raises for a method that keeps no number of rows
    # What Bench reads beside these: nothing here is a whole decode step.
    vars(arguments).update(hot_rows="on", prefill=False, gpu_memory=None, work_memory=WORK_MEMORY)
    return arguments


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every variant on one pool; the JSON-able document."""
    cell = Cell(arguments.context, 1)
    bench = Bench(arguments, [cell], LAYERS)
    (phase,) = bench.phases(["always"])
    if phase.skipped:
        raise ConfigError(f"--context = {arguments.context}: {phase.skipped[cell]}; lower it or raise --host_memory")
    rows, filler = bench.row_storage("always", [cell]), bench.filler()
    results = [entry for variant in bench.variants for entry in measure(bench, variant, rows, filler, cell)]
    add_speed_ups(results)
    return {
        "benchmark": "device cache hits",
        "machine": describe(),
        "gpu": describe_gpu(bench.device),
        "methods": {variant.label: describe_variant(variant) for variant in bench.variants},
        **{name: getattr(arguments, name) for name in ("shape", "dtype", "context", "budget", "steps", "seed")},
        "results": results,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    return run_command(argv, parse, run, print_report)


if __name__ == "__main__":
    sys.exit(main())
