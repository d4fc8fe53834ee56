"""Time of a decode step on a GPU: methods × contexts × batches × where the rows lie, in one process.

Phase by phase (memory_plan.py): a row pool is made once for all of its contexts and batches; methods come one after the
other, each in turns with the baseline. Methods differ in their windows, and may choose the order of a pool's rows, so each
gets a cache of its own over the pool, which is filled anew. bench/speed/README.md says what the figures mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvseek.bench.engines import free_memory
from kvseek.bench.output import progress
from kvseek.bench.timing import Samples, interleave, turns
from kvseek.core.errors import CapacityError, ConfigError

from .bench import ROOM, Bench
from .contestant import PART_REPEATS, DeviceContestant
from .floors import Rates, costs_of
from .memory_plan import Cell, Phase
from .memory_rates import Probe
from .options import MOST_STEPS, WARMUP
from .results import decode_result, pooled

if TYPE_CHECKING:
    from kvseek.bench.variants import Variant
    from kvseek.engine.cache.cache import Cache
    from kvseek.engine.cache.row_storage import RowStorage
    from kvseek.plugins.contract import Index

    from .filling import Filler, Target

Save = Callable[[], None]
READ_BYTES = 8 << 30  # of weights that a plain read reads


class PhasePools:
    """What a phase keeps while methods come and go: its rows and, where the baseline has its own, those.

    Attributes
    ----------
    rows : RowStorage
        For the methods, one after another.
    baseline_rows : RowStorage or None
        The baseline's, on the device; None where it shares `rows` or does not run.
    """

    def __init__(self, bench: Bench, phase: Phase) -> None:
        self.bench, self.phase = bench, phase
        self.shared = phase.offload == "never"  # the baseline's rows lie there too
        alone = len(bench.variants) == 1
        self.baseline_rows: RowStorage | None = None
        if not self.shared and phase.baseline:
            self.baseline_rows = bench.row_storage("never", phase.baseline)
        own = self.baseline_rows if alone else None
        self.rows = bench.row_storage(phase.offload, phase.cells) if own is None else own


class Comparison:
    """One variant beside the baseline, at all cells of a phase; None as variant: the baseline alone."""

    def __init__(self, bench: Bench, pools: PhasePools, variant: Variant | None, filler: Filler) -> None:
        self.bench, self.pools, self.variant, self.filler = bench, pools, variant, filler
        self.cells = pools.phase.cells
        self.targets: list[Target] = []
        self.contestants: list[DeviceContestant] = []
        self.baseline: DeviceContestant | None = None
        if variant is not None:
            cache = bench.new_cache(pools.rows, variant, self.cells)
            indexes = bench.indexes(variant, cache, self.cells)
            self.targets.append((cache, [indexes]))
            self._add_contestants(variant, cache, indexes)
        self._add_baseline()

    def run(self, cell: Cell, probe: Probe, found: dict[str, Any]) -> None:
        """Time the cell and add to `found`, its part of the result file."""
        arguments, used = self.bench.arguments, ROOM
        baseline = self.baseline if cell in self.pools.phase.baseline else None
        runs: list[DeviceContestant | None] = [*self.contestants] or [None]  # the baseline alone has one run
        upkeep_steps, upkeep_after = self.upkeep(cell)
        steps, warmup = max(arguments.steps, upkeep_steps), WARMUP + upkeep_after
        needed = warmup + steps + PART_REPEATS
        for contestant in runs:
            if used + needed > min(ROOM, *(cache.config.update - 1 for cache, _ in self.targets)):
                self.filler.fill(cell, self._targets(baseline))
                used = 0
            taking_part = [one for one in (baseline, contestant) if one is not None]
            if not taking_part:
                return
            for one in taking_part:
                one.start(cell, used if one is contestant else 0, warmup)
            calls = {one.name: one.step for one in taking_part}
            timed = interleave(calls, steps, arguments.block, warmup, timer=device_seconds)
            samples = {name: turns(one, arguments.block) for name, one in timed.items()}
            if "rates" not in found:
                memory = self.bench.weights.flat[: READ_BYTES // self.bench.dtype.itemsize]
                found["rates"] = dataclasses.asdict(probe.rates(memory))
            self._record(cell, found, baseline, contestant, samples)
            used = contestant.done if contestant is not None else 0

    def upkeep(self, cell: Cell) -> tuple[int, int]:
        """Steps in which the variant's upkeep comes round once, at most MOST_STEPS with those that come before it: these too."""
        if self.variant is None:
            return 1, 0
        bench = self.bench
        costs = costs_of(bench.config(self.variant, [cell]), cell.context, bench.dtype.itemsize)
        after = min(MOST_STEPS - 1, costs.upkeep_after)
        return min(MOST_STEPS - after, costs.upkeep_steps), after

    def _record(
        self,
        cell: Cell,
        found: dict[str, Any],
        baseline: DeviceContestant | None,
        contestant: DeviceContestant | None,
        samples: dict[str, Samples],
    ) -> None:
        rates, median = Rates(**found["rates"]), None
        if baseline is not None:
            timed, walls = samples[baseline.name], baseline.wall[baseline.warmup :]
            median = timed.median
            if found["results"] and found["results"][0]["name"] == baseline.name:
                found["results"][0] = pooled(found["results"][0], timed, walls)
            else:
                entry = decode_result(self.bench, baseline, cell, timed, walls, rates, median)
                found["results"].insert(0, entry)
        if contestant is not None:
            timed, walls = samples[contestant.name], contestant.wall[contestant.warmup :]
            found["results"].append(decode_result(self.bench, contestant, cell, timed, walls, rates, median))

    def _targets(self, baseline: DeviceContestant | None) -> list[Target]:
        """Those of who takes part in a cell."""
        caches = [one.cache for one in (*self.contestants, baseline) if one is not None]
        return [target for target in self.targets if any(target[0] is cache for cache in caches)]

    def _add_contestants(self, variant: Variant, cache: Cache, indexes: list[Index]) -> None:
        """With the last steps' rows kept on the device and without, where there are such rows."""
        wanted = {"both": (True, False), "on": (True,), "off": (False,)}[self.bench.arguments.hot_rows]
        for kept in wanted:
            decoder = self.bench.decoder(variant, cache, indexes, self.cells, kept)
            contestant = DeviceContestant(f"{variant.label} {self.pools.phase.offload}", variant.label, decoder)
            if contestant.hot:
                contestant.name += " hot"
            self.contestants.append(contestant)
            if kept and not contestant.hot:
                return  # it keeps no rows: the other would be the same

    def _add_baseline(self) -> None:
        bench, pools, variant = self.bench, self.pools, self.bench.variants[0]
        if not pools.phase.baseline:
            return
        cells = self.cells if pools.shared else pools.phase.baseline
        if pools.shared and self.targets:
            cache, index_sets = self.targets[0]
        else:
            own = pools.rows if pools.baseline_rows is None else pools.baseline_rows
            cache, index_sets = bench.new_cache(own, variant, cells), []
            self.targets.append((cache, index_sets))
        variant = variant.laid_out_as(cache.config)
        # Its indexes keep nothing, so they may stand beside a variant's own over one pool.
        indexes = bench.indexes(variant, cache, cells)
        index_sets.append(indexes)
        decoder = bench.decoder(variant, cache, indexes, cells, hot_rows=False)
        self.baseline = DeviceContestant(f"{variant.label} never", variant.label, decoder)


