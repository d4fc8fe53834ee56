"""Accuracy on tasks: engines generate the answers to questions on long contexts, as they are served.

    kvseek evaluate tasks --model MODEL --methods full,nested --top_k 100,512 --lengths 4096 --output FILE
    kvseek evaluate tasks --suite needle --engine_dir FULL --engine_dir OTHER --lengths 4096,16384 --output FILE

What is asked is a suite's (questions.py): text_tasks.py in English for any model, needle_tasks/ in the words of a tiny model
that full attention answers practically always. Answers are counted by context, and later runs go on with a result file.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvseek import LLM, SamplingParams
from kvseek.bench.accuracy import text_tasks
from kvseek.bench.accuracy.haystack import ESSAYS, python_reference, read_text
from kvseek.bench.accuracy.needle_tasks.suite import NeedleSuite
from kvseek.bench.accuracy.needle_tasks.tasks import ROUNDS, TASKS
from kvseek.bench.accuracy.questions import Conversation, Score, Suite
from kvseek.bench.budgets import add_budget_flags, read_budgets
from kvseek.bench.engines import free_memory, variant_engines
from kvseek.bench.machine import describe, describe_gpu
from kvseek.bench.output import at_least_one, numbers, progress, write_result
from kvseek.bench.variants import DENSE, FORM
from kvseek.core.config import CHOICES, BlockSparseConfig, CacheConfig, EngineConfig, read_config
from kvseek.core.errors import ConfigError, require
from kvseek.core.manifest import read_manifest
from kvseek.core.request import FinishReason
from kvseek.plugins.registry import PAPER, get_method

Z_95 = 1.959963984540054  # of the standard normal distribution, 2.5 % lies above
SAMPLES = 2000  # of contexts, drawn with replacement, for the interval of a difference
SIZES = ("max_batch_size", "max_input_len", "max_seq_len")  # of an engine, on which no answer depends
SUITES = {"text": text_tasks.TASKS, "needle": list(TASKS)}
SHARES = " .:-=+*#%@"  # of the map: a blank for 0, then a ninth each


@dataclass
class Cell:
    """Answers of one engine to the questions of one task and length.

    Attributes
    ----------
    right : list of str
        For each context, from the first on, a character for each round: 1 for an exact answer, 0 for another.
    parts : list of float
        For each context, the mean of Score.part over its rounds.
    attended_share : float
        Mean over the questions of the share of the cached tokens that decode steps attended to.
    """

    task: str
    length: int
    engine: str
    right: list[str] = field(default_factory=list)
    parts: list[float] = field(default_factory=list)
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
    def part(self) -> float:
        """Mean of Score.part."""
        return math.fsum(self.parts) / self.contexts

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
        self.attended_share = (self.attended_share * before + sum(share for _, share in flat)) / count
        self.parts += [round(math.fsum(score.part for score, _ in each) / len(each), 6) for each in answers]
        self.right += ["".join(str(int(score.exact)) for score, _ in of_context) for of_context in answers]
        self.seconds += seconds

    def report(self) -> dict[str, Any]:
        """JSON-able; shares are in percent but for the attended share."""
        counted = {"contexts": self.contexts, "questions": self.questions}
        figures = {"exact": percent(self.exact), "interval": [percent(end) for end in self.interval]}
        rounds = {"by_round": [percent(share) for share in self.by_round]} if len(self.right[0]) > 1 else {}
        named = {"task": self.task, "length": self.length, "engine": self.engine}
        means = {"part": percent(self.part), "attended_share": self.attended_share, "seconds": self.seconds}
        return {**named, **counted, **figures, **means, **rounds, "right": self.right, "parts": self.parts}

    @staticmethod
    def from_report(report: dict[str, Any]) -> Cell:
        """The cell of a report; raises KeyError if it lacks one of the fields."""
        return Cell(**{each.name: report[each.name] for each in dataclasses.fields(Cell)})


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
        What the questions depend on beside task and length: those of the suite.
    engines, fingerprints : dict
        Configurations by the engines' names; what their builds depended on, as a digest.
    cells : dict
        By length, task and engine.
    machines : list of dict
        Where answers were generated, every machine and commit once.
    """

    settings: Mapping[str, Any]
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    cells: dict[tuple[int, str, str], Cell] = field(default_factory=dict)
    machines: list[dict[str, Any]] = field(default_factory=list)
    fingerprints: dict[str, str] = field(default_factory=dict)

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
            If the file is another command's, or was written before `parts` were, or has other settings.
        """
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            cells = [Cell.from_report(report) for report in document["cells"]]
            settings, engines, machines = document["settings"], document["engines"], document["machines"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: must be a result file of this command that has `parts`; ask again") from error
        if settings != self.settings:
            raise ConfigError(f"{path}: has {settings}: must have {self.settings}, as this run; name another file")
        for name, config in engines.items():
            self.add_engine(name, config, str(path))
        self.fingerprints |= document["fingerprints"]
        for machine in machines:
            self.add_machine(machine)
        for cell in cells:
            known = self.cell(cell.length, cell.task, cell.engine)
            if cell.contexts > known.contexts:
                self.cells[cell.length, cell.task, cell.engine] = cell

    def document(self) -> dict[str, Any]:
        """JSON-able; cells without an answer are left out."""
        reports = [cell.report() for cell in self.cells.values() if cell.right]
        head = {"evaluation": "tasks", "machines": self.machines, "settings": self.settings}
        return {**head, "engines": self.engines, "fingerprints": self.fingerprints, "cells": reports}


def compared(cell: Cell, reference: Cell) -> str:
    """Differences in points on the contexts that both have read: of exact answers, and which make it; of parts."""
    pairs = [pair for both in zip(cell.right, reference.right, strict=False) for pair in zip(*both, strict=True)]
    if not pairs:
        return ""
    lost, gained = pairs.count(("0", "1")), pairs.count(("1", "0"))
    exact = f"{100 * (gained - lost) / len(pairs):+.1f} ({lost} lost, {gained} gained)"
    mean, low, high = (100 * one for one in paired(cell.parts, reference.parts))
    return f"{exact}, {mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Mean difference on the contexts that both have read, and its 95 % interval by a bootstrap over contexts (Efron 1979)."""
    differences = np.array([own - other for own, other in zip(ours, theirs, strict=False)])
    drawn = np.random.default_rng(0).choice(differences, (SAMPLES, len(differences)))
    low, high = np.quantile(drawn.mean(1), (0.025, 0.975))
    return float(differences.mean()), float(low), float(high)


