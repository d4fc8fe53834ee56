"""Accuracy on the needle tasks: kvseek engines generate the answers, as they would be served.

    python evaluation/needle.py --needle ../shared/needle --engine_dir FULL --engine_dir OTHER --lengths 4096,16384

Questions and scores are those of the needle folder's tasks.py. What a method loses against full attention on them is
retrieval error: the answers cannot be guessed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from kvseek import LLM, SamplingParams
from kvseek.core.config import EngineConfig
from kvseek.core.errors import ConfigError, KvseekError
from kvseek.core.request import FinishReason
from kvseek.evaluation.long_dialogue import make_long_dialogue
from kvseek.measurement.machine import describe
from kvseek.measurement.output import write_result
from kvseek.plugins.registry import get_method

FIRST_SEED = 10**6  # as the needle folder's own evaluation: its training drew other seeds
ROUNDS = 8  # of a multi_turn dialogue in the needle folder
QUESTIONS_PER_CONTEXT = {"niah_single": 1, "multi_turn": 1, "variable_tracking": 4}
MOST_QUESTIONS_PER_CONTEXT = 8
TOKENS_PER_VALUE_GROUP = 2048  # niah_multivalue has one group of values to ask for in so many tokens
EXTRA_TOKENS = 8  # an answer may be so much longer than the right one


@dataclass
class Dialogue:
    """Questions on one context, asked one after another; most dialogues have one."""

    context: list[int]
    rounds: list[tuple[str, list[int], list[int]]]  # kind of question, its ids, ids of the right answer

    @property
    def longest(self) -> int:
        """Tokens that the dialogue can grow to."""
        return len(self.context) + sum(len(q) + len(gold) + EXTRA_TOKENS for _, q, gold in self.rounds)


@dataclass
class Cell:
    """Result of one engine on one task and length; percentages."""

    task: str
    length: int
    engine: str
    questions: int = 0
    exact: float = 0.0
    part: float = 0.0
    attended_share: float = 1.0
    seconds: float = 0.0
    by_round: list[float] = field(default_factory=list)


def load_tasks(folder: Path) -> ModuleType:
    """The needle folder's tasks.py as a module; raises ConfigError if it is not there."""
    path = folder / "tasks.py"
    spec = importlib.util.spec_from_file_location("needle_tasks", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"--needle = {str(folder)!r}: must be the needle folder, with tasks.py and model/; name it")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


