"""Tokens per second over the batch size: each method with as many requests as memory holds, rows where offload auto
puts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvseek.bench.engines import free_memory
from kvseek.bench.output import progress
from kvseek.bench.timing import interleave, turns
from kvseek.bench.variants import Variant
from kvseek.core.errors import CapacityError

from .bench import Bench
from .contestant import DeviceContestant
from .decode import device_seconds
from .filling import Filler
from .memory_plan import Cell
from .options import WARMUP
from .results import memory

MOST_SECONDS = 15.0  # that a cell's steps may take, as long as there are at least LEAST_STEPS
LEAST_STEPS = 5
PAST_THE_PEAK = 0.5  # share of a method's best tokens per second below which larger batches are not tried


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
