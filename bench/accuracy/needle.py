"""Accuracy on the needle tasks: kvseek engines generate the answers, as they would be served.

    python bench/accuracy/needle.py --engine_dir FULL --engine_dir OTHER --lengths 4096,16384 --output FILE

Questions and scores are those of needle_tasks/. What a method loses against full attention on them is retrieval error: the
answers cannot be guessed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from kvseek import LLM, SamplingParams
from kvseek.bench.accuracy.needle_results import Results, print_table
from kvseek.bench.accuracy.needle_tasks import vocabulary
from kvseek.bench.accuracy.needle_tasks.facts import Score, score
from kvseek.bench.accuracy.needle_tasks.tasks import ROUNDS, TASKS, Dialogue, make_dialogues
from kvseek.bench.machine import describe, describe_gpu
from kvseek.bench.output import add_output_flags, progress, run_command, write_result
from kvseek.bench.variants import DENSE
from kvseek.core.config import BlockSparseConfig, CacheConfig, EngineConfig
from kvseek.core.errors import ConfigError
from kvseek.core.request import FinishReason
from kvseek.plugins.registry import PAPER, get_method

EXTRA_TOKENS = 8  # an answer may be so much longer than the right one


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


def chosen_questions(arguments: argparse.Namespace, **advised: int) -> tuple[list[str], list[int]]:
    """Tasks and lengths that the flags name; raises ConfigError if a flag of questions is out of range.

    Parameters
    ----------
    **advised : int
        Flags that must be at least 1, with the value that the error advises.
    """
    chosen = list(TASKS) if arguments.tasks == "all" else arguments.tasks.split(",")
    unknown = sorted(set(chosen) - set(TASKS))
    if unknown:
        raise ConfigError(f"--tasks: {unknown[0]!r} is unknown; choose from {', '.join(TASKS)}, or all")
    for name, value in advised.items():
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} = {getattr(arguments, name)}: must be >= 1; {value} is the default")
    lengths = arguments.lengths.split(",")
    if not all(length.isdecimal() and int(length) >= 256 for length in lengths):
        raise ConfigError(f"--lengths = {arguments.lengths!r}: must be a comma list of lengths >= 256; try 4096")
    return chosen, [int(length) for length in lengths]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ask every engine every question that the result files have no answer to; the document, as Results.document."""
    end = time.monotonic() + arguments.seconds
    chosen, lengths = chosen_questions(arguments, n=24, rounds=ROUNDS)
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


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    return run_command(argv, parse, run, print_table)


if __name__ == "__main__":
    sys.exit(main())
