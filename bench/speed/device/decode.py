"""Time of decode steps on a GPU: methods × contexts × batches × where the rows lie; or tokens per second over the batch size.

Steps, phase by phase (memory_plan.py): a row pool is made once for all of its contexts and batches; methods come one after the
other, each in turns with the baseline. Methods differ in their windows, and may choose the order of a pool's rows, so each
gets a cache of its own over the pool, which is filled anew. Throughput: each method with as many requests as memory holds, rows
where offload auto puts them. bench/speed/README.md says what the figures mean.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvseek.bench.engines import free_memory
from kvseek.bench.machine import peak_memory_bytes
from kvseek.bench.output import progress
from kvseek.bench.speed.device.bench import ROOM, Bench
from kvseek.bench.speed.device.contestant import PART_REPEATS, DeviceContestant
from kvseek.bench.speed.device.filling import Filler
from kvseek.bench.speed.device.floors import Probe, Rates, Step, costs_of, work
from kvseek.bench.speed.device.memory_plan import Cell, Phase
from kvseek.bench.speed.device.options import MOST_STEPS, WARMUP
from kvseek.bench.timing import Samples, interleave, turns
from kvseek.bench.variants import Variant
from kvseek.core.config import EngineConfig
from kvseek.core.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from kvseek.bench.speed.device.filling import Target
    from kvseek.engine.cache.cache import Cache
    from kvseek.engine.cache.row_storage import RowStorage
    from kvseek.plugins.contract import Index

Save = Callable[[], None]
MOST_SECONDS = 15.0  # that a cell's steps may take, as long as there are at least LEAST_STEPS
LEAST_STEPS = 5
PAST_THE_PEAK = 0.5  # share of a method's best tokens per second below which larger batches are not tried


def describe_variant(variant: Variant) -> dict[str, Any]:
    """All settings of a variant, as they go into the result file."""
    return {"settings": dataclasses.asdict(variant.settings), "cache": dataclasses.asdict(variant.cache)}


def decode_result(
    bench: Bench,
    contestant: DeviceContestant,
    cell: Cell,
    samples: Samples,
    walls: Sequence[float],
    rates: Rates,
    baseline_seconds: float | None,
) -> dict[str, Any]:
    """Figures of one contestant at one cell; seconds, bytes and tokens. Measures the parts of a step first.

    A sample is the mean of a turn of steps, upkeep included. `baseline_seconds` is the baseline's median in the same turns; None
    where it did not run.
    """
    cache = contestant.cache
    tokens, retrieval = cache.tokens[0], cache.lengths[0]
    config, itemsize = contestant.decoder.config, bench.dtype.itemsize
    hits = contestant.hit_rate()  # of the timed steps
    parts = contestant.part_seconds()
    step = Step(retrieval, tokens - retrieval, cell.batch, cache.rows.layout.host_layers, hits)
    moved = work(config, step, itemsize)
    index = (
        contestant.decoder.retrieval.indexes[-1].bytes_per_token / bench.model.num_kv_heads
    )  # the first may be dense
    return with_times(
        {
            "name": contestant.name,
            "method": contestant.method,
            "hot_rows": contestant.hot,
            "host_layers": cache.rows.layout.host_layers,
            "batch": cell.batch,
            "attended_tokens": contestant.attended,
            "cached_tokens": tokens,
            "hit_rate": hits,
            "stages": parts,
            "bytes": moved.bytes_by_part(),
            "floor": moved.floor(rates),
            "dense_floor_seconds": dense_floor(bench.config(bench.variants[0], [cell]), step, itemsize, rates),
            "index_bytes_per_token_and_kv_head": index,
            "upkeep_seconds": statistics.mean(contestant.upkeep[contestant.warmup :]),
            "index_bytes": index * bench.model.num_kv_heads * len(bench.model.row_layers) * retrieval * cell.batch,
            "memory": memory(bench, contestant),
        },
        samples.seconds,
        walls,
        baseline_seconds,
    )


def dense_floor(baseline: EngineConfig, step: Step, itemsize: int, rates: Rates) -> float:
    """Compute the floor of the baseline's step, whose rows lie where the contestant's do and are never hot."""
    return work(baseline, dataclasses.replace(step, hit_rate=0.0), itemsize).floor(rates)["total"]


def with_times(
    entry: dict[str, Any], seconds: Sequence[float], walls: Sequence[float], baseline_seconds: float | None
) -> dict[str, Any]:
    """The entry with what follows from its step times: medians, tokens per second, ratios."""
    samples = Samples(list(seconds))
    return {
        **entry,
        "step_seconds": samples.summary(),
        "wall_seconds": Samples(list(walls)).summary(),
        "tokens_per_second": entry["batch"] / samples.median,
        "to_floor": samples.median / entry["floor"]["total"],
        "baseline_seconds": baseline_seconds,
        "to_baseline": None if baseline_seconds is None else samples.median / baseline_seconds,
        "samples": samples.seconds,
        "walls": list(walls),
    }


def pooled(entry: dict[str, Any], samples: Samples, walls: Sequence[float]) -> dict[str, Any]:
    """The baseline's entry with the times of its turns with another method; its ratio is 1."""
    seconds = [*entry["samples"], *samples.seconds]
    return with_times(entry, seconds, [*entry["walls"], *walls], Samples(seconds).median)


