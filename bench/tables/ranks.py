"""Tables of engines of two ranks."""

from __future__ import annotations

from typing import Any

from kvseek.bench.output import GIB, rows

from .results import COLUMNS, Columns, Results, Rows, Tables, milliseconds, one


def ranks_steps(results: Results) -> Rows:
    device, host = results("ranks-h200-128k-device")["results"], results("ranks-h200-128k-host")["results"]
    yield ("", "1 rank", "2 ranks", "× 1 rank")
    for method in ("full", "nested", "pariskv"):
        before, after = (one(device, method=method, tp_size=size) for size in (1, 2))
        times = (milliseconds(entry["seconds"]["median"]) for entry in (before, after))
        yield (f"`{method}`, rows in GPU memory", *times, f"{after['to_one_rank']:.2f}")
    for entry in host:
        time = milliseconds(entry["seconds"]["median"])
        yield (f"`{entry['method']}`, rows in host memory", "", time, "")


def ranks_prompts(results: Results) -> Rows:
    yield ("", "1 rank, s", "2 ranks, s", "× 1 rank")
    found: dict[str, list[dict[str, Any]]] = {}  # the later file has newer times of a method
    for name in ("ranks-h200-prefill", "ranks-h200-prefill-chunks"):
        entries = results(name)["results"]
        found |= {entry["method"]: entries for entry in entries}
    for method, entries in found.items():
        before, after = (one(entries, method=method, tp_size=size) for size in (1, 2))
        times = (f"{entry['seconds']['median']:.2f}" for entry in (before, after))
        yield (f"`{method}`", *times, f"{after['to_one_rank']:.2f}")


def ranks_long(results: Results) -> Rows:
    columns: Columns = {
        "tokens": COLUMNS["tokens"],
        "method": COLUMNS["method"],
        "ranks": lambda entry: str(entry["tp_size"]),
        "layers with rows in host memory": COLUMNS["layers with rows in host memory"],
        "a step, ms": lambda entry: milliseconds(entry["seconds"]["median"]),
        "× 1 rank": lambda entry: f"{entry['to_one_rank']:.2f}" if entry["tp_size"] > 1 else "",
        "the prompt, s": lambda entry: f"{entry['prefill_seconds']:.1f}",
    }
    found = (results(name)["results"] for name in ("ranks-h200-1m-auto", "ranks-h200-2m-auto"))
    return rows(columns, (entry for one in found for entry in sorted(one, key=lambda entry: int(entry["tp_size"]))))


def ranks_72b(results: Results) -> Rows:
    (entry,) = results("ranks-h200-72b-int8")["results"]
    memory = entry["device_memory"]["after"]
    return [
        ("", ""),
        ("a step", f"{milliseconds(entry['seconds']['median'])} ms"),
        ("a prompt", f"{entry['prefill_seconds']:.1f} s"),
        ("GPU memory that tensors took at most, a GPU", f"{memory['most_tensors'] / GIB:.2f} GiB"),
        ("GPU memory in use, with CUDA's own, a GPU", f"{memory['in_use'] / GIB:.2f} GiB"),
    ]


TABLES: Tables = {
    "steps of two ranks": ranks_steps,
    "prompts of two ranks": ranks_prompts,
    "long contexts of two ranks": ranks_long,
    "72B on two ranks": ranks_72b,
}
