"""Results of the GPU benchmark: from samples to figures, and how they compare."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvseek.bench.machine import peak_memory_bytes
from kvseek.bench.timing import Samples
from kvseek.bench.variants import Variant
from kvseek.core.config import EngineConfig

from .floors import Rates, Step, work
from .memory_plan import Cell

if TYPE_CHECKING:
    from .bench import Bench
    from .contestant import DeviceContestant


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
            "index_bytes": index * bench.model.num_kv_heads * bench.model.num_layers * retrieval * cell.batch,
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
