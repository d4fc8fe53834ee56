"""Which stage of a method loses the rows that answers need? Measured on the needle questions.

    python bench/accuracy/stage_losses.py --needle ../shared/needle --tasks niah_multiquery --lengths 32768 --methods NAME,NAME

A model with full attention is fed the right answer; each decode step's query of each layer is given to each method's index,
as an engine would build it. A row is needed by a step and KV head if it lies in the retrieval region and one of the query
heads gives it at least --least of its attention, all tokens counted. It is lost if it was not selected, at the first of
the method's stages that does not keep it (plugins/measurements.py). Per task, length, method and layer:

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
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvseek.bench.accuracy.capture import CapturedLayer, Replay, capture_questions, load_model
from kvseek.bench.accuracy.needle_tasks.tasks import Dialogue, make_dialogues
from kvseek.bench.accuracy.recall import selecting_methods
from kvseek.bench.accuracy.tasks import add_question_flags, chosen_questions
from kvseek.bench.machine import describe
from kvseek.bench.methods import stages_of
from kvseek.bench.output import (
    Figure,
    add_output_flags,
    at_least_one,
    chosen_layers,
    command,
    figures_table,
    print_whole,
    progress,
    write_result,
)
from kvseek.bench.variants import Variant, parse_variants
from kvseek.core.errors import ConfigError
from kvseek.plugins.contract import LAST_QUERIES

TOTAL = "all"  # what stands for a sum over layers or tasks


@dataclass
class Losses:
    """Counts over decode steps and KV heads; they add up over questions, layers and tasks.

    Attributes
    ----------
    choices, harmed : int
        Selections: decode steps x KV heads; those that lost a needed row.
    by_stage : dict or None
        Lost rows of each stage; None if the method does not tell.
    mass : float
        Attention lost, summed over the selections, each a mean over its query heads.
    dense : bool
        Every row was selected, every time.
    """

    needed: int = 0
    lost: int = 0
    choices: int = 0
    harmed: int = 0
    by_stage: dict[str, int] | None = field(default_factory=dict)
    mass: float = 0.0
    dense: bool = True

    def add(self, other: Losses) -> None:
        """Add the counts of the same method elsewhere."""
        for name in ("needed", "lost", "choices", "harmed", "mass"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.dense = self.dense and other.dense
        if other.by_stage is None or self.by_stage is None:
            self.by_stage = None
        else:
            for name, count in other.by_stage.items():
                self.by_stage[name] = self.by_stage.get(name, 0) + count

    def figures(self) -> dict[str, Any]:
        """Counts and shares, JSON-able; shares of needed rows are 0 where none was."""
        needed, choices = max(1, self.needed), max(1, self.choices)
        stages = self.by_stage
        return {
            **{name: getattr(self, name) for name in ("dense", "needed", "lost", "choices", "harmed", "by_stage")},
            "lost_share": self.lost / needed,
            "lost_share_by_stage": None if stages is None else {name: lost / needed for name, lost in stages.items()},
            "harmed_share": self.harmed / choices,
            "mass_lost": self.mass / choices,
        }


@torch.inference_mode()
def measure_layer(layer: CapturedLayer, number: int, steps: int, variant: Variant, least: float) -> Losses:
    """One layer of one question: the last `steps` queries are decode steps."""
    layer = CapturedLayer(layer.keys, layer.queries[:, -(LAST_QUERIES + steps) :], layer.scaling)
    replay, tell_stages = Replay(layer, number, steps, variant), stages_of(variant.method)
    losses = Losses()
    for step in range(steps):
        query = layer.queries[:, layer.queries.shape[1] - steps + step].contiguous()
        # Before the step, which may change the index.
        stages = tell_stages(replay.index, query, 0) if tell_stages else None
        tokens = replay.tokens_by_place()
        chosen = replay.step(query)
        weights = replay.region_weights(query, step)
        needed = weights.amax(dim=1) >= least
        missed = needed & ~chosen
        by_stage = None
        if stages is not None:
            blamed = stages.blame(missed.gather(1, tokens))
            by_stage = {name: int(rows.sum()) for name, rows in blamed.items()}
        lost_mass = (weights * ~chosen[:, None]).sum(dim=-1).mean(dim=1)
        losses.add(
            Losses(
                needed=int(needed.sum()),
                lost=int(missed.sum()),
                choices=len(chosen),
                harmed=int(missed.any(dim=1).sum()),
                by_stage=by_stage,
                mass=float(lost_mass.sum()),
                dense=bool(chosen.all()),
            )
        )
    return losses


def total(parts: Iterable[Losses]) -> Losses:
    """The sum of losses of one method."""
    result = Losses()
    for part in parts:
        result.add(part)
    return result


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
        progress(f"{name}: {count} questions, {right} right with full attention, {seconds:.0f} s")
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
    rows = []
    for cell in report["results"]:
        of_all = [{"layer": TOTAL, **cell["total"]}] if len(cell["layers"]) > 1 else []
        rows += [{**cell, **figures} for figures in (*cell["layers"], *of_all)]
    needed = f"rows with at least {report['least']:g} of a query head's attention, and the stages that lose them"
    title = f"{needed}; contexts of a task and length: {report['contexts']}"
    print_whole(figures_table(title, "task", FIGURES, rows, "task"))


def _unless_dense(write: Figure) -> Figure:
    return lambda row: "" if row["dense"] else write(row)


def _lost_at(row: dict[str, Any]) -> str:
    if row["dense"]:
        return "attends to every row"
    shares = row["lost_share_by_stage"]
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items()) if shares else "tells no stages"


FIGURES: dict[str, Figure] = {
    "tokens": lambda row: f"{row['length']:,}" if isinstance(row["length"], int) else row["length"],
    "right": lambda row: f"{row['right']}/{row['questions']}",
    "method": lambda row: str(row["method"]),
    "layer": lambda row: str(row["layer"]),
    "needed": lambda row: str(row["needed"]),
    "lost": _unless_dense(lambda row: f"{row['lost_share']:.1%}"),
    "lost at": _lost_at,
    "choices": _unless_dense(lambda row: f"{row['harmed_share']:.1%}"),
    "mass\nlost": _unless_dense(lambda row: f"{row['mass_lost']:.3f}"),
}


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
    add_output_flags(result, ", after every task")
    return result


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure; the JSON-able report. Progress goes to stderr, as a long context takes minutes."""
    variants = parse_variants(options.methods)
    if options.threads is not None:
        at_least_one(options, "threads")
        torch.set_num_threads(options.threads)
    chosen, lengths = chosen_questions(options, "n", "questions")
    if not 0 < options.least <= 1:
        raise ConfigError(
            f"--least = {options.least}: must be in (0, 1], a share of the attention; 0.05 is the default"
        )
    model, _ = load_model(options.needle / "model")
    layers = chosen_layers(options.layers, model.config.num_hidden_layers)
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


main = command(parser().parse_args, run, print_report)

if __name__ == "__main__":
    sys.exit(main())
