"""Time of Engine.step for requests as people send them: tokens drawn by every parameter, and short requests beside long ones.

    python -m kvseek.bench.speed.studies.engine_steps --shape llama-3.1-8b --output RESULT.json

An engine of random weights, whose logits are flat: the worst case of drawing. Its requests are read, then some steps pass
unmeasured, then `--steps` are timed; those of a batch begin together, and none ends. `--drawn` batches are measured for each kind
of drawing beside greedy steps, `--mixed` ones greedily.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvseek.bench.engines import served_config, write_served_engine
from kvseek.bench.machine import describe, describe_gpu
from kvseek.bench.output import (
    add_output_flags,
    at_least_one,
    command,
    figure,
    figures_table,
    print_whole,
    progress,
    write_result,
)
from kvseek.bench.speed.shapes import get_shape
from kvseek.bench.variants import Variant, parse_variants
from kvseek.core.command_line import memory_size
from kvseek.core.config import CHOICES, EngineConfig
from kvseek.core.errors import ConfigError, KvseekError
from kvseek.core.guide import Guide, GuideType
from kvseek.core.request import Request, SamplingConfig
from kvseek.engine.engine import Engine

WARMUP = 24  # steps before those that are timed
ANSWER = 32_000  # tokens: while the long one of a batch is read, the others answer
WORDS = 250  # of the smallest vocabulary, from which prompts are drawn
BATCH = re.compile(r"(?:[1-9]\d*x)?[1-9]\d*(?:\+(?:[1-9]\d*x)?[1-9]\d*)*")
GREEDY = "greedy"
KINDS = {
    GREEDY: SamplingConfig(),
    "T 0.7": SamplingConfig(temperature=0.7),
    "T 0.7, top_k 20, top_p 0.8": SamplingConfig(temperature=0.7, top_k=20, top_p=0.8),
    "T 0.6, top_p 0.95": SamplingConfig(temperature=0.6, top_p=0.95),
    "T 0.6, top_p 0.95, top_k 20": SamplingConfig(temperature=0.6, top_p=0.95, top_k=20),
    "T 0.7, three penalties": SamplingConfig(
        temperature=0.7, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5
    ),
    "log probabilities 20": SamplingConfig(logprobs=20),
    "T 0.6, top_p 0.95, top_k 20, three penalties, log probabilities 20": SamplingConfig(
        temperature=0.6,
        top_p=0.95,
        top_k=20,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logprobs=20,
    ),
    "guided": SamplingConfig(
        guide=Guide(GuideType.JSON_SCHEMA, '{"type": "array", "items": {"type": "integer"}, "minItems": 9999}')
    ),
}


def lengths(text: str) -> list[int]:
    """Tokens of each prompt of a batch, such as 262144+7x4096."""
    return [int(part.rpartition("x")[2]) for part in text.split("+") for _ in range(int(part.rpartition("x")[0] or 1))]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags; raises ConfigError."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", required=True, help="of a model, such as llama-3.1-8b (bench/speed/shapes.py)")
    add("--layers", type=int, help="of the model, for a trial (default: all)")
    add("--methods", type=parse_variants, default="nested", help="one; bench/README.md says how to write it")
    add("--device", choices=CHOICES["device"], default="cuda", help="default: %(default)s")
    add("--dtype", choices=CHOICES["dtype"], default="bfloat16", help="default: %(default)s")
    add("--drawn", nargs="*", default=["4096", "8x4096", "32x4096"], help="batches, by tokens (default: %(default)s)")
    mixed = ["262144", "262144+7x4096", "131072", "131072+7x8192"]
    add("--mixed", nargs="*", default=mixed, help="default: %(default)s")
    add("--steps", type=int, default=60, help="that are timed (default: %(default)s)")
    add("--row_memory", type=memory_size, default="64GiB", help="for rows (default: %(default)s)")
    add("--text", type=Path, default=Path("examples/harbour_log.txt"), help="a vocabulary is trained on it")
    add("--seed", type=int, default=0)
    add_output_flags(parser, ", after each kind")
    arguments = parser.parse_args(argv)
    at_least_one(arguments, "steps")
    if len(arguments.methods) != 1:
        raise ConfigError(f"--methods: has {len(arguments.methods)}: must be one; run once for each")
    for name in ("drawn", "mixed"):
        for batch in getattr(arguments, name):
            if not BATCH.fullmatch(batch):
                raise ConfigError(f"--{name} {batch!r}: must be such as 262144+7x4096; write it so")
    return arguments


def engine_config(arguments: argparse.Namespace, batches: Sequence[list[int]]) -> EngineConfig:
    """An engine with room for all batches; see served_config."""
    (variant,), longest = arguments.methods, max(map(max, batches))
    model = get_shape(arguments.shape, longest + ANSWER)
    return served_config(arguments, variant, model, max(map(len, batches)), longest, longest + ANSWER)


def measure(engine: Engine, batch: Sequence[int], sampling: SamplingConfig, steps: int, seed: int) -> list[float]:
    """Seconds of each step of a batch; raises KvseekError if a request ends."""
    generator = random.Random(seed)
    end_ids = (0,) if sampling.guide else ()  # a guide needs one
    asked = {
        engine.submit(Request(tuple(generator.choices(range(1, WORDS), k=tokens)), ANSWER, sampling, end_ids=end_ids))
        for tokens in batch
    }

    def step() -> set[int]:
        outputs = engine.step()
        for output in outputs:
            if output.finish_reason is not None:
                raise KvseekError(f"a request ended ({output.finish_reason}): {output.error or 'its answer is whole'}")
        return {output.request_id for output in outputs if output.token_id is not None}

    seconds, begun = list[float](), set[int]()
    try:
        while begun != asked:
            begun |= step()
        for number in range(WARMUP + steps):
            before = time.perf_counter()
            step()
            if number >= WARMUP:
                seconds.append(time.perf_counter() - before)
    finally:
        for request in asked:
            engine.cancel_waiting(request)
            engine.cancel(request)
        while engine.has_work:
            engine.step()
    return seconds


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure; the document of the result."""
    cells = [(text, kind) for text in arguments.drawn for kind in KINDS] + [(text, GREEDY) for text in arguments.mixed]
    config = engine_config(arguments, [lengths(text) for text, _ in cells])
    variant: Variant = arguments.methods[0]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kvseek-bench-") as name:
        directory = Path(name) / "engine"
        write_served_engine(directory, config, arguments.seed, arguments.shape, arguments.text.read_text("utf-8"))
        engine = Engine.load(directory)
        gpu = {"gpu": describe_gpu(torch.device("cuda", 0))} if arguments.device == "cuda" else {}
        document = {
            "benchmark": "engine_steps",
            "machine": describe() | gpu,
            "shape": arguments.shape,
            "method": variant.label,
            "dtype": arguments.dtype,
            "results": results,
        }
        for text, kind in cells:
            seconds = measure(engine, lengths(text), KINDS[kind], arguments.steps, arguments.seed)
            median = statistics.median(seconds)
            greedy = next((one["seconds"] for one in results if one["batch"] == text and one["kind"] == GREEDY), median)
            results.append({"batch": text, "kind": kind, "seconds": median, "added_seconds": median - greedy})
            results[-1] |= {"mean": statistics.mean(seconds), "most": max(seconds)}
            progress(f"{text}, {kind}: {median * 1e3:.2f} ms")
            if arguments.output:
                write_result(arguments.output, document)
        engine.close()
    return document


def print_table(document: dict[str, Any]) -> None:
    """Print what was measured."""
    figures = {
        "drawing": figure("kind"),
        "step, ms": figure("seconds", ".2f", 1e3),
        "over greedy": figure("added_seconds", "+.2f", 1e3),
        "mean": figure("mean", ".2f", 1e3),
    }
    title = f"{document['shape']}, {document['method']}, {document['dtype']}"
    print_whole(figures_table(title, "batch", figures, document["results"], "batch"))


main = command(parse, run, print_table)

if __name__ == "__main__":
    sys.exit(main())