def make_dialogues(tasks: ModuleType, task: str, length: int, count: int, rounds: int = ROUNDS) -> list[Dialogue]:
    """At least `count` questions of a task, each a dialogue of its own; multi_turn: count / 4 dialogues of `rounds`."""
    wanted = max(2, count // 4) if task == "multi_turn" else count
    seed = FIRST_SEED
    if task == "multi_turn" and rounds != ROUNDS:
        return [Dialogue(*make_long_dialogue(tasks, length, seed + number, rounds)) for number in range(wanted)]
    dialogues: list[Dialogue] = []
    while len(dialogues) < wanted:
        questions = min(QUESTIONS_PER_CONTEXT.get(task, MOST_QUESTIONS_PER_CONTEXT), wanted - len(dialogues))
        if task == "niah_multivalue":
            questions = min(questions, max(1, length // TOKENS_PER_VALUE_GROUP))
        example = tasks.make_example(task, length, seed, questions=questions)
        context = [int(i) for i in example.context]
        asked = [(kind, [*map(int, question)], [*map(int, gold)]) for kind, question, gold in example.rounds]
        groups = [asked] if task == "multi_turn" else [[one] for one in asked]
        dialogues += [Dialogue(context, group) for group in groups]
        seed += 1
    return dialogues


def converse(llm: LLM, tasks: ModuleType, dialogues: Sequence[Dialogue]) -> list[list[tuple[dict[str, float], float]]]:
    """Ask round after round; earlier questions and the model's own answers stand in the prompt of the next.

    Returns the score of tasks.py and the attended share, by round and dialogue.
    """
    histories = [list(dialogue.context) for dialogue in dialogues]
    results = []
    for number in range(len(dialogues[0].rounds)):
        params = []
        for history, dialogue in zip(histories, dialogues, strict=True):
            _, question, gold = dialogue.rounds[number]
            history += question
            limit = len(gold) + EXTRA_TOKENS
            params.append(SamplingParams(max_tokens=limit, ignore_eos=True, stop_token_ids=(tasks.DOT,)))
        scored = []
        for history, dialogue, output in zip(histories, dialogues, llm.generate(histories, params), strict=True):
            full_stop = [tasks.DOT] if output.finish_reason == FinishReason.END_ID else []
            ids = [*output.token_ids, *full_stop]  # the right answers have it too
            history += ids
            kind, _, gold = dialogue.rounds[number]
            scored.append((tasks.score(kind, gold, ids), output.attended_share))
        results.append(scored)
    return results


def check_lengths(config: EngineConfig, name: str, dialogues: Sequence[Dialogue]) -> None:
    """Raise ConfigError if an engine is built for shorter requests, or its model has too few positions."""
    longest = max(dialogue.longest for dialogue in dialogues)
    positions = config.model.max_position_embeddings
    for field_name in ("max_input_len", "max_seq_len"):
        limit = getattr(config, field_name)
        if longest > limit:
            remedy = f"build with --{field_name} {longest} or more"
            if longest > positions:
                remedy = f"the model has {positions} positions: lower --lengths by {longest - positions}"
            raise ConfigError(f"{name}: {field_name} = {limit}: must be >= {longest} for these questions; {remedy}")


def evaluate(
    llm: LLM, name: str, tasks: ModuleType, task: str, length: int, count: int, rounds_asked: int = ROUNDS
) -> Cell:
    """Ask an engine the questions of one task at one length."""
    dialogues = make_dialogues(tasks, task, length, count, rounds_asked)
    check_lengths(llm.config, name, dialogues)
    start = time.perf_counter()
    rounds = converse(llm, tasks, dialogues)
    cell = Cell(task, length, name, seconds=time.perf_counter() - start)
    scores = [score for scored in rounds for score, _ in scored]
    cell.questions = len(scores)
    cell.exact = percent([score["exact"] for score in scores])
    cell.part = percent([score["part"] for score in scores])
    shares = [share for scored in rounds for _, share in scored]
    cell.attended_share = sum(shares) / len(shares)
    if len(rounds) > 1:
        cell.by_round = [percent([score["exact"] for score, _ in scored]) for scored in rounds]
    return cell


def percent(values: Sequence[float]) -> float:
    """Mean of values from 0 to 1, in percent."""
    return 100.0 * sum(values) / len(values)


def engine_names(directories: Sequence[Path], configs: Sequence[EngineConfig]) -> list[str]:
    """What to call each engine: its method; with the settings that differ where methods repeat, or else its directory."""
    methods = [config.method for config in configs]
    names = [
        method if methods.count(method) == 1 else described(config)
        for method, config in zip(methods, configs, strict=True)
    ]
    return names if len(set(names)) == len(names) else [str(directory) for directory in directories]


def described(config: EngineConfig) -> str:
    """A method with its settings that are not the defaults."""
    method = get_method(config.method)
    settings, defaults = (dataclasses.asdict(method.configure(values)) for values in (config.method_config, {}))
    changed = [f"{name}={value}" for name, value in settings.items() if value != defaults[name]]
    return " ".join([config.method, *changed])


def print_table(cells: Sequence[Cell], names: Sequence[str]) -> None:
    """Print a row for each task and length: every engine's figures, and the difference to the first engine's."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="exact % / part %, attended share, seconds; difference of exact in points")
    for heading in ("task", "tokens", "questions", *names, *(f"{name} − {names[0]}" for name in names[1:])):
        table.add_column(heading, justify="left" if heading == "task" else "right", no_wrap=True)
    for start in range(0, len(cells), len(names)):
        group = cells[start : start + len(names)]
        figures = [f"{c.exact:.1f} / {c.part:.1f}, {c.attended_share:.0%}, {c.seconds:.0f} s" for c in group]
        differences = [f"{c.exact - group[0].exact:+.1f}" for c in group[1:]]
        table.add_row(group[0].task, f"{group[0].length:,}", str(group[0].questions), *figures, *differences)
    console = Console()
    console.width = max(console.width, 44 + 48 * len(names))  # nothing cut, whatever the terminal
    console.print(table)
    for cell in cells:
        if len(cell.by_round) > ROUNDS:
            parts = [cell.by_round[start : start + ROUNDS] for start in range(0, len(cell.by_round), ROUNDS)]
            means = ", ".join(f"{sum(part) / len(part):.1f}" for part in parts)
            console.print(
                f"{cell.task} {cell.length:,} {cell.engine}: exact by {ROUNDS} rounds: {means}", highlight=False
            )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--needle", type=Path, default=Path("../shared/needle"), help="the needle folder")
    parser.add_argument(
        "--engine_dir",
        type=Path,
        action="append",
        required=True,
        help="give it again to compare; the first is the reference",
    )
    parser.add_argument("--tasks", default="all", help="comma list, or all")
    parser.add_argument("--lengths", default="4096,16384", help="comma list of context lengths in tokens")
    parser.add_argument("--n", type=int, default=25, help="questions of each task (multi_turn: n/4 dialogues)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of a multi_turn dialogue; 8 asks the folder's own")
    parser.add_argument("--threads", type=int, help="CPU threads; torch's choice if left out")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--output", type=Path, help="write the JSON to this file too, after every task")
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ask every engine every question; progress goes to stderr, as a cell may take minutes."""
    tasks = load_tasks(arguments.needle)
    chosen, lengths = chosen_questions(arguments, tasks.TASKS, default_n=25, a_length=4096)
    if arguments.rounds < 1:
        raise ConfigError(f"--rounds = {arguments.rounds}: must be >= 1; {ROUNDS} is the default")
    with ExitStack() as stack:
        llms = [stack.enter_context(LLM(path, threads=arguments.threads)) for path in arguments.engine_dir]
        return ask_all(arguments, tasks, chosen, lengths, llms)


def ask_all(
    arguments: argparse.Namespace, tasks: ModuleType, chosen: Sequence[str], lengths: Sequence[int], llms: Sequence[LLM]
) -> dict[str, Any]:
    """Ask the questions of the chosen tasks at all lengths; the document, whose cells are Cells."""
    names = engine_names(arguments.engine_dir, [llm.config for llm in llms])
    configs = {name: dataclasses.asdict(llm.config) for name, llm in zip(names, llms, strict=True)}
    head = {"evaluation": "needle", "machine": describe(), "rounds": arguments.rounds, "engines": configs}
    cells: list[Cell] = []
    for length in lengths:
        for task in chosen:
            for name, llm in zip(names, llms, strict=True):
                cell = evaluate(llm, name, tasks, task, length, arguments.n, arguments.rounds)
                cells.append(cell)
                print(f"{task} {length} {name}: exact {cell.exact:.1f} ({cell.seconds:.0f} s)", file=sys.stderr)
            if arguments.output:
                write_result(arguments.output, jsonable({**head, "cells": cells}))
    return {**head, "cells": cells}


def chosen_questions(
    arguments: argparse.Namespace, known: Collection[str], *, default_n: int, a_length: int
) -> tuple[list[str], list[int]]:
    """Tasks and lengths that --tasks and --lengths name; raises ConfigError if one of them or --n is out of range.

    Parameters
    ----------
    known : collection of str
        All tasks.
    default_n, a_length : int
        What the errors advise.
    """
    chosen = list(known) if arguments.tasks == "all" else arguments.tasks.split(",")
    unknown = sorted(set(chosen) - set(known))
    if unknown:
        raise ConfigError(f"--tasks: {unknown[0]!r} is unknown; choose from {', '.join(known)}, or all")
    if arguments.n < 1:
        raise ConfigError(f"--n = {arguments.n}: must be >= 1; {default_n} is the default")
    lengths = arguments.lengths.split(",")
    if not all(length.isdecimal() and int(length) >= 256 for length in lengths):
        raise ConfigError(f"--lengths = {arguments.lengths!r}: must be a comma list of lengths >= 256; try {a_length}")
    return chosen, [int(length) for length in lengths]


def jsonable(document: dict[str, Any]) -> dict[str, Any]:
    """The document with its cells as dictionaries."""
    return {**document, "cells": [dataclasses.asdict(cell) for cell in document["cells"]]}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    arguments = parse(argv)
    try:
        document = run(arguments)
    except (KvseekError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(jsonable(document), indent=2))
    else:
        print_table(document["cells"], list(document["engines"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
