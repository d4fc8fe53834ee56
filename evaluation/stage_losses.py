"""Which stage of a method loses the rows that answers need? Measured on the needle questions.

    python evaluation/stage_losses.py --needle ../shared/needle --tasks niah_multiquery --lengths 32768 --methods NAME,NAME

A model with full attention is fed the right answer; each decode step's query of each layer is given to each method's index,
as an engine would build it. A row is needed by a step and KV head if it lies in the retrieval region and one of the query
heads gives it at least --least of its attention, all tokens counted. It is lost if it was not selected, at the first of
the method's stages that does not keep it (plugins/measurements/stages.py). Per task, length, method and layer:

needed      needed rows of all steps and KV heads
lost        share of them that was not selected
lost at     the same, split by stage
choices     share of the selections (decode steps x KV heads) that lost any needed row
mass lost   attention on rows of the region that were not selected, needed or not; mean over query heads and steps
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kvseek.core.errors import ConfigError
from kvseek.evaluation.capture import load_model
from kvseek.evaluation.losses import Losses, measure_layer, total
from kvseek.evaluation.needle import add_question_flags, chosen_questions
from kvseek.evaluation.needle_tasks.tasks import Dialogue, make_dialogues
from kvseek.evaluation.questions import capture_questions
from kvseek.evaluation.recall import chosen_layers, selecting_methods
from kvseek.measurement.machine import describe
from kvseek.measurement.output import run_command, write_result
from kvseek.measurement.variants import Variant, parse_variants

TOTAL = "all"  # what stands for a sum over layers or tasks


@dataclass
class Cell:
    """One method on one task and length, or on all of them: losses by layer, and how many questions full attention got right."""

    method: str
    task: str
    length: int | str
    questions: int
    right: int
    layers: dict[int, Losses]

    def report(self) -> dict[str, Any]:
        """JSON-able, with the sum over the layers."""
        named = {name: getattr(self, name) for name in ("method", "task", "length", "questions", "right")}
        by_layer = [{"layer": number, **losses.figures()} for number, losses in self.layers.items()]
        return {**named, "layers": by_layer, "total": total(self.layers.values()).figures()}


def measure_questions(
    model: Any,
    dialogues: Sequence[Dialogue],
    variants: Sequence[Variant],
    least: float,
    layers: Sequence[int],
    name: str,
) -> tuple[int, int, dict[str, dict[int, Losses]]]:
    """Every variant on every question: questions, those that full attention gets right, losses by label and layer."""
    found = {variant.label: {number: Losses() for number in layers} for variant in variants}
    count, right, start = 0, 0, time.perf_counter()
    for question in capture_questions(model, dialogues):
        count, right = count + 1, right + question.right
        for variant in variants:
            for number in layers:
                losses = measure_layer(question.layers[number], number, question.steps, variant, least)
                found[variant.label][number].add(losses)
        seconds = time.perf_counter() - start
        print(
            f"{name}: {count} questions, {right} right with full attention, {seconds:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    return count, right, found


def over_all(cells: Sequence[Cell]) -> list[Cell]:
    """For each method, the sum of its cells."""
    result = []
    for method in dict.fromkeys(cell.method for cell in cells):
        own = [cell for cell in cells if cell.method == method]
        layers = {number: total(cell.layers[number] for cell in own) for number in own[0].layers}
        questions, right = sum(cell.questions for cell in own), sum(cell.right for cell in own)
        result.append(Cell(method, TOTAL, TOTAL, questions, right, layers))
    return result


def check_questions(dialogues: Sequence[Dialogue], variants: Sequence[Variant], positions: int, length: int) -> None:
    """Raise ConfigError for questions that a model cannot hold, or whose steps do not fit a variant's windows."""
    if length > positions:
        raise ConfigError(f"--lengths = {length}: must be <= {positions}, the model's positions; lower it")
    shortest = min(len(dialogue.context) + len(dialogue.rounds[0][1]) for dialogue in dialogues)
    answers = [len(gold) for dialogue in dialogues for _, _, gold in dialogue.rounds]
    for variant in variants:
        window = variant.cache.sink + variant.cache.local
        if shortest <= window:
            raise ConfigError(
                f"--lengths = {length}: must be at least {length + window + 1 - shortest}, so that the prompts exceed the "
                f"window of {variant.label!r}, {window} tokens; raise it"
            )
        if not 2 <= min(answers) <= max(answers) <= variant.cache.update + 1:
            raise ConfigError(
                f"--methods: {variant.label!r}: cache.update = {variant.cache.update}: must be at least "
                f"{max(answers) - 1}, the decode steps of the longest answer (and an answer have two tokens); raise it"
            )


