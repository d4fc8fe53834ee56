"""Results of the decode benchmark: from samples to figures, from figures to a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from kvseek.benchmarks.contestants import Contestant, TransformersContestant
from kvseek.benchmarks.parts import GROUPS, part_groups
from kvseek.benchmarks.timing import Samples
from kvseek.core.weight_only import NONE
from kvseek.measurement.output import named, print_whole

Figure = Callable[[dict[str, Any]], str]
FIGURES: Mapping[str, Figure] = {  # by their headings
    "TPOT\nms": lambda entry: f"{entry['tpot_seconds']['median'] * 1e3:.1f}",
    "×\nbase": lambda entry: f"{entry['to_baseline']:.2f}",
    "×\nHF": lambda entry: "" if entry["to_transformers"] is None else f"{entry['to_transformers']:.2f}",
    "TTFT\ns": lambda entry: f"{entry['prefill_seconds']:.1f}",
    "attended": lambda entry: f"{entry['attended_tokens']:,.0f}",
    "cached": lambda entry: f"{entry['cached_tokens']:,}",
}
DETAILS: Mapping[str, Figure] = {
    "min–max\nms": lambda entry: "–".join(f"{entry['tpot_seconds'][name] * 1e3:.1f}" for name in ("min", "max")),
    "MB/\nstep": lambda entry: f"{sum(entry['bytes'].values()) / 1e6:.0f}",
    "GB/s": lambda entry: f"{entry['bytes_per_second'] / 1e9:.1f}",
    "of\nfloor": lambda entry: f"{entry['floor_share']:.0%}",
    "same\ntokens": lambda entry: f"{entry['tokens_as_baseline']:.0%}",
}


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


def print_report(document: dict[str, Any], details: bool = False) -> None:
    """Print a table of the figures that matter for each context length, and with `details` all others."""
    console = Console(highlight=False, soft_wrap=True)
    machine = document["machine"]
    console.print(f"{machine['cpu']}, {machine['threads']} threads; commit {machine['commit']}")
    for part in document["contexts"]:
        precision = document["weight_only_precision"]
        numbers = document["dtype"] + ("" if precision == NONE else f" with {precision} weights")
        numbers += " and head" * document["quantize_lm_head"]
        print_whole(
            _table(f"{document['model']} {numbers}, {part['context']:,} tokens of {document['text']}", part, FIGURES)
        )
        if details:
            table = _table("further figures", part, DETAILS)
            table.caption = f"floor: the bytes of a step at a plain read's {part['read_bandwidth'] / 1e9:.1f} GB/s"
            print_whole(table)
            print_whole(parts_table(part["results"]))
    peak = document["peak_memory_bytes"] / 1e9
    console.print(
        f"medians of {document['tokens']} steps, {document['clock']} time; base: {_baseline(document)}; HF: transformers, the "
        f"faster of the two; peak memory of all together {peak:.1f} GB" + "; --details prints more" * (not details)
    )


def _baseline(document: dict[str, Any]) -> str:
    return str(document["contexts"][0]["results"][0]["name"])


def _table(title: str, part: dict[str, Any], figures: Mapping[str, Figure]) -> Table:
    table = Table(named("contestant"), title=title)
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in part["results"]:
        table.add_row(entry["name"], *(write(entry) for write in figures.values()))
    return table


def parts_table(results: list[dict[str, Any]]) -> Table:
    """The parts of kvseek's steps in milliseconds, measured in steps of their own."""
    table = Table(
        named("contestant"), title="parts of a step, ms", caption="outside: sampling and what an engine does for a step"
    )
    for heading in (*GROUPS, "outside"):
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in results:
        if "parts" in entry:
            parts = dict(entry["parts"])
            outside = parts.pop("outside")
            seconds = (*part_groups(parts).values(), outside)
            table.add_row(entry["name"], *(f"{one * 1e3:.2f}" for one in seconds))
    return table
