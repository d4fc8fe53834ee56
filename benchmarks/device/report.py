"""Tables of the GPU benchmark, from the document that goes into the result file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from kvseek.benchmarks.parts import GROUPS, part_groups
from kvseek.measurement.output import named, print_whole

from .memory_plan import GIB


def print_device_report(document: dict[str, Any], details: bool = False) -> None:
    """Print the tables of a document of any mode; `details`: all figures of steps, their parts and floors."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    gpu, machine = document["gpu"], document["machine"]
    console.print(
        f"{gpu['name']}, CUDA {gpu['cuda']}, torch {machine['versions']['torch']}; commit {machine['commit']}"
    )
    if document["mode"] == "decode":
        _decode(console, document, details)
    else:
        {"throughput": _throughput, "prefill": _prefill}[document["mode"]](console, document)


def _decode(console: Console, document: dict[str, Any], details: bool) -> None:
    for phase in document["phases"]:
        for cell in phase["cells"]:
            print_whole(step_table(document, phase, cell))
            if details:
                _details(console, cell)
        for missing in phase["skipped"]:
            console.print(f"{phase['offload']}: {missing['context']:,} × {missing['batch']} {missing['reason']}")
        for failed in phase["errors"]:
            console.print(f"{phase['offload']}: {failed['method']} ended by: {failed['error']}")
    if not details:
        console.print("--details prints parts, floors and memory of each")


def step_table(document: dict[str, Any], phase: dict[str, Any], cell: dict[str, Any]) -> Table:
    """All contestants at one context and batch, with the figures that matter."""
    title = f"{document['shape']} {document['dtype']}, {cell['context']:,} tokens × {cell['batch']}, offload {phase['offload']}"
    caption = (
        "Methods one after the other, each in turns with the baseline: × base is within its own turns; the baseline's row is of "
        "all turns. * baseline of another phase; † the baseline does not fit: over its floor, which is computed"
    )
    return _table(title, caption, cell, FIGURES)


def _details(console: Console, cell: dict[str, Any]) -> None:
    """Print what else there is of a cell: two tables, the floors, and the check of the synthetic queries."""
    rates = cell["rates"]
    caption = (
        f"floor: {rates['read'] / 1e12:.2f} TB/s; from the pool {rates['host_rows'] / 1e6:.1f} M rows/s, pages "
        f"{rates['host_pages'] / 1e9:.1f} GB/s; host cores {rates['host_memory'] / 1e9:.0f} GB/s; {rates['node'] * 1e6:.2f} µs a "
        f"node, {rates['host_function'] * 1e6:.0f} µs a host function"
    )
    print_whole(_table("times of a step", caption, cell, TIMES))
    print_whole(_table("parts of a step: their own graph, with events in it", "", cell, PARTS))
    print_whole(_table("rows and memory", "", cell, AMOUNTS))
    for entry in cell["results"]:
        console.print(floor_line(entry))
    for method, check in cell["synthetic_queries"].items():
        console.print(
            f"{method}, last layer, synthetic queries: overlap of steps {check['overlap']:.0%}, "
            f"recall {check['recall']:.0%}, mass {check['mass']:.3f} (best rows {check['best_mass']:.3f})"
        )


def _table(title: str, caption: str, cell: dict[str, Any], figures: Mapping[str, Figure]) -> Table:
    table = Table(named("contestant"), title=title, caption=caption)
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in cell["results"]:
        table.add_row(entry["name"], *(write(entry) for write in figures.values()))
    return table


def floor_line(entry: dict[str, Any]) -> str:
    """The parts of a contestant's floor that are not nothing, in milliseconds."""
    parts = (f"{name.replace('_', ' ')} {seconds * 1e3:.2f}" for name, seconds in entry["floor"].items() if seconds)
    return f"  floor of {entry['name']}, ms: {', '.join(parts)}"


def over_baseline(entry: dict[str, Any]) -> str:
    """The ratio to the baseline; where that did not run, to the time that its step takes at least, marked as such."""
    if entry["to_baseline"] is None:
        return f"{entry['step_seconds']['median'] / entry['dense_floor_seconds']:.3f}†"
    return f"{entry['to_baseline']:.3f}" + ("*" if entry.get("baseline_of_another_phase") else "")


def _milliseconds(read: Callable[[dict[str, Any]], float]) -> Figure:
    return lambda entry: f"{read(entry) * 1e3:.2f}"


def _part(name: str) -> Figure:
    return _milliseconds(lambda entry: part_groups(entry["stages"])[name])


