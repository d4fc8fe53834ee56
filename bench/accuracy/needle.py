"""Accuracy on the needle tasks: kvseek engines generate the answers, as they would be served.

    python bench/accuracy/needle.py --engine_dir FULL --engine_dir OTHER --lengths 4096,16384 --output FILE

Questions and scores are those of needle_tasks/. What a method loses against full attention on them is retrieval error: the
answers cannot be guessed. Answers are counted by context, and later runs go on with a result file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvseek import LLM, SamplingParams
from kvseek.bench.accuracy.needle_tasks import vocabulary
from kvseek.bench.accuracy.needle_tasks.facts import Score, score
from kvseek.bench.accuracy.needle_tasks.tasks import ROUNDS, TASKS, Dialogue, make_dialogues
from kvseek.bench.machine import describe, describe_gpu
from kvseek.bench.output import add_output_flags, at_least_one, command, progress, write_result
from kvseek.bench.variants import DENSE
from kvseek.core.config import BlockSparseConfig, CacheConfig, EngineConfig
from kvseek.core.errors import ConfigError
from kvseek.core.request import FinishReason
from kvseek.plugins.registry import PAPER, get_method

Z_95 = 1.959963984540054  # of the standard normal distribution, 2.5 % lies above
SIZES = ("max_batch_size", "max_input_len", "max_seq_len")  # of an engine, on which no answer depends

EXTRA_TOKENS = 8  # an answer may be so much longer than the right one


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


def converse(llm: LLM, dialogues: Sequence[Dialogue]) -> list[list[tuple[Score, float]]]:
    """Ask round after round; earlier questions and the model's own answers stand in the prompt of the next.

    Returns the score and the attended share, by dialogue and round.
    """
    histories = [list(dialogue.context) for dialogue in dialogues]
    answers: list[list[tuple[Score, float]]] = [[] for _ in dialogues]
    for number in range(len(dialogues[0].rounds)):
        params = []
        for history, dialogue in zip(histories, dialogues, strict=True):
            _, question, gold = dialogue.rounds[number]
            history += question
            limit, stop = len(gold) + EXTRA_TOKENS, (vocabulary.FULL_STOP,)
            params.append(SamplingParams(max_tokens=limit, ignore_eos=True, stop_token_ids=stop))
        outputs = llm.generate(histories, params)
        for history, dialogue, output, found in zip(histories, dialogues, outputs, answers, strict=True):
            full_stop = [vocabulary.FULL_STOP] if output.finish_reason == FinishReason.END_ID else []
            ids = [*output.token_ids, *full_stop]  # the right answers have it too
            history += ids
            kind, _, gold = dialogue.rounds[number]
            found.append((score(kind, gold, ids), output.attended_share))
    return answers


def check_vocabulary(config: EngineConfig, name: str) -> None:
    """Raise ConfigError if an engine's model has not the words of the tasks."""
    words = config.model.vocab_size
    if words != vocabulary.SIZE:
        remedy = "build the engine from a model that train_needle.py wrote"
        raise ConfigError(f"{name}: vocab_size = {words}: must be {vocabulary.SIZE}, the words of the tasks; {remedy}")


def check_lengths(config: EngineConfig, name: str, length: int, rounds: int) -> None:
    """Raise ConfigError if an engine is built for less than `rounds` questions, or its model has too few positions."""
    longest = length + EXTRA_TOKENS * rounds
    positions = config.model.max_position_embeddings
    for field_name in ("max_input_len", "max_seq_len"):
        limit = getattr(config, field_name)
        if longest > limit:
            remedy = f"build with --{field_name} {longest} or more"
            if longest > positions:
                remedy = f"the model has {positions} positions: lower --lengths by {longest - positions}"
            raise ConfigError(f"{name}: {field_name} = {limit}: must be >= {longest} for these questions; {remedy}")


def engine_names(directories: Sequence[Path], configs: Sequence[EngineConfig]) -> list[str]:
    """What to call each engine.

    Its method and settings; also those of its cache, or only its directory, where that would name two engines alike.
    """
    for with_cache in (False, True):
        names = [described(config, with_cache=with_cache) for config in configs]
        if len(set(names)) == len(names):
            return names
    return [str(directory) for directory in directories]


def described(config: EngineConfig, *, with_cache: bool = False) -> str:
    """A method with its settings that are not the defaults, or with its paper's, in the form of the benchmarks' --methods."""
    method = get_method(config.method)
    settings = dataclasses.asdict(method.configure(config.method_config))
    preset = (
        PAPER if method.paper and settings == dataclasses.asdict(method.configure(method.preset(PAPER)[0])) else None
    )
    fields, own_cache = method.preset(preset)
    defaults = dataclasses.asdict(method.configure(fields))
    changed = {name: value for name, value in settings.items() if value != defaults[name]}
    changed |= unusual(config, "weight_only_precision", "quantize_lm_head", "tp_size", "prefill_attention")
    if config.prefill_attention != DENSE:
        own, usual = dataclasses.asdict(config.block_sparse), dataclasses.asdict(BlockSparseConfig())
        changed |= {f"block_sparse.{name}": value for name, value in own.items() if value != usual[name]}
    changed |= unusual(config, "prefill_chunk_tokens")
    if with_cache:
        usual = dataclasses.asdict(CacheConfig(**{**method.traits().cache_defaults, **own_cache}))
        cache = dataclasses.asdict(config.cache)
        changed |= {f"cache.{name}": value for name, value in cache.items() if value != usual[name]}
    words = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in changed.items()]
    words = [preset, *words] if preset else words
    return f"{config.method}:{','.join(words)}" if words else config.method


