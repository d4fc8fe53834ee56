"""Results of the decode benchmark: from samples to figures, from figures to a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from kvseek.benchmarks.contestants import Contestant, TransformersContestant
from kvseek.benchmarks.parts import GROUPS, part_groups
from kvseek.benchmarks.timing import Samples
from kvseek.engine.model.weight_only import NONE

TABLE_WIDTH = 150  # columns that the table needs unwrapped


def result(contestant: Contestant, samples: Samples, baseline: Contestant) -> dict[str, Any]:
    """Figures of one contestant; seconds, bytes and tokens."""
    moved = contestant.step_bytes()
    pairs = zip(contestant.tokens, baseline.tokens, strict=True)
    return {
        "name": contestant.name,
        "reference": isinstance(contestant, TransformersContestant),
        "prefill_seconds": contestant.prefill_seconds,
        "tpot_seconds": samples.summary(),
        "attended_tokens": contestant.attended_tokens,
        "cached_tokens": contestant.cached_tokens,
        "tokens_as_baseline": sum(a == b for a, b in pairs) / len(baseline.tokens),
        "bytes": moved,
        "bytes_per_second": sum(moved.values()) / samples.median,
        "samples": samples.seconds,
    }


def fastest_reference(results: list[dict[str, Any]]) -> float | None:
    """Median TPOT of transformers' faster attention; None where transformers did not take part."""
    medians = [entry["tpot_seconds"]["median"] for entry in results if entry["reference"]]
    return min(medians, default=None)


def add_ratios(results: list[dict[str, Any]], read_bandwidth: float) -> None:
    """Add to each result its TPOT over the baseline's (the first) and transformers', and the floor."""
    baseline, reference = results[0]["tpot_seconds"]["median"], fastest_reference(results)
    for entry in results:
        median = entry["tpot_seconds"]["median"]
        entry["to_baseline"] = median / baseline
        entry["to_transformers"] = None if reference is None else median / reference
        entry["floor_seconds"] = sum(entry["bytes"].values()) / read_bandwidth
        entry["floor_share"] = entry["floor_seconds"] / median


def print_report(document: dict[str, Any]) -> None:
    """Print a table for each context length."""
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    machine = document["machine"]
    console.print(f"{machine['cpu']}, {machine['threads']} threads; commit {machine['commit']}", highlight=False)
    for part in document["contexts"]:
        precision = document["weight_only_precision"]
        numbers = document["dtype"] + ("" if precision == NONE else f" with {precision} weights")
        numbers += " and head" * document["quantize_lm_head"]
        title = f"{document['model']} {numbers}, {part['context']:,} tokens of {document['text']}"
        table = Table(title=title)
        baseline = part["results"][0]["name"]
        for heading in ("contestant", "TPOT ms", "min–max", f"× {baseline}", "× HF", "attended", "cached"):
            table.add_column(heading, justify="left" if heading == "contestant" else "right", no_wrap=True)
        for heading in ("TTFT s", "MB a step", "GB/s", "of floor", "same tokens"):
            table.add_column(heading, justify="right", no_wrap=True)
        for entry in part["results"]:
            table.add_row(*row(entry))
        table.caption = f"floor: the bytes of a step at a plain read's {part['read_bandwidth'] / 1e9:.1f} GB/s"
        console.print(table)
        console.print(parts_table(part["results"]))
    peak = document["peak_memory_bytes"] / 1e9
    console.print(
        f"medians of {document['tokens']} steps, {document['clock']} time; HF: transformers, the faster of the two; "
        f"peak memory of all together {peak:.1f} GB",
        highlight=False,
    )


def parts_table(results: list[dict[str, Any]]) -> Table:
    """The parts of kvseek's steps in milliseconds, measured in steps of their own."""
    table = Table(
        "contestant", title="parts of a step, ms", caption="outside: sampling and what an engine does for a step"
    )
    for heading in (*GROUPS, "outside"):
        table.add_column(heading, justify="right")
    for entry in results:
        if "parts" in entry:
            parts = dict(entry["parts"])
            outside = parts.pop("outside")
            seconds = (*part_groups(parts).values(), outside)
            table.add_row(entry["name"], *(f"{one * 1e3:.2f}" for one in seconds))
    return table


def row(entry: dict[str, Any]) -> list[str]:
    """One table row."""
    tpot, over = entry["tpot_seconds"], entry["to_transformers"]
    return [
        entry["name"],
        f"{tpot['median'] * 1e3:.1f}",
        f"{tpot['min'] * 1e3:.1f}–{tpot['max'] * 1e3:.1f}",
        f"{entry['to_baseline']:.2f}",
        "" if over is None else f"{over:.2f}",
        f"{entry['attended_tokens']:,.0f}",
        f"{entry['cached_tokens']:,}",
        f"{entry['prefill_seconds']:.1f}",
        f"{sum(entry['bytes'].values()) / 1e6:.0f}",
        f"{entry['bytes_per_second'] / 1e9:.1f}",
        f"{entry['floor_share']:.0%}",
        f"{entry['tokens_as_baseline']:.0%}",
    ]
