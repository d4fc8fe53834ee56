"""Prompts in several engines of one model on the CPU: `bench/speed/studies/prompt_forms.py --engine_dirs DIR... --text FILE...`.

Times the first token in turns, and compares what the engines compute: the perplexity of each text, and how often the likeliest
next token is the first engine's.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvseek.bench.machine import describe
from kvseek.bench.output import Figure, add_output_flags, at_least_one, figures_table, print_whole, run_command
from kvseek.bench.timing import CLOCKS, Samples, in_turn, measure
from kvseek.core.errors import ConfigError
from kvseek.core.manifest import read_manifest
from kvseek.core.request import LogProbs, Request, SamplingConfig
from kvseek.engine.engine import Engine

FIGURES: Mapping[str, Figure] = {
    "TTFT\ns": lambda entry: f"{entry['seconds']['min']:.2f}",
    "×\nfirst": lambda entry: f"{entry['to_first']:.2f}",
    "perplexity\n× first": lambda entry: " ".join(f"{one['perplexity_ratio']:.5f}" for one in entry["texts"]),
    "same\ntoken": lambda entry: " ".join(f"{one['same']:.2%}" for one in entry["texts"]),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--engine_dirs", type=Path, nargs="+", required=True, help="of one model; the first is the baseline"
    )
    parser.add_argument(
        "--text", type=Path, nargs="+", required=True, help="the first one's beginning is the timed prompt"
    )
    parser.add_argument("--tokens", type=int, default=8000, help="of the timed prompt (default: %(default)s)")
    parser.add_argument("--scored", type=int, default=2000, help="tokens of each text, at most (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="prompts of each engine; the least counts (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="process: with --threads 1, on busy machines")
    add_output_flags(parser)
    arguments = parser.parse_args(argv)
    at_least_one(arguments, "tokens", "scored", "rounds", "threads")
    return arguments


def first_token(engine: Engine, ids: Sequence[int], salt: str, params: SamplingConfig) -> list[LogProbs]:
    """Read a prompt up to its first token; returns the log probabilities that it asks for."""
    number, scores = (
        engine.submit(Request(tuple(ids), max_tokens=1, cache_salt=salt, sampling=params)),
        list[LogProbs](),
    )
    while engine.has_work:
        for output in engine.step():
            if output.error:
                raise ConfigError(f"--tokens: a prompt of {len(ids)} failed: {output.error}")
            if output.request_id == number:
                scores += output.prompt_logprobs
    return scores


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured, as it goes into the result file."""
    clock = CLOCKS[arguments.clock]
    with contextlib.ExitStack() as loaded:
        engines = {
            str(folder): loaded.enter_context(contextlib.closing(Engine.load(folder, arguments.threads)))
            for folder in arguments.engine_dirs
        }
        encode = next(iter(engines.values())).tokenizer.encode
        texts = {path.name: encode(path.read_text(encoding="utf-8")) for path in arguments.text}
        timed = texts[arguments.text[0].name][: arguments.tokens]
        samples = {name: Samples() for name in engines}

        def read(name: str, number: int) -> None:
            call = partial(first_token, engines[name], timed, f"round {number}", SamplingConfig())
            samples[name].seconds.append(measure(call, clock))

        for number in range(arguments.rounds):
            for _, call in in_turn([(name, partial(read, name, number)) for name in engines], number):
                call()
        results = [describe_engine(engine, samples[name]) for name, engine in engines.items()]
        for text, ids in texts.items():
            add_scores(results, list(engines.values()), text, ids[: arguments.scored])
    for entry in results:
        entry["to_first"] = entry["seconds"]["min"] / results[0]["seconds"]["min"]
    return {
        "benchmark": "prompt_forms",
        "machine": describe(),
        "model": read_manifest(arguments.engine_dirs[0]).source_model,
        "tokens": len(timed),
        "clock": arguments.clock,
        "results": results,
    }


def describe_engine(engine: Engine, samples: Samples) -> dict[str, Any]:
    """What an engine is, and the seconds of its first tokens."""
    config = engine.config
    label = config.dtype + ("" if config.weight_only_precision == "none" else f", {config.weight_only_precision}")
    return {"engine": label, "method": config.method, "seconds": samples.summary(), "texts": []}


def add_scores(results: Sequence[dict[str, Any]], engines: Sequence[Engine], text: str, ids: Sequence[int]) -> None:
    """Add to each result what its engine makes of a text, beside the first engine."""
    baseline, best = 0.0, list[int]()
    for entry, engine in zip(results, engines, strict=True):
        scores = first_token(engine, ids, f"scores {text}", SamplingConfig(prompt_logprobs=1))
        loss = -sum(one.token for one in scores) / len(scores)
        likeliest = [one.top[0][0] for one in scores]
        baseline, best = baseline or loss, best or likeliest
        same = sum(a == b for a, b in zip(likeliest, best, strict=True)) / len(best)
        ratio = math.exp(loss - baseline)
        scored = {
            "text": text,
            "tokens": len(ids),
            "perplexity": math.exp(loss),
            "perplexity_ratio": ratio,
            "same": same,
        }
        entry["texts"].append(scored)


def print_report(document: dict[str, Any]) -> None:
    """Print a row for each engine."""
    title = (
        f"{document['model']}, {document['tokens']:,} tokens, {document['machine']['cpu']}, {document['clock']} time"
    )
    print_whole(figures_table(title, "engine", FIGURES, document["results"], "engine"))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    return run_command(argv, parse, run, print_report)


if __name__ == "__main__":
    sys.exit(main())