def unusual(config: EngineConfig, *names: str) -> dict[str, Any]:
    """Those of an engine's fields that have not the default's value."""
    return {name: value for name in names if (value := getattr(config, name)) != getattr(EngineConfig, name)}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--engine_dir", type=Path, action="append", default=[], help="again to compare; the first is the reference")
    add_question_flags(parser, n=24, lengths="4096,16384")
    add("--rounds", type=int, default=ROUNDS, help="of a multi_turn dialogue")
    add("--threads", type=int, help="CPU threads; torch's choice if left out")
    add("--seconds", type=float, default=float("inf"), help="begin nothing new after that time; run again to go on")
    add("--results", type=Path, action="append", default=[], help="a result file to go on with; again to merge several")
    add_output_flags(parser, ", after every few contexts; one that is there is gone on with")
    return parser.parse_args(argv)


def add_question_flags(parser: argparse.ArgumentParser, *, n: int, lengths: str) -> None:
    """Add the flags that say which questions are asked, with their defaults."""
    parser.add_argument("--tasks", default="all", help="comma list, or all")
    parser.add_argument("--lengths", default=lengths, help="comma list of context lengths in tokens")
    parser.add_argument("--n", type=int, default=n, help="contexts of each task and length (multi_turn: dialogues)")


def chosen_questions(arguments: argparse.Namespace, *counts: str) -> tuple[list[str], list[int]]:
    """Tasks and lengths that the flags name; raises ConfigError if they, or the flags `counts`, are out of range."""
    chosen = list(TASKS) if arguments.tasks == "all" else arguments.tasks.split(",")
    unknown = sorted(set(chosen) - set(TASKS))
    if unknown:
        raise ConfigError(f"--tasks: {unknown[0]!r} is unknown; choose from {', '.join(TASKS)}, or all")
    at_least_one(arguments, *counts)
    lengths = arguments.lengths.split(",")
    if not all(length.isdecimal() and int(length) >= 256 for length in lengths):
        raise ConfigError(f"--lengths = {arguments.lengths!r}: must be a comma list of lengths >= 256; try 4096")
    return chosen, [int(length) for length in lengths]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ask every engine every question that the result files have no answer to; the document, as Results.document."""
    end = time.monotonic() + arguments.seconds
    chosen, lengths = chosen_questions(arguments, "n", "rounds")
    results = Results({"rounds": arguments.rounds})
    written = [arguments.output] if arguments.output and arguments.output.exists() else []
    for path in [*arguments.results, *written]:
        results.read(path)
    if not arguments.engine_dir and not results.cells:
        raise ConfigError("--engine_dir: must name an engine, or --results a result file to show; name one")
    with ExitStack() as stack:
        llms = [stack.enter_context(LLM(path, threads=arguments.threads)) for path in arguments.engine_dir]
        named = dict(zip(engine_names(arguments.engine_dir, [llm.config for llm in llms]), llms, strict=True))
        for name, llm in named.items():
            rounds = arguments.rounds if "multi_turn" in chosen else 1
            check_vocabulary(llm.config, name)
            check_lengths(llm.config, name, max(lengths), rounds)
            results.add_engine(name, dataclasses.asdict(llm.config), "--engine_dir")
        if named:
            on_gpu = any(llm.config.device == "cuda" for llm in llms)
            gpu = {"gpu": describe_gpu(torch.device("cuda"))} if on_gpu else {}
            results.add_machine({**describe(), **gpu})
        for length in lengths:
            for task in chosen:
                for name, llm in named.items():
                    ask(arguments, results, llm, name, task, length, end)
    return results.document()


def ask(
    arguments: argparse.Namespace, results: Results, llm: LLM, name: str, task: str, length: int, end: float
) -> None:
    """Ask an engine what is left of one task and length, a batch of contexts at a time; progress goes to stderr."""
    cell = results.cell(length, task, name)
    while (left := arguments.n - cell.contexts) > 0:
        start = time.monotonic()
        if start >= end:
            progress(f"{task} {length} {name}: {left} contexts left; run again to go on")
            return
        count = min(left, llm.config.max_batch_size)
        dialogues = make_dialogues(task, length, count, rounds=arguments.rounds, first=cell.contexts)
        cell.add(converse(llm, dialogues), time.monotonic() - start)
        if arguments.output:
            write_result(arguments.output, results.document())
        done = f"{cell.contexts} contexts, exact {100 * cell.exact:.1f} %, {cell.seconds:.0f} s"
        progress(f"{task} {length} {name}: {done}")


main = command(parse, run, print_table)

if __name__ == "__main__":
    sys.exit(main())
