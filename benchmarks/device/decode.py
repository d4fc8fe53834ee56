"""Time of a decode step on a GPU: methods × contexts × batches × where the rows lie, in one process.

Phase by phase (memory_plan.py): a row pool is made once for all of its contexts and batches; methods come one after the
other, each in turns with the baseline (comparison.py). benchmarks/README.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from typing import Any

import torch

from kvseek.core.errors import CapacityError, ConfigError
from kvseek.measurement.variants import Variant

from .bench import Bench
from .comparison import Comparison, PhasePools, compared_variants
from .filling import Filler
from .memory_plan import Cell, Phase
from .memory_rates import Probe

Save = Callable[[], None]


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
    release()
    document: dict[str, Any] = {"phases": []}
    for phase in phases:
        part: dict[str, Any] = {"offload": phase.offload, "skipped": skipped(phase), "cells": [], "errors": []}
        document["phases"].append(part)
        if phase.cells:
            _run_phase(bench, phase, filler, probe, part, lambda: save(document))
            release()
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
        release()


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
        release()  # pieces that fit this cell no longer
        found = kept.get(cell)
        if found is None:
            found = {"context": cell.context, "batch": cell.batch, "results": [], "synthetic_queries": {}}
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


def cells_of(arguments: argparse.Namespace) -> list[Cell]:
    """Every context with every batch."""
    return [Cell(context, batch) for context in arguments.contexts for batch in arguments.batches]


def release() -> None:
    """Give the memory of what is no longer referred to back, so that the next one finds it."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def progress(text: str) -> None:
    """Say on stderr what is being done: a run takes minutes."""
    print(text, file=sys.stderr, flush=True)
