"""Time to the first token of a second question about a document: `python benchmarks/studies/second_question.py --engine_dir DIR`.

The document, random tokens, is read by a first request. Every question after it has other tokens, so that only the document is
reused (docs/conversations.md). Engines are measured one after the other.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvseek.core.errors import ConfigError
from kvseek.core.request import Request
from kvseek.engine.engine import Engine
from kvseek.measurement.flags import numbers
from kvseek.measurement.machine import describe
from kvseek.measurement.output import run_command

SEED = 3


def ask(engine: Engine, document: Sequence[int], count: int, generator: torch.Generator) -> tuple[float, int]:
    """Ask about a document in `count` tokens; returns the seconds to the first token, and the tokens that were reused."""
    question = torch.randint(engine.config.model.vocab_size, (count,), generator=generator).tolist()
    started = time.perf_counter()
    engine.submit(Request((*document, *question), 1))
    while engine.has_work:
        outputs = engine.step()
    seconds, found = time.perf_counter() - started, outputs[-1].statistics
    assert found is not None, "a request's last output has its statistics"
    return seconds, found.reused_tokens


def measure(engine: Engine, tokens: int, questions: Sequence[int], rounds: int) -> dict[str, Any]:
    """Measure an engine; raises ConfigError if it has not the room, or reuses nothing."""
    longest = tokens + max(questions) + 1
    if longest > engine.config.max_seq_len:
        raise ConfigError(
            f"max_seq_len = {engine.config.max_seq_len}: must be >= {longest} for these tokens; build for more"
        )
    generator = torch.Generator().manual_seed(SEED)
    document = torch.randint(engine.config.model.vocab_size, (tokens,), generator=generator).tolist()
    first, _ = ask(engine, document, questions[0], generator)
    seconds = {}
    for count in questions:
        asked = [ask(engine, document, count, generator) for _ in range(rounds)]
        if not min(reused for _, reused in asked):
            raise ConfigError("cache.reuse = False: must be on, or there is nothing to measure; build without it")
        seconds[str(count)] = statistics.median(one for one, _ in asked)
    return {"first": first, "questions": seconds}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured, as it goes into the result file."""
    questions = numbers("questions", arguments.questions, 1)
    results = []
    for directory in arguments.engine_dir:
        engine = Engine.load(directory, arguments.threads)
        config = engine.config
        settings = {"method": config.method, "method_config": config.method_config, "dtype": config.dtype}
        settings |= {
            "weight_only_precision": config.weight_only_precision,
            "cached_prefill": config.cache.cached_prefill,
        }
        results.append(settings | measure(engine, arguments.tokens, questions, arguments.rounds))
    return {
        "benchmark": "second_question",
        "machine": describe(),
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "results": results,
    }


def print_report(document: dict[str, Any]) -> None:
    """Print seconds to the first token: of the first request, and of questions of so many tokens after it."""
    results = document["results"]
    columns = [f"question of {count}" for count in results[0]["questions"]]
    title = (
        f"time to the first token, document of {document['tokens']:,} tokens, seconds (median of {document['rounds']})"
    )
    table = Table("method", "cached_prefill", "first request", *columns, title=title)
    for entry in results:
        times = [f"{seconds:.3f}" for seconds in entry["questions"].values()]
        table.add_row(entry["method"], entry["cached_prefill"], f"{entry['first']:.2f}", *times)
    Console(width=130).print(table)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings."""
    parser = argparse.ArgumentParser(description="Time to the first token of a second question about a document.")
    parser.add_argument("--engine_dir", type=Path, action="append", required=True, help="again to compare")
    parser.add_argument("--tokens", type=int, default=6200, help="of the document (default: %(default)s)")
    parser.add_argument(
        "--questions", default="40,300", help="comma list of tokens of a question (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="questions of each length (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="write the result as JSON to this file")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns 0, or 1 after printing why not."""
    return run_command(argv, parse, run, print_report)


if __name__ == "__main__":
    sys.exit(main())
