"""Time of the selection alone, a layer: graphs of nothing but selections, on a GPU.

    python bench/speed/studies/selection_times.py --methods pariskv,nested --contexts 131072,1048576 --batches 1,4,8

A graph holds the selections of several layers, one after another as in a step but for what lies between them there. Each layer
has an index of its own, so that no cache holds what is read; layers that a method leaves dense are passed over. What a selection
has to read is what the method says (measurements.py); TB/s is that over the time.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvseek.bench.engines import free_memory
from kvseek.bench.output import Figure, command, figure
from kvseek.bench.speed.device.bench import Bench
from kvseek.bench.speed.device.contestant import capture_stream
from kvseek.bench.speed.device.decode import describe_variant, skipped
from kvseek.bench.speed.device.floors import costs_of, elapsed_seconds, timing_event
from kvseek.bench.speed.device.memory_plan import Cell
from kvseek.bench.speed.studies.common import make_bench, print_figures, result, study_parser
from kvseek.bench.timing import Samples
from kvseek.bench.variants import Variant
from kvseek.core.errors import ConfigError

if TYPE_CHECKING:
    from kvseek.bench.speed.device.filling import Filler
    from kvseek.core.batch import Batch
    from kvseek.engine.cache.cache import Cache
    from kvseek.engine.cache.row_storage import RowStorage
    from kvseek.engine.model.cuda.steps import DecodeStep, StepResult
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
        from kvseek.engine.model.cuda.steps import DecodeStep

        cache: Cache = self.retrieval.cache
        step = DecodeStep(self.queries.shape[1], cache.padding_state(), cache.extents.device_table, self._launch)
        with torch.inference_mode():
            step.capture(capture_stream(self.queries.device), torch.cuda.graph_pool_handle())
        return step

    def _launch(self, batch: Batch) -> StepResult:
        from kvseek.engine.model.cuda.steps import StepResult

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


FIGURES: dict[str, Figure] = {
    "tokens": lambda entry: f"{entry['context']:,}",
    "batch": lambda entry: str(entry["batch"]),
    "µs": figure("layer_seconds.median", ".1f", 1e6),
    "fastest": figure("layer_seconds.min", ".1f", 1e6),
    "slowest": figure("layer_seconds.max", ".1f", 1e6),
    "MB\nread": lambda entry: f"{entry['bytes'] / 1e6:.1f}",
    "TB/s": lambda entry: f"{entry['bytes'] / entry['layer_seconds']['median'] / 1e12:.2f}",
}


def print_report(document: dict[str, Any]) -> None:
    """Print a row for each variant, context and batch."""
    print_figures(document, FIGURES)
    for missing in document["skipped"]:
        print(f"{missing['context']:,} × {missing['batch']} {missing['reason']}")


def run(own: argparse.Namespace) -> dict[str, Any]:
    """Measure every variant in every cell; the JSON-able document."""
    if own.layers < 1 or SELECTIONS % own.layers:
        raise ConfigError(f"--layers = {own.layers}: must divide {SELECTIONS}; 4 is the default")
    bench = make_bench(own, "--hot_rows", "off", layers=own.layers)
    offload, *more = bench.arguments.offload
    if more:
        raise ConfigError(f"--offload = {own.offload!r}: must be one mode; name one")
    (phase,) = bench.phases([offload])
    if not phase.cells:
        raise ConfigError(f"--contexts, --batches: no cell fits ({'; '.join(phase.skipped.values())}); lower them")
    rows, filler = bench.row_storage(offload, phase.cells), bench.filler()
    results = []
    for variant, cell in itertools.product(bench.variants, phase.cells):
        results.append(measure(bench, variant, rows, filler, cell))
        free_memory()
    settings = {name: getattr(bench.arguments, name) for name in ("dtype", "repeats", "seed")}
    described = {variant.label: describe_variant(variant) for variant in bench.variants}
    settings |= {"layers": own.layers, "offload": offload, "methods": described, "skipped": skipped(phase)}
    return result("device selection times", bench, results, **settings)


DEFAULTS = {"methods": "pariskv,nested", "contexts": "131072", "batches": "1", "offload": "never", "repeats": "31"}
PARSER = study_parser(__doc__, **DEFAULTS, dtype="bfloat16", host_memory="64GiB")
LAYERS = f"indexes that are searched in turn; a divisor of {SELECTIONS}"
PARSER.add_argument("--layers", type=int, default=4, help=LAYERS)
main = command(PARSER.parse_args, run, print_report)

if __name__ == "__main__":
    sys.exit(main())
