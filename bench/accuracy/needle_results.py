"""Answers to needle questions, counted by context: result files that later runs go on with, and the table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvseek.bench.accuracy.needle_tasks.facts import Score
from kvseek.bench.accuracy.needle_tasks.tasks import ROUNDS
from kvseek.core.errors import ConfigError

Z_95 = 1.959963984540054  # of the standard normal distribution, 2.5 % lies above
SIZES = ("max_batch_size", "max_input_len", "max_seq_len")  # of an engine, on which no answer depends


@dataclass
class Cell:
    """Answers of one engine to the questions of one task and length.

    Attributes
    ----------
    right : list of str
        For each context, from the first on, a character for each round: 1 for an exact answer, 0 for another.
    part, attended_share : float
        Means over the questions: of Score.part, and of the share of the cached tokens that decode steps attended to.
    """

    task: str
    length: int
    engine: str
    right: list[str] = field(default_factory=list)
    part: float = 0.0
    attended_share: float = 0.0
    seconds: float = 0.0

    @property
    def contexts(self) -> int:
        """Contexts that were read."""
        return len(self.right)

    @property
    def questions(self) -> int:
        """Questions that were asked."""
        return sum(map(len, self.right))

    @property
    def exact(self) -> float:
        """Share of exact answers."""
        return "".join(self.right).count("1") / self.questions

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of `exact` with the contexts as samples, for questions on one context may fail together."""
        return wilson(self.exact, self.contexts)

    @property
    def by_round(self) -> list[float]:
        """Exact answers by round of a dialogue."""
        return [sum(answer == "1" for answer in answers) / self.contexts for answers in zip(*self.right, strict=True)]

    def add(self, answers: Sequence[Sequence[tuple[Score, float]]], seconds: float) -> None:
        """Take in, for each further context, the score and the attended share of each round."""
        flat = [answer for of_context in answers for answer in of_context]
        before, count = self.questions, self.questions + len(flat)
        self.part = (self.part * before + sum(score.part for score, _ in flat)) / count
        self.attended_share = (self.attended_share * before + sum(share for _, share in flat)) / count
        self.right += ["".join(str(int(score.exact)) for score, _ in of_context) for of_context in answers]
        self.seconds += seconds

    def report(self) -> dict[str, Any]:
        """JSON-able; shares are in percent but for the attended share."""
        counted = {"contexts": self.contexts, "questions": self.questions}
        figures = {"exact": percent(self.exact), "interval": [percent(end) for end in self.interval]}
        rounds = {"by_round": [percent(share) for share in self.by_round]} if len(self.right[0]) > 1 else {}
        named = {"task": self.task, "length": self.length, "engine": self.engine}
        means = {"part": percent(self.part), "attended_share": self.attended_share, "seconds": self.seconds}
        return {**named, **counted, **figures, **means, **rounds, "right": self.right}

    @staticmethod
    def from_report(report: dict[str, Any]) -> Cell:
        """The cell of a report; raises KeyError if it lacks one of the fields."""
        names = ("task", "length", "engine", "right", "part", "attended_share", "seconds")
        fields = {name: report[name] for name in names}
        return Cell(**{**fields, "part": fields["part"] / 100})


def wilson(share: float, samples: int) -> tuple[float, float]:
    """95 % interval of a proportion that `samples` independent samples have estimated as `share` (0 to 1).

    The score interval of E. B. Wilson, "Probable inference, the law of succession, and statistical inference", Journal of
    the American Statistical Association 22 (1927). `share` times `samples` may be no whole number: where several questions
    are asked on one context, `samples` is the number of contexts.
    """
    spread = Z_95**2 / samples
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def percent(share: float) -> float:
    """A share in percent, without digits that are rounding errors."""
    return round(100 * share, 6)


