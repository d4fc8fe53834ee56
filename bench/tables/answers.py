"""Tables of right answers to questions about long contexts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from kvseek.bench.variants import parse_variants

from .results import ALSO_SPARSE, CHUNKS, FP8, METHODS, NEEDLE, SPARSE, K, Results, Rows, Tables, one

TASKS = {  # of the suite needle, and their headings
    "niah_single": "single",
    "niah_multikey": "multikey",
    "niah_multikey_dense": "dense",
    "niah_multivalue": "multivalue",
    "niah_multiquery": "multiquery",
    "variable_tracking": "variables",
}
WITHIN = 3  # points of `full` within which wide answers should be


def answers(results: Results) -> Rows:
    """Needle questions, one a context, in two lengths."""
    documents = [results(name) for name in NEEDLE]
    yield ("", *(f"{document['cells'][0]['length']:,} tokens" for document in documents))
    for engine in documents[0]["engines"]:
        cells = ([cell for cell in document["cells"] if cell["engine"] == engine] for document in documents)
        yield (f"`{engine}`", *map(_answers, cells))


def _answers(cells: Sequence[dict[str, Any]]) -> str:
    """Right answers of all tasks, and of the tasks in which some were wrong; of a single task with its name."""
    if len(cells) == 1:
        return f"{TASKS[cells[0]['task']]} {counted(cells[0])}"
    wrong = [f"{TASKS[cell['task']]} {counted(cell)}" for cell in cells if right(cell) < cell["questions"]]
    return total(cells) + (f" ({', '.join(wrong)})" if wrong else "")


def total(cells: Sequence[dict[str, Any]]) -> str:
    return f"{sum(map(right, cells))} of {sum(cell['questions'] for cell in cells)}" if cells else ""


def right(cell: dict[str, Any]) -> int:
    return sum(answers.count("1") for answers in cell["right"])


def counted(cell: dict[str, Any]) -> str:
    return f"{right(cell)} of {cell['questions']}"


def sparse_answers(results: Results) -> Rows:
    """Right answers of dense and sparse prompts, in 16 bits and in FP8."""
    cells = [cell for name in ("needle-sparse-h100", "needle-fp8-h200") for cell in results(name)["cells"]]
    lengths = (32 * K, 130_048)
    yield ("", *(f"{length:,} tokens" for length in lengths))
    wide = [f"{method}{SPARSE}{chunks}" for chunks in ("", CHUNKS) for method in ("full", "pariskv")]
    for engine in ("full", *wide, f"full{FP8}", f"full{FP8}{ALSO_SPARSE}{CHUNKS}"):
        found = [[c for c in cells if (c["engine"], c["length"]) == (engine, length)] for length in lengths]
        yield (f"`{engine}`", *(_answers(some) if some else "" for some in found))


def ctkvr_lists(results: Results) -> Rows:
    document = results("needle-128k-ctkvr-lists")
    tasks = ("niah_multikey_dense", "niah_multivalue")
    yield ("", *(TASKS[task] for task in tasks))
    for engine in document["engines"]:
        yield (f"`{engine}`", *(counted(one(document["cells"], engine=engine, task=task)) for task in tasks))


def wide_tasks(results: Results) -> Rows:
    """Parts of wide answers that are right, of `full`; and by how many points those of each method differ, fewest rows first."""
    chains = [cell for cell in results("wide-tasks-cpu-needle")["cells"] if cell["task"] == "long_chain"]
    cells = {(c["task"], c["length"], c["engine"]): c["parts"] for c in [*chains, *results("wide-tasks-h200")["cells"]]}
    asked = dict.fromkeys(key[:2] for key in cells)
    settings = {name: parse_variants(name)[0] for name in dict.fromkeys(engine for *_, engine in cells)}
    yield ("", *(f"`{task}` at {length:,}" for task, length in asked))
    full = [cells[*key, "full"] for key in asked]
    yield ("`full`", *(f"{100 * fmean(parts):.1f}" for parts in full))
    for method in METHODS[1:]:
        own = sorted((one.settings.top_k, name) for name, one in settings.items() if one.method == method)
        shown = []
        for key, reference in zip(asked, full, strict=True):
            found = (cells.get((*key, name)) for _, name in own)
            shown.append("; ".join(_points(parts, reference) for parts in found if parts is not None))
        yield (f"`{method}`", *shown)


def _points(parts: Sequence[float], reference: Sequence[float]) -> str:
    """The difference on the contexts that both have read; bold beyond WITHIN points."""
    points = 100 * fmean(own - other for own, other in zip(parts, reference, strict=False))
    return f"**{points:+.1f}**" if points < -WITHIN else f"{points:+.1f}"


TABLES: Tables = {
    "answers": answers,
    "wide tasks": wide_tasks,
    "lists of ctkvr": ctkvr_lists,
    "answers with sparse prompts": sparse_answers,
}