Figure = Callable[[dict[str, Any]], str]
FIGURES: Mapping[str, Figure] = {  # by their headings
    "step\nms": _milliseconds(lambda entry: entry["step_seconds"]["median"]),
    "×\nbase": over_baseline,
    "tokens\n/s": lambda entry: f"{entry['tokens_per_second']:,.1f}",
    "attended": lambda entry: f"{entry['attended_tokens']:,.0f}",
    "device\nGiB": lambda entry: f"{entry['memory']['device_used'] / GIB:.1f}",
    "host\nGiB": lambda entry: f"{entry['memory']['rows_in_host_memory'] / GIB:.1f}",
}
TIMES: Mapping[str, Figure] = {
    "fastest\nms": _milliseconds(lambda entry: entry["step_seconds"]["min"]),
    "upkeep\nms": _milliseconds(lambda entry: entry["upkeep_seconds"]),
    "host\nms": _milliseconds(lambda entry: entry["wall_seconds"]["median"]),
    "floor\nms": _milliseconds(lambda entry: entry["floor"]["total"]),
    "×\nfloor": lambda entry: f"{entry['to_floor']:.2f}",
}
PARTS: Mapping[str, Figure] = {f"{name}\nms": _part(name) for name in GROUPS}
AMOUNTS: Mapping[str, Figure] = {
    "overlap": lambda entry: "" if entry["overlap"] is None else f"{entry['overlap']:.0%}",
    "hits": lambda entry: f"{entry['hit_rate']:.0%}" if entry["hot_rows"] else "",
    "GB\nmoved": lambda entry: f"{sum(entry['bytes'].values()) / 1e9:.2f}",
    "index\nB": lambda entry: f"{entry['index_bytes_per_token_and_kv_head']:.0f}",
    "index\nGiB": lambda entry: f"{entry['index_bytes'] / GIB:.2f}",
}


def _throughput(console: Console, document: dict[str, Any]) -> None:
    table = Table(named("method"), title=f"{document['shape']} {document['dtype']}, offload auto: tokens per second")
    for heading in ("context", "batch", "step\nms", "tokens/s", "layers\non\nhost", "device\nGiB", "host\nGiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in document["results"]:
        table.add_row(
            entry["method"],
            f"{entry['context']:,}",
            str(entry["batch"]),
            f"{entry['step_seconds']['median'] * 1e3:.2f}",
            f"{entry['tokens_per_second']:,.1f}",
            str(entry["host_layers"]),
            f"{entry['memory']['device_used'] / GIB:.1f}",
            f"{entry['memory']['rows_in_host_memory'] / GIB:.1f}",
        )
    for missing in document["skipped"]:
        text = f"{missing['method']}: {missing['context']:,} × {missing['batch']}: {missing['reason']}"
        console.print(text)
    for peak in document["peaks"]:
        over = "" if peak["to_baseline"] is None else f", {peak['to_baseline']:.2f} × the baseline's peak"
        text = f"{peak['context']:,} tokens: {peak['method']} peaks at {peak['tokens_per_second']:,.1f} tokens/s{over}"
        console.print(text)
    print_whole(table)


def _prefill(console: Console, document: dict[str, Any]) -> None:
    table = Table(
        named("method"), title=f"{document['shape']} {document['dtype']}, offload {document['offload']}: prefill"
    )
    for heading in ("tokens", "seconds", "min", "max", "tokens/s", "×\nbase"):
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in document["results"]:
        seconds = entry["seconds"]
        table.add_row(
            entry["method"],
            f"{entry['tokens']:,}",
            *(f"{seconds[name]:.2f}" for name in ("median", "min", "max")),
            f"{entry['rate']:,.0f}",
            f"{entry['to_baseline']:.3f}",
        )
    for missing in document["skipped"]:
        console.print(f"{missing['context']:,} {missing['reason']}")
    print_whole(table)
    for entry in document["results"]:
        if "part_seconds" in entry:
            console.print(prefill_parts_line(entry, document["best_product_rate"]))


def prefill_parts_line(entry: dict[str, Any], best: float) -> str:
    """Where a prompt's time on the device goes, and the rates of attention and of products beside the GPU's best."""
    rates = [
        f"{name} {entry['part_seconds'][name]:.2f} s, {count / entry['part_seconds'][name] / 1e12:,.0f} TFLOP/s"
        for name, count in entry["operations"].items()
    ]
    return (
        f"{entry['tokens']:,} tokens: {'; '.join(rates)}; others {entry['part_seconds']['others']:.2f} s; "
        f"a large product on this GPU {best / 1e12:,.0f} TFLOP/s; attention by {entry['attention']}"
    )