def by_depth(parts: Sequence[float], depths: int) -> list[float]:
    """Means of the parts at each depth of niah_single, of which the n-th context has that of n modulo `depths`."""
    listed = [parts[depth::depths] for depth in range(depths)]
    return [math.fsum(own) / len(own) for own in listed if own]


def print_report(document: dict[str, Any]) -> None:
    """Print a row for each task and length: every engine's figures, and the difference to the first engine's."""
    from rich.console import Console
    from rich.table import Table

    names = list(document["engines"])
    table = Table(
        title="exact % [95 % interval], part %, attended share, seconds; differences of exact and of part in points"
    )
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
    depths = document["settings"].get("depths", 1)
    for cell in cells:
        if cell.task == "niah_single" and depths > 1:
            map_line = "".join(SHARES[int(share * (len(SHARES) - 1))] for share in by_depth(cell.parts, depths))
            line = f"niah_single {cell.length:,} {cell.engine}: part by depth, first to last: |{map_line}|"
            console.print(line, highlight=False, markup=False)
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


def converse(llm: LLM, conversations: Sequence[Conversation]) -> list[list[tuple[Score, float]]]:
    """Ask round after round; earlier questions and the model's own answers stand in the prompt of the next.

    Returns the score and the attended share, by conversation and round.
    """
    histories = [list(one.context) for one in conversations]
    answers: list[list[tuple[Score, float]]] = [[] for _ in conversations]
    for number in range(len(conversations[0].questions)):
        params = []
        for history, one in zip(histories, conversations, strict=True):
            question = one.questions[number]
            history += question.ids
            ends = () if one.end_id is None else (one.end_id,)
            params.append(SamplingParams(max_tokens=question.max_tokens, ignore_eos=bool(ends), stop_token_ids=ends))
        outputs = llm.generate(histories, params)
        for history, one, output, found in zip(histories, conversations, outputs, answers, strict=True):
            ids = list(output.token_ids)
            if output.finish_reason == FinishReason.END_ID and one.end_id is not None:
                ids.append(one.end_id)
            history += ids
            found.append((one.questions[number].score(output.text, ids), output.attended_share))
    return answers


