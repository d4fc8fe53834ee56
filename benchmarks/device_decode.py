"""Time of a decode step on a GPU: methods × contexts × batches × where the rows lie, in one process.

Phase by phase (device_memory.py): a row pool is made once for all of its contexts and batches, filled, and everything
that shares it is timed in turns. benchmarks/README.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvseek.engine.errors import CapacityError, ConfigError

from .device_contestants import DeviceContestant
from .device_memory import Cell, Phase
from .device_options import WARMUP
from .device_results import add_ratios, decode_result
from .device_setup import Bench, Filler
from .floors import Rates
from .probe import Probe, random_row_offsets
from .retrieval_check import check_retrieval
from .timing import interleave

Save = Callable[[], None]
READ_BYTES = 8 << 30  # of weights that a plain read reads
PROBED_ROWS = 100_000  # scattered rows that are gathered to measure their rate


class Contest:
    """One phase: its caches, and the decoders that run on them."""

    def __init__(self, bench: Bench, phase: Phase, filler: Filler) -> None:
        self.bench, self.phase, self.filler = bench, phase, filler
        baseline, *others = bench.methods
        hot = {"both": (True, False), "on": (True,), "off": (False,)}[bench.arguments.hot_rows]
        self.targets: list[tuple[Any, list[list[Any]]]] = []
        self.baseline: DeviceContestant | None = None
        self.others: list[DeviceContestant] = []
        shared = phase.offload == "never"  # the baseline's rows lie there too
        if others or shared:
            self.cache = bench.cache(phase.offload, phase.cells)
            self.targets.append((self.cache, []))
            for method in others:
                self._add(method, hot if self.cache.plan.host_layers else (False,))
        if shared:
            self._add_baseline(baseline, 0, phase.cells)
        elif phase.baseline:
            self.targets.append((bench.cache("never", phase.baseline), []))
            self._add_baseline(baseline, len(self.targets) - 1, phase.baseline)

    def contestants(self, cell: Cell) -> list[DeviceContestant]:
        """Who runs at a cell, the baseline first."""
        with_baseline = self.baseline is not None and cell in self.phase.baseline
        return [*([self.baseline] if with_baseline and self.baseline else []), *self.others]

    def run(self, cell: Cell, probe: Probe) -> dict[str, Any]:
        """Fill, time, look into stages and selections; the cell's part of the result file."""
        contestants, arguments = self.contestants(cell), self.bench.arguments
        caches = [contestant.cache for contestant in contestants]
        self.filler.fill(cell, [target for target in self.targets if any(target[0] is cache for cache in caches)])
        for contestant in contestants:
            contestant.start(cell)
        calls = {contestant.name: contestant.step for contestant in contestants}
        samples = interleave(calls, arguments.steps, arguments.block, WARMUP, timer=device_seconds)
        walls = {contestant.name: contestant.wall[WARMUP:] for contestant in contestants}
        rates = self.rates(probe)
        results = [
            decode_result(self.bench, contestant, cell, samples[contestant.name], walls[contestant.name], rates)
            for contestant in contestants
        ]
        return {
            "context": cell.context,
            "batch": cell.batch,
            "rates": dataclasses.asdict(rates),
            "results": results,
            "synthetic_queries": self._check(),
        }

    def rates(self, probe: Probe) -> Rates:
        """What the memory can do at this moment; rows of the last layer, which lie in host memory if any layer's do."""
        cache, bench = self.targets[0][0], self.bench
        model, itemsize, layer = bench.model, bench.dtype.itemsize, bench.model.num_layers - 1
        stride, extents = cache.extent_stride(layer), cache.plan.capacity
        shape = (extents, stride, model.num_kv_heads, model.head_dim, itemsize, bench.device)
        offsets = random_row_offsets(PROBED_ROWS, *shape)
        weights = bench.weights.flat[: READ_BYTES // itemsize]
        return probe.rates(weights, cache.rows_pointer(layer), offsets, 2 * model.head_dim * itemsize)

    def _add(self, method: str, hot: Sequence[bool]) -> None:
        cache, index_sets = self.targets[0]
        indexes = self.bench.indexes(method, cache, self.phase.cells)
        index_sets.append(indexes)
        for kept in hot:
            decoder = self.bench.decoder(method, cache, indexes, self.phase.cells, kept)
            name = f"{method} {self.phase.offload}" + (" hot" if kept else "")
            self.others.append(DeviceContestant(name, method, decoder, kept))

    def _add_baseline(self, method: str, target: int, cells: Sequence[Cell]) -> None:
        cache, index_sets = self.targets[target]
        indexes = self.bench.indexes(method, cache, cells)
        index_sets.append(indexes)
        decoder = self.bench.decoder(method, cache, indexes, cells, hot_rows=False)
        self.baseline = DeviceContestant(f"{method} never", method, decoder, hot=False)

    def _check(self) -> dict[str, Any]:
        """What queries that look for something would change, by method: see retrieval_check.py."""
        checks = {}
        for contestant in self.others:
            if contestant.method not in checks:
                found = check_retrieval(contestant.decoder.indexes[0], self.filler)
                if found is not None:
                    checks[contestant.method] = found
        return checks


def run_decode(bench: Bench, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """All phases; `save` gets the document whenever it has grown."""
    offloads = list(bench.arguments.offload)
    if not {"always", "never"} & set(offloads):
        offloads = ["never", *offloads]  # the baseline needs a phase
    phases = bench.phases(offloads)
    if not any(phase.cells for phase in phases):
        reasons = "; ".join(f"{cell.context} × {cell.batch}: {why}" for p in phases for cell, why in p.skipped.items())
        raise ConfigError(f"--contexts, --batches: no cell fits ({reasons}); lower them, or raise --host_gib")
    bench.load()
    probe, filler = Probe(bench.device), Filler(bench, bench.arguments.seed)
    release()
    document: dict[str, Any] = {"phases": []}
    for phase in phases:
        part: dict[str, Any] = {"offload": phase.offload, "skipped": skipped(phase), "cells": []}
        document["phases"].append(part)
        if phase.cells:
            _run_phase(bench, phase, filler, probe, part, lambda: save(document))
            release()
    return document


def _run_phase(bench: Bench, phase: Phase, filler: Filler, probe: Probe, part: dict[str, Any], save: Save) -> None:
    try:
        contest = Contest(bench, phase, filler)
        for cell in phase.cells:
            if not contest.contestants(cell):
                reason = "does not fit: the baseline's rows exceed the device"
                part["skipped"].append({"context": cell.context, "batch": cell.batch, "reason": reason})
                continue
            progress(f"{phase.offload}: {cell.context:,} tokens × {cell.batch}")
            release()  # pieces that fit this cell no longer
            found = contest.run(cell, probe)
            add_ratios(found["results"], bench.methods[0])
            part["cells"].append(found)
            save()
    except (CapacityError, torch.OutOfMemoryError) as error:
        part["error"] = str(error).splitlines()[0]
        progress(f"{phase.offload}: {part['error']}")


def skipped(phase: Phase) -> list[dict[str, Any]]:
    """What does not fit and why, as it goes into the result file."""
    return [{"context": cell.context, "batch": cell.batch, "reason": why} for cell, why in phase.skipped.items()]


def cells_of(arguments: argparse.Namespace) -> list[Cell]:
    """Every context with every batch."""
    return [Cell(context, batch) for context in arguments.contexts for batch in arguments.batches]


def device_seconds(call: Callable[[], object]) -> float:
    """Seconds that a contestant's step says it took on the device."""
    taken = call()
    assert isinstance(taken, float), "a contestant's step returns its seconds"
    return taken


def release() -> None:
    """Give the memory of what is no longer referred to back, so that the next phase finds it."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def progress(text: str) -> None:
    """Say on stderr what is being done: a run takes minutes."""
    print(text, file=sys.stderr, flush=True)
