"""`kvseek bench --shape`: from the command line to a result file and a table."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from kvseek.bench.machine import describe, describe_gpu
from kvseek.bench.output import GIB, Figure, command, figure, figures_table, print_whole, write_result
from kvseek.bench.speed.device.bench import Bench
from kvseek.bench.speed.device.decode import borrow_baselines, describe_variant, run_decode, run_throughput
from kvseek.bench.speed.device.options import cells_of, parse
from kvseek.bench.speed.device.prefill import run_prefill
from kvseek.bench.speed.parts import GROUPS, part_groups
from kvseek.bench.speed.ranks import print_ranks, run_ranks


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured, as it goes into the result file, which is written whenever it has grown."""

    def write(document: dict[str, Any]) -> None:
        if arguments.output:
            write_result(arguments.output, document)

    if arguments.tp_size is not None:
        return run_ranks(arguments, write)
    bench = Bench(arguments, cells_of(arguments))
    mode = "throughput" if arguments.throughput else "prefill" if arguments.prefill else "decode"
    head = {"benchmark": "device", "mode": mode, "machine": describe(), "gpu": describe_gpu(bench.device)}
    head |= {"shape": arguments.shape, "dtype": arguments.dtype}
    head |= {"steps": arguments.steps, "block": arguments.block, "seed": arguments.seed}
    head["methods"] = {variant.label: describe_variant(variant) for variant in arguments.methods}
    measure = {"decode": run_decode, "throughput": run_throughput, "prefill": run_prefill}[mode]
    document = {**head, **measure(bench, lambda part: write({**head, **part}))}
    if mode == "decode":
        borrow_baselines(document, bench.variants[0].label)
    return document


def _part(name: str) -> Figure:
    return lambda entry: f"{part_groups(entry['stages'])[name] * 1e3:.2f}"


def over_baseline(entry: dict[str, Any]) -> str:
    """The ratio to the baseline; where that did not run, to the time that its step takes at least, marked as such."""
    if entry["to_baseline"] is None:
        return f"{entry['step_seconds']['median'] / entry['dense_floor_seconds']:.3f}†"
    return f"{entry['to_baseline']:.3f}" + ("*" if entry.get("baseline_of_another_phase") else "")


STEP: Mapping[str, Figure] = {"step\nms": figure("step_seconds.median", ".2f", 1e3)}
MEMORY: Mapping[str, Figure] = {
    "device\nGiB": lambda entry: f"{entry['memory']['device_used'] / GIB:.1f}",
    "host\nGiB": lambda entry: f"{entry['memory']['rows_in_host_memory'] / GIB:.1f}",
}
FIGURES: Mapping[str, Figure] = {  # by their headings
    **STEP,
    "×\nbase": over_baseline,
    "tokens\n/s": lambda entry: f"{entry['tokens_per_second']:,.1f}",
    "attended": lambda entry: f"{entry['attended_tokens']:,.0f}",
    **MEMORY,
}
TIMES: Mapping[str, Figure] = {
    "fastest\nms": figure("step_seconds.min", ".2f", 1e3),
    "upkeep\nms": figure("upkeep_seconds", ".2f", 1e3),
    "host\nms": figure("wall_seconds.median", ".2f", 1e3),
    "floor\nms": figure("floor.total", ".2f", 1e3),
    "×\nfloor": lambda entry: f"{entry['to_floor']:.2f}",
}
PARTS: Mapping[str, Figure] = {f"{name}\nms": _part(name) for name in GROUPS}
AMOUNTS: Mapping[str, Figure] = {
    "hits": lambda entry: f"{entry['hit_rate']:.0%}" if entry["hot_rows"] else "",
    "GB\nmoved": lambda entry: f"{sum(entry['bytes'].values()) / 1e9:.2f}",
    "index\nB": lambda entry: f"{entry['index_bytes_per_token_and_kv_head']:.0f}",
    "index\nGiB": lambda entry: f"{entry['index_bytes'] / GIB:.2f}",
}
THROUGHPUT: Mapping[str, Figure] = {
    "context": lambda entry: f"{entry['context']:,}",
    "batch": lambda entry: str(entry["batch"]),
    **STEP,
    "tokens/s": FIGURES["tokens\n/s"],
    "layers\non\nhost": lambda entry: str(entry["host_layers"]),
    **MEMORY,
}