def print_report(report: dict[str, Any]) -> None:
    """Print a row for each task, length, method and layer; where layers or tasks are several, sums follow them."""
    from rich.console import Console
    from rich.table import Table

    needed = f"rows with at least {report['least']:g} of a query head's attention, and the stages that lose them"
    table = Table(title=f"{needed}; contexts of a task and length: {report['contexts']}")
    left = ("task", "method", "lost at")
    for heading in ("task", "tokens", "right", "method", "layer", "needed", "lost", "lost at", "choices", "mass lost"):
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    before = None
    for cell in report["results"]:
        if before not in (None, (cell["task"], cell["length"])):
            table.add_section()
        before = cell["task"], cell["length"]
        length = f"{cell['length']:,}" if isinstance(cell["length"], int) else cell["length"]
        several = len(cell["layers"]) > 1
        for figures in (*cell["layers"], *([{"layer": TOTAL, **cell["total"]}] if several else ())):
            right = f"{cell['right']}/{cell['questions']}"
            table.add_row(cell["task"], length, right, cell["method"], str(figures["layer"]), *_columns(figures))
    console = Console()
    console.width = max(console.width, 160)  # nothing cut, whatever the terminal
    console.print(table)


def _columns(figures: dict[str, Any]) -> tuple[str, ...]:
    """Figures of a layer as they are printed."""
    if figures["dense"]:
        return str(figures["needed"]), "", "attends to every row", "", ""
    shares = figures["lost_share_by_stage"]
    stages = ", ".join(f"{name} {share:.1%}" for name, share in shares.items()) if shares else "tells no stages"
    harmed, mass = figures["harmed_share"], figures["mass_lost"]
    return str(figures["needed"]), f"{figures['lost_share']:.1%}", stages, f"{harmed:.1%}", f"{mass:.3f}"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = result.add_argument
    add("--needle", type=Path, default=Path("../shared/needle"), help="folder of train_needle.py, with model/")
    add_question_flags(result, n=4, lengths="32768")
    add("--questions", type=int, default=1, help="on each context, each alone; they share its prefill (multi_turn: no)")
    add("--methods", default=selecting_methods(), help="comma list; NAME:field=value sets fields")
    add("--least", type=float, default=0.05, help="share of a query head's attention that makes a row needed")
    add("--layers", help="comma list; all if left out")
    add("--threads", type=int, help="CPU threads; torch's choice if left out: too many where other work runs beside it")
    add("--json", action="store_true", help="print the report as JSON")
    add("--output", type=Path, help="write the JSON to this file too, after every task")
    return result


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure; the JSON-able report. Progress goes to stderr, as a long context takes minutes."""
    variants = parse_variants(options.methods)
    if options.threads is not None:
        if options.threads < 1:
            raise ConfigError(f"--threads = {options.threads}: must be >= 1; leave it out for torch's choice")
        torch.set_num_threads(options.threads)
    chosen, lengths = chosen_questions(options, n=4, questions=1)
    if not 0 < options.least <= 1:
        raise ConfigError(
            f"--least = {options.least}: must be in (0, 1], a share of the attention; 0.05 is the default"
        )
    model, _ = load_model(options.needle / "model")
    layers = chosen_layers(options.layers, model.config.num_hidden_layers) or range(model.config.num_hidden_layers)
    asked = {
        (task, length): make_dialogues(task, length, options.n, questions=options.questions)
        for length in lengths
        for task in chosen
    }
    for (_, length), dialogues in asked.items():
        check_questions(dialogues, variants, model.config.max_position_embeddings, length)
    counted = {"contexts": options.n, "questions_per_context": options.questions}
    head = {"evaluation": "stage_losses", "machine": describe(), "least": options.least, **counted}
    settings = {one.label: {"cache": asdict(one.cache), "settings": asdict(one.settings)} for one in variants}
    cells: list[Cell] = []
    report: dict[str, Any] = {}
    for (task, length), dialogues in asked.items():
        name = f"{task} {length}"
        count, right, found = measure_questions(model, dialogues, variants, options.least, layers, name)
        cells += [Cell(method, task, length, count, right, by_layer) for method, by_layer in found.items()]
        several = over_all(cells) if len(cells) > len(variants) else []
        report = {**head, "methods": settings, "results": [cell.report() for cell in (*cells, *several)]}
        if options.output:
            write_result(options.output, report)
    return report


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run_command(arguments, parser().parse_args, run, print_report, prefix="stage_losses")


if __name__ == "__main__":
    sys.exit(main())