def check_lengths(config: EngineConfig, name: str, longest: int) -> None:
    """Raise ConfigError if an engine is built for fewer tokens of prompt and answer, or its model has too few positions."""
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
    changed |= unusual(
        config, "weight_only_precision", "quantize_lm_head", "tp_size", "prefill_attention", "prefill_precision"
    )
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


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `kvseek evaluate tasks`."""
    add = parser.add_argument
    add(
        "--suite",
        choices=list(SUITES),
        default="text",
        help="text: in English, for any model; needle: for train_needle.py's",
    )
    add("--tasks", default="all", help="comma list, or all")
    add("--lengths", default="4096,16384", help="comma list of context lengths, of prompt and answer together")
    add("--n", type=int, default=24, help="contexts of each task and length (multi_turn: dialogues)")
    add("--engine_dir", type=Path, action="append", default=[], help="again to compare; the first is the reference")
    add("--model", type=Path, help="Hugging Face directory or GGUF file, from which --methods are built")
    add("--methods", help=f"the first is what the others are compared with: comma list of {FORM}")
    add_budget_flags(parser)
    add("--batch", type=int, default=4, help="contexts that an engine of --model reads at once")
    add("--haystack", nargs="+", help=f"files, or PACKAGE:PATH such as {ESSAYS}; Python's reference if left out")
    add("--chat", action="store_true", help="write prompts with the model's chat template")
    add("--depths", type=int, default=5, help="of the needle of niah_single, one after another")
    add("--rounds", type=int, default=ROUNDS, help="of a multi_turn dialogue of the suite needle")
    add("--device", choices=CHOICES["device"], default="cpu", help="of engines of --model, as --dtype")
    add("--dtype", default="float32")
    add("--threads", type=int, help="CPU threads; torch's choice if left out")
    add("--seconds", type=float, default=float("inf"), help="begin nothing new after that time; run again to go on")
    add("--results", type=Path, action="append", default=[], help="a result file to go on with; again to merge several")


def read(arguments: argparse.Namespace) -> None:
    """Read the flags' values; raises ConfigError on those that cannot work."""
    tasks = SUITES[arguments.suite]
    arguments.tasks = tasks if arguments.tasks == "all" else arguments.tasks.split(",")
    unknown = sorted(set(arguments.tasks) - set(tasks))
    if unknown:
        raise ConfigError(f"--tasks: {unknown[0]!r} is unknown; choose from {', '.join(tasks)}, or all")
    at_least_one(arguments, "n", "rounds", "depths", "batch")
    arguments.lengths = numbers("lengths", arguments.lengths, 256)
    both = (arguments.model is None) == (arguments.methods is None)
    require(both, "--methods", arguments.methods, "given with --model, and only then", "give both, or --engine_dir")
    given = [] if arguments.methods is None else read_budgets(arguments)
    require(
        not (given and arguments.engine_dir), "--methods", arguments.methods, "left out with --engine_dir", "drop one"
    )
    arguments.methods = given