@dataclass
class Results:
    """Cells of several engines, tasks and lengths, whose questions were made with the same settings.

    Attributes
    ----------
    settings : dict
        What the questions depend on beside the task: rounds of a dialogue.
    engines : dict
        Configurations by the engines' names.
    cells : dict
        By length, task and engine.
    machines : list of dict
        Where answers were generated, every machine and commit once.
    """

    settings: dict[str, int]
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    cells: dict[tuple[int, str, str], Cell] = field(default_factory=dict)
    machines: list[dict[str, Any]] = field(default_factory=list)

    def cell(self, length: int, task: str, engine: str) -> Cell:
        """The cell of these three; a new one if there is none."""
        return self.cells.setdefault((length, task, engine), Cell(task, length, engine))

    def add_engine(self, name: str, config: dict[str, Any], source: str) -> None:
        """Note an engine's configuration; raises ConfigError if the results of this name are of another one."""
        given = json.loads(json.dumps(config))
        known = self.engines.setdefault(name, given)
        for entry in sorted({*known, *given} - {*SIZES}):
            if known.get(entry) != given.get(entry):
                raise ConfigError(
                    f"{source}: engine {name!r}: {entry} = {given.get(entry)!r}: must be {known.get(entry)!r}, as in the "
                    "results so far, for its answers to be counted with them; name another --output"
                )

    def add_machine(self, machine: dict[str, Any]) -> None:
        """Note a machine, unless it is noted already."""
        given = json.loads(json.dumps(machine))
        if given not in self.machines:
            self.machines.append(given)

    def read(self, path: Path) -> None:
        """Add a result file; where two have the same cell, that with more contexts stays.

        Raises
        ------
        ConfigError
            If the file is none of needle.py's, or was written before contexts were counted, or has other settings.
        """
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            cells = [Cell.from_report(report) for report in document["cells"]]
            settings, engines, machines = document["settings"], document["engines"], document["machines"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: must be a result file of needle.py that counts contexts; ask again") from error
        if settings != self.settings:
            raise ConfigError(f"{path}: has {settings}: must have {self.settings}, as this run; name another file")
        for name, config in engines.items():
            self.add_engine(name, config, str(path))
        for machine in machines:
            self.add_machine(machine)
        for cell in cells:
            known = self.cell(cell.length, cell.task, cell.engine)
            if cell.contexts > known.contexts:
                self.cells[cell.length, cell.task, cell.engine] = cell

    def document(self) -> dict[str, Any]:
        """JSON-able; cells without an answer are left out."""
        reports = [cell.report() for cell in self.cells.values() if cell.right]
        head = {"evaluation": "needle", "machines": self.machines, "settings": self.settings, "engines": self.engines}
        return {**head, "cells": reports}


def compared(cell: Cell, reference: Cell) -> str:
    """Difference of exact answers in points on the contexts that both have read, and which answers make it."""
    pairs = [pair for both in zip(cell.right, reference.right, strict=False) for pair in zip(*both, strict=True)]
    if not pairs:
        return ""
    lost, gained = pairs.count(("0", "1")), pairs.count(("1", "0"))
    return f"{100 * (gained - lost) / len(pairs):+.1f} ({lost} lost, {gained} gained)"


def print_table(document: dict[str, Any]) -> None:
    """Print a row for each task and length: every engine's figures, and the difference to the first engine's."""
    from rich.console import Console
    from rich.table import Table

    names = list(document["engines"])
    table = Table(title="exact % [95 % interval], part %, attended share, seconds; difference of exact in points")
    headings = ("task", "tokens", "contexts", "questions", *names, *(f"{name} − {names[0]}" for name in names[1:]))
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "task" else "right", no_wrap=True)
    cells = [Cell.from_report(report) for report in document["cells"]]
    for length, task in sorted({(c.length, c.task): None for c in cells}, key=lambda key: key[0]):
        row = {cell.engine: cell for cell in cells if (cell.length, cell.task) == (length, task)}
        none = Cell(task, length, "")
        differences = [compared(row.get(name, none), row.get(names[0], none)) for name in names[1:]]
        contexts, questions = (
            _span(getattr(cell, name) for cell in row.values()) for name in ("contexts", "questions")
        )
        shown = [_figures(row[name]) if name in row else "" for name in names]
        table.add_row(task, f"{length:,}", contexts, questions, *shown, *differences)
    console = Console()
    console.width = max(console.width, 60 + 72 * len(names))  # nothing cut, whatever the terminal
    console.print(table)
    for cell in cells:
        if len(cell.by_round) > ROUNDS:
            parts = [cell.by_round[start : start + ROUNDS] for start in range(0, len(cell.by_round), ROUNDS)]
            means = ", ".join(f"{100 * sum(part) / len(part):.1f}" for part in parts)
            line = f"{cell.task} {cell.length:,} {cell.engine}: exact by {ROUNDS} rounds: {means}"
            console.print(line, highlight=False)


def _span(counts: Iterable[int]) -> str:
    """A count that all engines share, or the least and the most."""
    found = sorted(set(counts))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _figures(cell: Cell) -> str:
    low, high = (percent(end) for end in cell.interval)
    interval = f"{percent(cell.exact):.1f} [{low:.1f}, {high:.1f}]"
    return f"{interval}, {percent(cell.part):.1f}, {cell.attended_share:.0%}, {cell.seconds:.0f} s"
