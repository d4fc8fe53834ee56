"""How a stream fares on a GPU while a long prompt is read beside it, and how the prompt fares.

    python benchmarks/studies/reading_beside.py --shape llama-3.1-8b --contexts 32768,131072

An engine over random weights with two slots, rows in host memory: one request decodes, and when its steps have been timed
alone, a prompt of the context's length arrives. What counts for the stream is the mean time of its steps until the prompt's
first token, over that of the steps before; the longest step is shown beside it. Then the prompt is read again, alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvseek.benchmarks.device.bench import Bench
from kvseek.benchmarks.device.memory_plan import Cell
from kvseek.benchmarks.device.options import parse
from kvseek.core.request import Request
from kvseek.engine.engine import Engine
from kvseek.measurement.machine import describe, describe_gpu
from kvseek.measurement.output import write_result

STREAM_PROMPT = 4096  # tokens: above full_threshold, below which a step grows with every token
STEPS_ALONE = 60
WARM_STEPS = 20  # of those, before the first that counts


def step(engine: Engine) -> tuple[float, set[int]]:
    """Seconds of a step, and the requests that got a token."""
    began = time.perf_counter()
    outputs = engine.step()
    return time.perf_counter() - began, {output.request_id for output in outputs if output.token_id is not None}


def run(engine: Engine, context: int, seed: int) -> dict[str, Any]:
    """A stream alone, the stream with a prompt beside it, and the prompt alone."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, engine.config.model.vocab_size, (context,), generator=generator).tolist()
    stream = engine.submit(Request(tuple(numbers[:STREAM_PROMPT]), context - STREAM_PROMPT))
    while stream not in step(engine)[1]:
        pass
    alone = [step(engine)[0] for _ in range(STEPS_ALONE)][WARM_STEPS:]
    prompt, began = engine.submit(Request(tuple(numbers), 1)), time.perf_counter()
    beside, resting = list[float](), list[float]()
    while True:
        seconds, tokens = step(engine)
        beside.append(seconds)
        if not engine.step_report.prefill_tokens:
            resting.append(seconds)
        if prompt in tokens:
            break
    beside_seconds = time.perf_counter() - began
    engine.cancel(stream)
    prompt, began = engine.submit(Request(tuple(numbers), 1)), time.perf_counter()
    while prompt not in step(engine)[1]:
        pass
    return {
        "context": context,
        "undisturbed_step_seconds": statistics.median(alone),
        "mean_step_seconds": statistics.mean(beside),
        "longest_step_seconds": max(beside),
        "slowdown": statistics.mean(beside) / statistics.median(alone),
        "steps": len(beside),
        "resting_steps": len(resting),  # those that read nothing
        "resting_step_seconds": statistics.median(resting),
        "prompt_seconds_beside": beside_seconds,
        "prompt_seconds_alone": time.perf_counter() - began,
    }


def make_engine(bench: Bench, cell: Cell) -> Engine:
    """An engine over the bench's random weights."""
    (variant,) = bench.variants
    cache = bench.new_cache(bench.row_storage("always", [cell]), variant, [cell])
    decoder = bench.decoder(variant, cache, bench.indexes(variant, cache, [cell]), [cell], hot_rows=True)
    decoder.steps.prepare()
    tokenizer: Any = SimpleNamespace(file=None)  # requests are token ids
    return Engine(decoder.config, decoder, tokenizer)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; with --output, write JSON too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", help="default: %(default)s")
    parser.add_argument("--method", default="pariskv", help="default: %(default)s")
    parser.add_argument("--contexts", default="32768,131072", help="tokens of the prompt (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="write JSON there")
    own = parser.parse_args(argv)
    # Every prompt is to be read from its first token on.
    method = f"{own.method}{',' if ':' in own.method else ':'}cache.reuse=false"
    flags = ["--shape", own.shape, "--methods", method, "--contexts", own.contexts, "--batches", "2"]
    arguments = parse([*flags, "--offload", "always", "--prefill"])
    bench = Bench(arguments, [Cell(context, 2) for context in arguments.contexts])
    bench.load()
    results = []
    print(
        f"{'context':>8} {'alone ms':>9} {'mean ms':>8} {'slowdown':>8} {'longest ms':>10} {'prompt s':>9} {'alone s':>8}"
    )
    for context in arguments.contexts:
        engine = make_engine(bench, Cell(context, 2))
        found = run(engine, context, arguments.seed)
        results.append(found)
        print(
            f"{context:8,} {found['undisturbed_step_seconds'] * 1e3:9.2f} {found['mean_step_seconds'] * 1e3:8.2f} "
            f"{found['slowdown']:8.2f} {found['longest_step_seconds'] * 1e3:10.1f} {found['prompt_seconds_beside']:9.1f} "
            f"{found['prompt_seconds_alone']:8.1f}",
            flush=True,
        )
        del engine
        if own.output:
            machine = {**describe(), "gpu": describe_gpu(bench.device)}
            document = {"benchmark": "reading_beside", "machine": machine, "shape": own.shape, "method": own.method}
            write_result(own.output, {**document, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