def suite_maker(arguments: argparse.Namespace) -> tuple[Mapping[str, Any], Callable[[LLM], Suite]]:
    """The settings of the suite, and what makes it for an engine."""
    if arguments.suite == "needle":
        needle = NeedleSuite(arguments.rounds)
        return needle.settings, lambda llm: needle
    names = arguments.haystack or ["python"]
    text = "\n\n".join(map(read_text, names)) if arguments.haystack else python_reference()
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    named = [name if ":" in name else Path(name).name for name in names]  # without folders of the machine
    settings = {"haystack": named, "digest": digest, "chat": arguments.chat, "depths": arguments.depths}
    return settings, lambda llm: text_tasks.TextSuite(llm.tokenizer, text, settings)


def engines(arguments: argparse.Namespace, longest: int, done: Callable[[str], bool]) -> Iterator[tuple[str, Path]]:
    """Name each engine and its directory; those of --model that are done are not built."""
    if arguments.engine_dir:
        configs = [read_config(path) for path in arguments.engine_dir]
        yield from zip(engine_names(arguments.engine_dir, configs), arguments.engine_dir, strict=True)
    left = [[one for one in listed if not done(one.label)] for listed in arguments.methods]
    with tempfile.TemporaryDirectory(prefix="kvseek-evaluate-") as folder:
        yield from variant_engines(arguments, left, Path(folder) / "engine", longest, arguments.batch)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ask every engine every question that the result files have no answer to; the document, as Results.document."""
    end = time.monotonic() + arguments.seconds
    chosen, lengths = arguments.tasks, arguments.lengths
    settings, make_suite = suite_maker(arguments)
    results = Results(settings)
    written = [arguments.output] if arguments.output and arguments.output.exists() else []
    for path in [*arguments.results, *written]:
        results.read(path)
    if not (arguments.engine_dir or arguments.methods or results.cells):
        raise ConfigError(
            "--engine_dir: must name an engine, or --model one to build, or --results a file to show; name one"
        )
    asked = [(length, task) for length in lengths for task in chosen]

    def done(name: str) -> bool:
        cells = [results.cells.get((*one, name)) for one in asked]
        return all(cell is not None and cell.contexts >= arguments.n for cell in cells)

    longest = max(lengths) if arguments.suite == "text" else NeedleSuite(arguments.rounds).longest(max(lengths), chosen)
    for name, directory in engines(arguments, longest, done):
        config = read_config(directory)
        results.add_engine(name, dataclasses.asdict(config), "--engine_dir" if arguments.engine_dir else "--methods")
        check_lengths(config, name, longest)
        with closing(LLM(directory, threads=arguments.threads)) as llm:
            suite = make_suite(llm)
            suite.check(config, name)
            gpu = {"gpu": describe_gpu(torch.device("cuda"))} if config.device == "cuda" else {}
            results.add_machine({**describe(), **gpu})
            results.fingerprints[name] = read_manifest(directory).fingerprint
            for length, task in asked:
                ask(arguments, results, llm, suite, results.cell(length, task, name), end)
        del llm, suite
        free_memory()
    return results.document()


def ask(arguments: argparse.Namespace, results: Results, llm: LLM, suite: Suite, cell: Cell, end: float) -> None:
    """Ask an engine what is left of one task and length, a batch of contexts at a time; progress goes to stderr."""
    named = f"{cell.task} {cell.length} {cell.engine}"
    while (left := arguments.n - cell.contexts) > 0:
        start = time.monotonic()
        if start >= end:
            progress(f"{named}: {left} contexts left; run again to go on")
            return
        count = min(left, llm.config.max_batch_size)
        answers = converse(llm, suite.conversations(cell.task, cell.length, count, cell.contexts))
        cell.add(answers, time.monotonic() - start)
        if arguments.output:
            write_result(arguments.output, results.document())
        done = f"{cell.contexts} contexts, exact {100 * cell.exact:.1f} %, part {100 * cell.part:.1f} %"
        progress(f"{named}: {done}, {cell.seconds:.0f} s")
