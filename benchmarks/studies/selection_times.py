"""Time of the selection alone, a layer: graphs of nothing but selections, on a GPU.

    python benchmarks/studies/selection_times.py --methods pariskv,nested --contexts 131072,1048576 --batches 1,4,8

A graph holds the selections of several layers, one after another as in a step but for what lies between them there. Each layer
has an index of its own, so that no cache holds what is read; layers that a method leaves dense are passed over. What a selection
has to read is what the method says (costs.py); TB/s is that over the time.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvseek.benchmarks.device.bench import Bench
from kvseek.benchmarks.device.floors import costs_of
from kvseek.benchmarks.device.memory_plan import GIB, Cell
from kvseek.benchmarks.device.memory_rates import elapsed_seconds, timing_event
from kvseek.benchmarks.device.observers import capture_stream
from kvseek.benchmarks.device.options import DTYPES, SHORTEST, WORK_MEMORY
from kvseek.benchmarks.device.results import describe_variant
from kvseek.benchmarks.timing import Samples
from kvseek.core.errors import ConfigError
from kvseek.core.sizes import memory_size
from kvseek.measurement.flags import numbers
from kvseek.measurement.machine import describe, describe_gpu
from kvseek.measurement.output import run_command
from kvseek.measurement.variants import FORM, Variant, parse_variants

if TYPE_CHECKING:
    from kvseek.benchmarks.device.filling import Filler
    from kvseek.core.batch import Batch
    from kvseek.engine.cache.cache import Cache
    from kvseek.engine.cache.row_storage import RowStorage
    from kvseek.engine.model.cuda.graphs import DecodeStep, StepResult
    from kvseek.engine.retrieval import Retrieval

SELECTIONS = 32  # of a graph
WARMUP = 3  # replays that are not counted


class SelectionGraph:
    """The selections of a retrieval's layers for requests in slots 0, 1, ..., over and over."""

    def __init__(self, retrieval: Retrieval, queries: Tensor, requests: int) -> None:
        """Capture the graph; queries [layers, batch, H, D], of a batch that a graph has room for."""
        self.retrieval, self.queries, self.requests = retrieval, queries, requests
        self._step = self._capture()

    @torch.inference_mode()
    def seconds(self) -> float:
        """Device seconds of a selection, the mean of a replay's."""
        states, _ = self.retrieval.begin_step([0] * self.requests, list(range(self.requests)))
        self._step.load(states)
        first, last = timing_event(), timing_event()
        first.record()
        self._step.launch()
        last.record()
        torch.cuda.synchronize()
        return elapsed_seconds(first, last) / SELECTIONS

    def _capture(self) -> DecodeStep:
        from kvseek.engine.model.cuda.graphs import DecodeStep

        cache: Cache = self.retrieval.cache
        step = DecodeStep(self.queries.shape[1], cache.padding_state(), cache.extents.device_table, self._launch)
        with torch.inference_mode():
            step.capture(capture_stream(self.queries.device), torch.cuda.graph_pool_handle())
        return step

    def _launch(self, batch: Batch) -> StepResult:
        from kvseek.engine.model.cuda.graphs import StepResult

        indexes, last, made = self.retrieval.indexes, self.queries[0], 0
        dense: set[int] = set()  # layers that attend to every row
        for layer in itertools.cycle(range(len(indexes))):
            selection = indexes[layer].select(self.queries[layer], batch)
            if selection is None:
                dense.add(layer)
                if len(dense) == len(indexes):
                    raise ConfigError(f"--layers = {len(indexes)}: all of them attend to every row; take more")
                continue
            last, made = selection.rows, made + 1
            if made == SELECTIONS:
                break
        return StepResult(last, last)


def measure(bench: Bench, variant: Variant, rows: RowStorage, filler: Filler, cell: Cell) -> dict[str, Any]:
    """A variant at one context and batch."""
    from kvseek.core.batch import bucket_of

    cache = bench.new_cache(rows, variant, [cell])
    indexes = bench.indexes(variant, cache, [cell])
    retrieval = bench.retrieval(variant, cache, indexes, [cell], hot_rows=False)
    filler.fill(cell, [(cache, [indexes])])
    model, batch = bench.model, bucket_of(cell.batch)
    filler.source.reseed(bench.arguments.seed + 1)
    source = filler.source.queries(model.num_heads, batch, bench.dtype)
    by_layer = [filler.layer_queries(layer, source).transpose(0, 1) for layer in range(model.num_layers)]
    graph = SelectionGraph(retrieval, torch.stack(by_layer).contiguous(), cell.batch)
    seconds = [graph.seconds() for _ in range(WARMUP + bench.arguments.repeats)][WARMUP:]
    costs = costs_of(bench.config(variant, [cell]), cache.lengths[0], bench.dtype.itemsize)
    read = cell.batch * model.num_kv_heads * (costs.index_bytes + costs.rerank_bytes)
    return {
        "method": variant.label,
        "context": cell.context,
        "batch": cell.batch,
        "layer_seconds": Samples(seconds).summary(),
        "bytes": read,
        "samples": seconds,
    }


