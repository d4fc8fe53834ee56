"""What sampling adds to decode steps on the CPU: `python bench/speed/studies/sampled_steps.py --engine_dir DIR --text FILE`.

Requests with different parameters take turns, so that drift of the machine hits all alike. A turn reads short prompts, which is
not timed, and times the steps that follow: whole, and what they take beside the model, which is where tokens are drawn. What is
added is the difference of the latter, so that the model's time, which varies by more, does not hide it.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvseek.bench.machine import describe
from kvseek.bench.output import Figure, add_output_flags, at_least_one, figures_table, numbers, print_whole, run_command
from kvseek.bench.speed.parts import HostClock
from kvseek.bench.timing import CLOCKS, Clock, Samples, in_turn, measure
from kvseek.core.errors import ConfigError
from kvseek.core.manifest import read_manifest
from kvseek.core.request import Request, SamplingConfig
from kvseek.engine.engine import Engine
from kvseek.engine.retrieval import Observer

GREEDY = "greedy"
KINDS: Mapping[str, SamplingConfig] = {
    GREEDY: SamplingConfig(),
    "T 0.7": SamplingConfig(temperature=0.7),
    "T 0.6, top_p 0.95": SamplingConfig(temperature=0.6, top_p=0.95),
    "T 0.6, top_p 0.95, top_k 20": SamplingConfig(temperature=0.6, top_p=0.95, top_k=20),
    "T 0.7, three penalties": SamplingConfig(
        temperature=0.7, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.2
    ),
    "log probabilities 5": SamplingConfig(logprobs=5),
    "log probabilities 20": SamplingConfig(logprobs=20),
    "T 0.6, top_p 0.95, top_k 20, log probabilities 20": SamplingConfig(
        temperature=0.6, top_p=0.95, top_k=20, logprobs=20
    ),
}
FIGURES: Mapping[str, Figure] = {
    "requests": lambda entry: f"{entry['requests']}",
    "ms": lambda entry: f"{entry['seconds'] * 1e3:.2f}",
    "+ms": lambda entry: f"{entry['added_seconds'] * 1e3:+.2f}",
    "+%": lambda entry: f"{entry['added_share']:+.1%}",
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine_dir", type=Path, required=True, help="an engine of device cpu")
    parser.add_argument("--text", type=Path, required=True, help="text whose tokens are the prompts")
    parser.add_argument("--requests", default="1,8", help="comma list: requests of a step (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="steps of a turn (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each kind of request (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="process: with --threads 1, on busy machines")
    add_output_flags(parser)
    arguments = parser.parse_args(argv)
    at_least_one(arguments, "prompt", "steps", "rounds", "threads")
    arguments.requests = numbers("requests", arguments.requests)
    return arguments


def time_turn(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingConfig, steps: int, clock: Clock
) -> list[tuple[float, float]]:
    """Seconds of `steps` steps of requests with these prompts, whole and beside the model; the first step is not counted."""
    ids = [engine.submit(Request(tuple(prompt), max_tokens=steps + 8, sampling=params)) for prompt in prompts]
    begun = set[int]()
    while len(begun) < len(ids):
        begun |= {output.request_id for output in engine.step() if output.token_id is not None}
    engine.step()
    parts, found = HostClock(clock), list[tuple[float, float]]()
    engine.decoder.observe(parts)
    for _ in range(steps):
        parts.restart()
        seconds = measure(engine.step, clock)
        found.append((seconds, seconds - sum(parts.seconds.values())))
    engine.decoder.observe(Observer())
    for one in ids:
        engine.cancel(one)
    return found


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured, as it goes into the result file."""
    with contextlib.closing(Engine.load(arguments.engine_dir, arguments.threads)) as engine:
        text = engine.tokenizer.encode(arguments.text.read_text(encoding="utf-8"))
        most = max(arguments.requests)
        if len(text) < most * arguments.prompt:
            raise ConfigError(
                f"--text: has {len(text)} tokens: must have {most} prompts of {arguments.prompt}; lower --prompt"
            )
        prompts = [text[i * arguments.prompt : (i + 1) * arguments.prompt] for i in range(most)]
        results = [entry for count in arguments.requests for entry in compare(engine, arguments, prompts[:count])]
        return {
            "benchmark": "sampled_steps",
            "machine": describe(),
            "model": read_manifest(arguments.engine_dir).source_model,
            "dtype": engine.config.dtype,
            "weight_only_precision": engine.config.weight_only_precision,
            "vocabulary": engine.config.model.vocab_size,
            "prompt": arguments.prompt,
            "clock": arguments.clock,
            "results": results,
        }


def compare(engine: Engine, arguments: argparse.Namespace, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Time steps of all kinds of requests with these prompts, in turns."""
    samples = {name: (Samples(), Samples()) for name in KINDS}

    def turn(name: str) -> None:
        for seconds in time_turn(engine, prompts, KINDS[name], arguments.steps, CLOCKS[arguments.clock]):
            for one, number in zip(samples[name], seconds, strict=True):
                one.seconds.append(number)

    turns: list[tuple[str, Callable[[], object]]] = [(name, partial(turn, name)) for name in KINDS]
    for number in range(arguments.rounds):
        for _, call in in_turn(turns, number):
            call()
    greedy, greedy_beside = (one.median for one in samples[GREEDY])
    return [
        {
            "kind": name,
            "requests": len(prompts),
            "seconds": whole.median,
            "beside_seconds": beside.median,
            "added_seconds": beside.median - greedy_beside,
            "added_share": (beside.median - greedy_beside) / greedy,
            "samples": {"whole": whole.summary(), "beside": beside.summary()},
        }
        for name, (whole, beside) in samples.items()
    ]


def print_report(document: dict[str, Any]) -> None:
    """Print a row for each kind of request."""
    kind = f"{document['model']}, {document['dtype']}, {document['weight_only_precision']}"
    title = f"{kind}, {document['machine']['cpu']}, {document['clock']} time"
    print_whole(figures_table(title, "request", FIGURES, document["results"], "kind"))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    return run_command(argv, parse, run, print_report)


if __name__ == "__main__":
    sys.exit(main())
