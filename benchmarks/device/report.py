"""Tables of the GPU benchmark, from the document that goes into the result file."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from kvseek.benchmarks.parts import GROUPS, part_groups

from .memory_plan import GIB

TABLE_WIDTH = 200  # columns that the widest table needs unwrapped


def print_device_report(document: dict[str, Any]) -> None:
    """Print the tables of a document of any mode."""
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    gpu, machine = document["gpu"], document["machine"]
    console.print(
        f"{gpu['name']}, CUDA {gpu['cuda']}, torch {machine['versions']['torch']}; commit {machine['commit']}"
    )
    {"decode": _decode, "throughput": _throughput, "prefill": _prefill}[document["mode"]](console, document)


def _decode(console: Console, document: dict[str, Any]) -> None:
    for phase in document["phases"]:
        for cell in phase["cells"]:
            console.print(cell_table(document, phase, cell), highlight=False)
            for entry in cell["results"]:
                console.print(floor_line(entry), highlight=False, markup=False)
            for method, check in cell["synthetic_queries"].items():
                console.print(
                    f"{method}, last layer, synthetic queries: overlap of steps {check['overlap']:.0%}, "
                    f"recall {check['recall']:.0%}, mass {check['mass']:.3f} (best rows {check['best_mass']:.3f})",
                    highlight=False,
                )
        for missing in phase["skipped"]:
            text = f"{phase['offload']}: {missing['context']:,} × {missing['batch']} {missing['reason']}"
            console.print(text, highlight=False)
        for failed in phase["errors"]:
            text = f"{phase['offload']}: {failed['method']} ended by: {failed['error']}"
            console.print(text, highlight=False, markup=False)


def cell_table(document: dict[str, Any], phase: dict[str, Any], cell: dict[str, Any]) -> Table:
    """All contestants at one context and batch."""
    rates = cell["rates"]
    title = f"{document['shape']} {document['dtype']}, {cell['context']:,} tokens × {cell['batch']}, offload {phase['offload']}"
    caption = (
        f"floor: {rates['read'] / 1e12:.2f} TB/s; from the pool {rates['host_rows'] / 1e6:.1f} M rows/s, pages "
        f"{rates['host_pages'] / 1e9:.1f} GB/s; host cores {rates['host_memory'] / 1e9:.0f} GB/s; {rates['node'] * 1e6:.2f} µs a "
        f"node, {rates['host_function'] * 1e6:.0f} µs a host function. Methods one after the other, each in turns with the "
        "baseline: × base is within its own turns; the baseline's row is of all turns. Parts: their own graph, with events "
        "in it; * baseline of another phase; † the baseline does not fit: over its floor, which is computed"
    )
    table = Table(title=title, caption=caption)
    table.add_column("contestant", no_wrap=True)
    times = ("step\nms", "fastest\nms", "upkeep\nms", "host\nms", "tokens\n/s", "×\nbase", "floor\nms", "×\nfloor")
    parts = (f"{name}\nms" for name in GROUPS)
    amounts = ("attended", "overlap", "hits", "GB\nmoved", "index\nB", "index\nGiB", "device\nGiB", "host\nGiB")
    for heading in (*times, *parts, *amounts):
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in cell["results"]:
        table.add_row(*_row(entry))
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


def _row(entry: dict[str, Any]) -> list[str]:
    step = entry["step_seconds"]
    memory, overlap, hits = entry["memory"], entry["overlap"], entry["hit_rate"]
    return [
        entry["name"],
        f"{step['median'] * 1e3:.2f}",
        f"{step['min'] * 1e3:.2f}",
        f"{entry['upkeep_seconds'] * 1e3:.2f}",
        f"{entry['wall_seconds']['median'] * 1e3:.2f}",
        f"{entry['tokens_per_second']:,.1f}",
        over_baseline(entry),
        f"{entry['floor']['total'] * 1e3:.2f}",
        f"{entry['to_floor']:.2f}",
        *(f"{seconds * 1e3:.2f}" for seconds in part_groups(entry["stages"]).values()),
        f"{entry['attended_tokens']:,.0f}",
        "" if overlap is None else f"{overlap:.0%}",
        f"{hits:.0%}" if entry["hot_rows"] else "",
        f"{sum(entry['bytes'].values()) / 1e9:.2f}",
        f"{entry['index_bytes_per_token_and_kv_head']:.0f}",
        f"{entry['index_bytes'] / GIB:.2f}",
        f"{memory['device_used'] / GIB:.1f}",
        f"{memory['rows_in_host_memory'] / GIB:.1f}",
    ]


def _throughput(console: Console, document: dict[str, Any]) -> None:
    table = Table(title=f"{document['shape']} {document['dtype']}, offload auto: tokens per second")
    table.add_column("method", no_wrap=True)
    for heading in ("context", "batch", "step ms", "tokens/s", "layers on host", "device GiB", "host GiB"):
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
        console.print(text, highlight=False, markup=False)
    for peak in document["peaks"]:
        over = "" if peak["to_baseline"] is None else f", {peak['to_baseline']:.2f} × the baseline's peak"
        text = f"{peak['context']:,} tokens: {peak['method']} peaks at {peak['tokens_per_second']:,.1f} tokens/s{over}"
        console.print(text, highlight=False)
    console.print(table)


def _prefill(console: Console, document: dict[str, Any]) -> None:
    table = Table(title=f"{document['shape']} {document['dtype']}, offload {document['offload']}: prefill")
    table.add_column("method", no_wrap=True)
    for heading in ("tokens", "seconds", "min", "max", "tokens/s", "× base"):
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
        console.print(f"{missing['context']:,} {missing['reason']}", highlight=False)
    console.print(table)
    for entry in document["results"]:
        if "part_seconds" in entry:
            console.print(prefill_parts_line(entry, document["best_product_rate"]), highlight=False, markup=False)


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