def print_report(document: dict[str, Any]) -> None:
    """Print a row for each variant, context and batch."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{document['shape']} {document['dtype']}: one selection in a graph of {SELECTIONS}")
    for heading in ("method", "tokens", "batch", "µs", "fastest", "slowest", "MB read", "TB/s"):
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for entry in document["results"]:
        times = entry["layer_seconds"]
        table.add_row(
            entry["method"],
            f"{entry['context']:,}",
            str(entry["batch"]),
            *(f"{times[name] * 1e6:.1f}" for name in ("median", "min", "max")),
            f"{entry['bytes'] / 1e6:.1f}",
            f"{entry['bytes'] / times['median'] / 1e12:.2f}",
        )
    console = Console()
    console.width = max(console.width, 100)
    console.print(table)
    for missing in document["skipped"]:
        text = f"{missing['context']:,} × {missing['batch']} {missing['reason']}"
        console.print(text, highlight=False, markup=False)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings; raises ConfigError."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--methods", required=True, help=f"comma list of {FORM}")
    add("--shape", default="llama-3.1-8b")
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--contexts", default="131072", help="comma list of cached tokens a request")
    add("--batches", default="1", help="comma list of requests a step")
    add("--layers", type=int, default=4, help=f"indexes that are searched in turn; a divisor of {SELECTIONS}")
    add("--offload", choices=("never", "always"), default="never", help="where rows lie, which some methods read")
    add("--repeats", type=int, default=31, help="replays that are timed")
    about = "pinned host memory that rows may use (default: 64GiB)"
    add("--host_memory", type=memory_size, metavar="SIZE", default=64 * GIB, help=about)
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="print JSON, not a table")
    add("--output", type=Path, help="write the JSON to this file too")
    arguments = parser.parse_args(argv)
    arguments.contexts = numbers("contexts", arguments.contexts, SHORTEST)
    arguments.batches = numbers("batches", arguments.batches, 1)
    if arguments.layers < 1 or SELECTIONS % arguments.layers:
        raise ConfigError(f"--layers = {arguments.layers}: must divide {SELECTIONS}; 4 is the default")
    if arguments.repeats < 1:
        raise ConfigError(f"--repeats = {arguments.repeats}: must be >= 1; 31 is the default")
    arguments.methods = parse_variants(arguments.methods)
    # What Bench reads beside these: nothing here is a whole decode step.
    vars(arguments).update(hot_rows="off", prefill=False, gpu_memory=None, work_memory=WORK_MEMORY)
    return arguments


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every variant in every cell; the JSON-able document."""
    cells = [Cell(context, batch) for context in arguments.contexts for batch in arguments.batches]
    bench = Bench(arguments, cells, arguments.layers)
    (phase,) = bench.phases([arguments.offload])
    if not phase.cells:
        raise ConfigError(f"--contexts, --batches: no cell fits ({'; '.join(phase.skipped.values())}); lower them")
    rows, filler = bench.row_storage(arguments.offload, phase.cells), bench.filler()
    results = []
    for variant in bench.variants:
        for cell in phase.cells:
            results.append(measure(bench, variant, rows, filler, cell))
            gc.collect()
            torch.cuda.empty_cache()
    return {
        "benchmark": "device selection times",
        "machine": describe(),
        "gpu": describe_gpu(bench.device),
        "methods": {variant.label: describe_variant(variant) for variant in bench.variants},
        **{name: getattr(arguments, name) for name in ("shape", "dtype", "layers", "offload", "repeats", "seed")},
        "skipped": [{"context": c.context, "batch": c.batch, "reason": why} for c, why in phase.skipped.items()],
        "results": results,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    return run_command(argv, parse, run, print_report)


if __name__ == "__main__":
    sys.exit(main())
