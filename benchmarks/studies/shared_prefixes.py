"""Decode steps of requests that share a document, beside requests with a document each (docs/conversations.md).

    python benchmarks/studies/shared_prefixes.py --methods full,pariskv,nested --offload always,never

On a GPU, in an engine over random weights of a shape, whose documents are synthetic (cached_prompts.py). Both kinds of batches
are as large and as long, and take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from kvseek.benchmarks.device.bench import Bench, engine_config
from kvseek.benchmarks.device.memory_plan import Cell
from kvseek.benchmarks.device.options import parse
from kvseek.benchmarks.studies.cached_prompts import leave, make_engine, make_rows, run_study, study_parser
from kvseek.core.request import Request
from kvseek.engine.cache.row_storage import RowStorage
from kvseek.engine.engine import Engine
from kvseek.measurement.machine import describe, describe_gpu

QUESTION = 40  # tokens
WARM_STEPS = 8  # that a batch is not timed for, after its last request has begun to decode
LONGEST_ANSWER = (
    2048  # tokens: requests begin to decode one after another, and the first one goes on until the last has done so
)
ROOM = 8192  # tokens of the pool for each request beside its document: for what ended requests leave


def step_seconds(engine: Engine, documents: Sequence[Sequence[int]], steps: int, seed: int) -> list[float]:
    """Seconds of `steps` steps in which one request about each of the documents decodes; then all of them are cancelled."""
    generator = torch.Generator().manual_seed(seed)
    running: list[int] = []
    for document in documents:
        question = torch.randint(engine.config.model.vocab_size, (QUESTION,), generator=generator).tolist()
        running.append(engine.submit(Request((*document, *question), LONGEST_ANSWER)))
    found, together = list[float](), 0
    while len(found) < steps:
        assert engine.has_work, f"answers of {LONGEST_ANSWER} tokens ended before all requests had decoded together"
        started = time.perf_counter()
        outputs = engine.step()
        seconds = time.perf_counter() - started
        if sum(output.token_id is not None for output in outputs) == len(documents):
            together += 1
            if together > WARM_STEPS:
                found.append(seconds)
    for request in running:
        engine.cancel(request)
    return found


def measure(engine: Engine, own: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Median seconds of a step of both kinds of batches, in turns."""
    generator, vocabulary = torch.Generator().manual_seed(seed), engine.config.model.vocab_size
    documents = [torch.randint(vocabulary, (own.context,), generator=generator).tolist() for _ in range(own.requests)]
    for document in documents:
        leave(engine, document)
    cases = {"shared": documents[:1] * own.requests, "unshared": documents}
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(own.turns):
        for name, asked in cases.items():
            samples[name] += step_seconds(engine, asked, own.steps, seed + turn)
    medians = {name: statistics.median(found) for name, found in samples.items()}
    return {"seconds": medians, "ratio": medians["shared"] / medians["unshared"]}


def run(own: argparse.Namespace) -> dict[str, Any]:
    """Measure all methods over one pool of rows for each place."""
    flags = ["--shape", own.shape, "--methods", own.methods, "--contexts", str(own.context)]
    arguments = parse([*flags, "--batches", str(own.requests), "--offload", own.offload, "--prefill"])
    cells = [Cell(own.context, own.requests)]
    bench, results = Bench(arguments, cells), list[dict[str, Any]]()
    bench.load()
    for offload in arguments.offload:
        rows: RowStorage | None = None
        for variant in bench.variants:
            config = engine_config(arguments.dtype, bench.model, variant, cells)
            longest = own.context + QUESTION + LONGEST_ANSWER
            config = dataclasses.replace(
                config,
                model=dataclasses.replace(config.model, max_position_embeddings=longest),
                cache=dataclasses.replace(config.cache, offload=offload, reuse=True),
                max_batch_size=own.requests,
                max_seq_len=longest,
                max_input_len=longest,
            )
            rows = rows or make_rows(bench, config, own.requests * (longest + ROOM), offload)
            engine = make_engine(bench, config, variant, rows)
            found = measure(engine, own, arguments.seed)
            results.append({"method": variant.label, "offload": offload, **found})
            times = "  ".join(f"{name}: {1e3 * seconds:.3f} ms" for name, seconds in found["seconds"].items())
            print(f"{variant.label:12} rows {offload:7} {times}  {found['ratio']:.3f}", flush=True)
            del engine
            torch.cuda.empty_cache()
    machine = {**describe(), "gpu": describe_gpu(bench.device)}
    settings = {"shape": own.shape, "context": own.context, "requests": own.requests, "steps": own.steps * own.turns}
    return {"benchmark": "shared_prefixes", "machine": machine, **settings, "results": results}


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each engine; with --output, write JSON too."""
    parser = study_parser(__doc__, 32_000)
    parser.add_argument("--requests", type=int, default=4, help="of a batch (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="that a batch is timed for (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="batches of each kind (default: %(default)s)")
    return run_study(parser.parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