def memory(bench: Bench, contestant: DeviceContestant) -> dict[str, int]:
    """Bytes now, of all contestants together; the row pools are the contestant's own."""
    free, total = torch.cuda.mem_get_info(bench.device)
    layout = contestant.cache.rows.layout
    return {
        "device_used": total - free,
        "device_allocated_peak": torch.cuda.max_memory_allocated(bench.device),
        "host_resident_peak": peak_memory_bytes(),
        "rows_on_device": layout.device_bytes,
        "rows_in_host_memory": layout.host_bytes,
    }


def borrow_baselines(document: dict[str, Any], baseline: str) -> None:
    """Give results without a ratio the baseline of another phase at the same context and batch, and say so.

    Phases do not run in turns: such a ratio holds for one machine and run, but not within one minute.
    """
    known: dict[tuple[int, int], float] = {}
    cells = [cell for phase in document["phases"] for cell in phase["cells"]]
    for cell in cells:
        for entry in cell["results"]:
            if entry["method"] == baseline:
                known.setdefault((cell["context"], cell["batch"]), entry["step_seconds"]["median"])
    for cell in cells:
        median = known.get((cell["context"], cell["batch"]))
        for entry in cell["results"]:
            if entry["to_baseline"] is None and median is not None:
                entry["to_baseline"] = entry["step_seconds"]["median"] / median
                entry["baseline_of_another_phase"] = True


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
                found["rates"] = dataclasses.asdict(probe.rates())
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


def run_throughput(bench: Bench, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Every method at every context and batch, one after the other: no two of them fit at a time."""
    filler = bench.filler()
    document: dict[str, Any] = {"results": [], "skipped": []}
    variants = list(bench.variants)
    for variant in variants:
        bench.load_alone(variant)
        free_memory()
        for context in bench.arguments.contexts:
            _run_method(bench, variant, context, filler, document, save)
    document["peaks"] = peaks(document["results"], variants[0].label)
    return document


def _run_method(
    bench: Bench,
    variant: Variant,
    context: int,
    filler: Filler,
    document: dict[str, Any],
    save: Callable[[dict[str, Any]], None],
) -> None:
    best, method = 0.0, variant.label
    for batch in bench.arguments.batches:
        cell = Cell(context, batch)
        (phase,) = bench.phases(["auto"], [cell])
        reason = phase.skipped.get(cell)
        if reason is None:
            progress(f"{method}: {context:,} tokens × {batch}")
            reason = _try(bench, variant, cell, filler, document)
            free_memory()
        if reason is not None:
            document["skipped"].append({"method": method, "context": context, "batch": batch, "reason": reason})
            return
        rate = document["results"][-1]["tokens_per_second"]
        best = max(best, rate)
        save(document)
        if rate < PAST_THE_PEAK * best:
            reason = f"past the peak: less than {PAST_THE_PEAK:.0%} of the best batch's tokens per second before it"
            document["skipped"].append({"method": method, "context": context, "batch": f"> {batch}", "reason": reason})
            return


def _try(bench: Bench, variant: Variant, cell: Cell, filler: Filler, document: dict[str, Any]) -> str | None:
    """Measure a cell; the reason if it does not fit after all."""
    try:
        document["results"].append(_measure(bench, variant, cell, filler))
    except (CapacityError, torch.OutOfMemoryError) as error:
        return str(error).splitlines()[0]
    return None


def contestant_alone(bench: Bench, variant: Variant, cell: Cell, offload: str, filler: Filler) -> DeviceContestant:
    """A variant that has begun to decode a cell, over rows and a cache of its own."""
    cache = bench.new_cache(bench.row_storage(offload, [cell]), variant, [cell])
    indexes, hot = bench.indexes(variant, cache, [cell]), bench.arguments.hot_rows != "off"
    decoder = bench.decoder(variant, cache, indexes, [cell], hot)
    contestant = DeviceContestant(variant.label, variant.label, decoder)
    filler.fill(cell, [(cache, [indexes])])
    contestant.start(cell)
    return contestant


def _measure(bench: Bench, variant: Variant, cell: Cell, filler: Filler) -> dict[str, Any]:
    contestant, method = contestant_alone(bench, variant, cell, "auto", filler), variant.label
    first = max(contestant.step() for _ in range(2))  # captures the graph, too
    steps = max(LEAST_STEPS, min(bench.arguments.steps, int(MOST_SECONDS / first)))
    warmup = WARMUP if steps > LEAST_STEPS else 1
    timed = interleave({method: contestant.step}, steps, steps, warmup, timer=device_seconds)[method]
    samples = turns(timed, bench.arguments.block)
    return {
        "method": method,
        "context": cell.context,
        "batch": cell.batch,
        "hot_rows": contestant.hot,
        "hit_rate": contestant.hit_rate(),
        "host_layers": contestant.cache.rows.layout.host_layers,
        "step_seconds": samples.summary(),
        "tokens_per_second": cell.batch / samples.median,
        "memory": memory(bench, contestant),
        "samples": samples.seconds,
    }


def peaks(results: list[dict[str, Any]], baseline: str) -> list[dict[str, Any]]:
    """Best tokens per second of each method at each context over its batches, and the ratio of the bests."""
    best: dict[tuple[int, str], float] = {}
    for entry in results:
        key = entry["context"], entry["method"]
        best[key] = max(best.get(key, 0.0), entry["tokens_per_second"])
    found = []
    for (context, method), rate in best.items():
        base = best.get((context, baseline))
        ratio = None if base is None else rate / base
        found.append({"context": context, "method": method, "tokens_per_second": rate, "to_baseline": ratio})
    return sorted(found, key=lambda peak: int(peak["context"]))