PROMPTS: Mapping[str, Figure] = {
    "tokens": lambda entry: f"{entry['tokens']:,}",
    "seconds": figure("seconds.median", ".2f"),
    "min": figure("seconds.min", ".2f"),
    "max": figure("seconds.max", ".2f"),
    "tokens/s": lambda entry: f"{entry['rate']:,.0f}",
    "×\nbase": lambda entry: f"{entry['to_baseline']:.3f}",
}


def print_report(document: dict[str, Any], details: bool = False) -> None:
    """Print the tables of a document of any mode; `details`: all figures of steps, their parts and floors."""
    if document["benchmark"] == "ranks":
        print_ranks(document)
        return
    console = Console(highlight=False, markup=False, soft_wrap=True)
    gpu, machine, shape = document["gpu"], document["machine"], f"{document['shape']} {document['dtype']}"
    console.print(
        f"{gpu['name']}, CUDA {gpu['cuda']}, torch {machine['versions']['torch']}; commit {machine['commit']}"
    )
    if document["mode"] == "decode":
        _decode(console, document, shape, details)
    elif document["mode"] == "throughput":
        for missing in document["skipped"]:
            console.print(f"{missing['method']}: {missing['context']:,} × {missing['batch']}: {missing['reason']}")
        for peak in document["peaks"]:
            over = "" if peak["to_baseline"] is None else f", {peak['to_baseline']:.2f} × the baseline's peak"
            best = f"{peak['method']} peaks at {peak['tokens_per_second']:,.1f} tokens/s{over}"
            console.print(f"{peak['context']:,} tokens: {best}")
        title = f"{shape}, offload auto: tokens per second"
        print_whole(figures_table(title, "method", THROUGHPUT, document["results"], "method"))
    else:
        for missing in document["skipped"]:
            console.print(f"{missing['context']:,} {missing['reason']}")
        title = f"{shape}, offload {document['offload']}: prefill"
        print_whole(figures_table(title, "method", PROMPTS, document["results"], "method"))
        for entry in document["results"]:
            if "part_seconds" in entry:
                console.print(prompt_parts(entry, document["best_product_rate"]))


def _decode(console: Console, document: dict[str, Any], shape: str, details: bool) -> None:
    for phase in document["phases"]:
        for cell in phase["cells"]:
            title = f"{shape}, {cell['context']:,} tokens × {cell['batch']}, offload {phase['offload']}"
            table = figures_table(title, "contestant", FIGURES, cell["results"], "name")
            table.caption = (
                "Methods one after the other, each in turns with the baseline: × base is within its own turns; the baseline's "
                "row is of all turns. * baseline of another phase; † the baseline does not fit: over its floor, which is computed"
            )
            print_whole(table)
            if details:
                _details(console, cell)
        for missing in phase["skipped"]:
            console.print(f"{phase['offload']}: {missing['context']:,} × {missing['batch']} {missing['reason']}")
        for failed in phase["errors"]:
            console.print(f"{phase['offload']}: {failed['method']} ended by: {failed['error']}")
    if not details:
        console.print("--details prints parts, floors and memory of each")


def _details(console: Console, cell: dict[str, Any]) -> None:
    """Print what else there is of a cell: three tables, and the floors."""
    rates, results = cell["rates"], cell["results"]
    table = figures_table("times of a step", "contestant", TIMES, results, "name")
    table.caption = "floor: " + ", ".join(f"{name.replace('_', ' ')} {rate:.3g}" for name, rate in rates.items())
    print_whole(table)
    title = "parts of a step: their own graph, with events in it"
    print_whole(figures_table(title, "contestant", PARTS, results, "name"))
    print_whole(figures_table("rows and memory", "contestant", AMOUNTS, results, "name"))
    for entry in results:
        parts = (f"{name.replace('_', ' ')} {seconds * 1e3:.2f}" for name, seconds in entry["floor"].items() if seconds)
        console.print(f"  floor of {entry['name']}, ms: {', '.join(parts)}")


def prompt_parts(entry: dict[str, Any], best: float) -> str:
    """Where a prompt's time on the device goes, and the rates of attention and of products beside the GPU's best."""
    rates = [
        f"{name} {entry['part_seconds'][name]:.2f} s, {count / entry['part_seconds'][name] / 1e12:,.0f} TFLOP/s"
        for name, count in entry["operations"].items()
    ]
    return (
        f"{entry['tokens']:,} tokens: {'; '.join(rates)}; others {entry['part_seconds']['others']:.2f} s; "
        f"a large product on this GPU {best / 1e12:,.0f} TFLOP/s; attention by {entry['attention']}"
    )


main = command(parse, run, print_report)