def device_seconds(call: Callable[[], object]) -> float:
    """Seconds that a contestant's step says it took on the device."""
    taken = call()
    assert isinstance(taken, float), "a contestant's step returns its seconds"
    return taken


def compared_variants(variants: Sequence[Variant]) -> list[Variant | None]:
    """Who comes beside the baseline, the first: the others one after another, or nobody."""
    return [*variants[1:]] or [None]


def run_decode(bench: Bench, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """All phases; `save` gets the document whenever it has grown."""
    offloads = list(bench.arguments.offload)
    if not {"always", "never"} & set(offloads):
        offloads = ["never", *offloads]  # the baseline needs a phase
    phases = bench.phases(offloads)
    if not any(phase.cells for phase in phases):
        reasons = "; ".join(f"{cell.context} × {cell.batch}: {why}" for p in phases for cell, why in p.skipped.items())
        raise ConfigError(f"--contexts, --batches: no cell fits ({reasons}); lower them, or raise --host_memory")
    bench.load()
    probe, filler = Probe(bench.device), bench.filler()
    free_memory()
    document: dict[str, Any] = {"phases": []}
    for phase in phases:
        part: dict[str, Any] = {"offload": phase.offload, "skipped": skipped(phase), "cells": [], "errors": []}
        document["phases"].append(part)
        if phase.cells:
            _run_phase(bench, phase, filler, probe, part, lambda: save(document))
            free_memory()
    return document


def _run_phase(bench: Bench, phase: Phase, filler: Filler, probe: Probe, part: dict[str, Any], save: Save) -> None:
    """Every method by itself, beside the baseline. Memory that fails ends its turn, and is named."""
    try:
        pools = PhasePools(bench, phase)
    except (CapacityError, torch.OutOfMemoryError) as error:
        _fail(part, "the row pool", error)
        return
    kept: dict[Cell, dict[str, Any]] = {}
    for variant in compared_variants(bench.variants):
        try:
            _compare(bench, pools, variant, filler, probe, part, kept, save)
        except (CapacityError, torch.OutOfMemoryError) as error:
            _fail(part, bench.variants[0].label if variant is None else variant.label, error)
        free_memory()


def _compare(
    bench: Bench,
    pools: PhasePools,
    variant: Variant | None,
    filler: Filler,
    probe: Probe,
    part: dict[str, Any],
    kept: dict[Cell, dict[str, Any]],
    save: Save,
) -> None:
    comparison = Comparison(bench, pools, variant, filler)
    name = bench.variants[0].label if variant is None else variant.label
    for cell in pools.phase.cells:
        if variant is None and cell not in pools.phase.baseline:
            reason = "does not fit: the baseline's rows exceed the device"
            part["skipped"].append({"context": cell.context, "batch": cell.batch, "reason": reason})
            continue
        progress(f"{pools.phase.offload}: {name}: {cell.context:,} tokens × {cell.batch}")
        free_memory()  # pieces that fit this cell no longer
        found = kept.get(cell)
        if found is None:
            found = {"context": cell.context, "batch": cell.batch, "results": []}
        comparison.run(cell, probe, found)
        if cell not in kept:
            kept[cell] = found
            part["cells"].append(found)
        save()
    torch.cuda.synchronize()  # what indexes have under way reads the pool, which the next method gets, and their own memory


def _fail(part: dict[str, Any], name: str, error: Exception) -> None:
    part["errors"].append({"method": name, "error": str(error).splitlines()[0]})
    progress(f"{part['offload']}: {name}: {part['errors'][-1]['error']}")


def skipped(phase: Phase) -> list[dict[str, Any]]:
    """What does not fit and why, as it goes into the result file."""
    return [{"context": cell.context, "batch": cell.batch, "reason": why} for cell, why in phase.skipped.items()]
