"""How a stream fares on a GPU while a long prompt is read beside it, and how the prompt fares.

    python bench/speed/studies/reading_beside.py --shape llama-3.1-8b --contexts 32768,131072

An engine over random weights with two slots, rows in host memory: one request decodes, and when its steps have been timed
alone, a prompt of the context's length arrives. What counts for the stream is the mean time of its steps until the prompt's
first token, over that of the steps before; the longest step is shown beside it. Then the prompt is read again, alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from typing import Any

import torch

from kvseek.bench.engines import bare_engine, free_memory
from kvseek.bench.output import Figure, command, figure
from kvseek.bench.speed.device.bench import Bench
from kvseek.bench.speed.device.memory_plan import Cell
from kvseek.bench.speed.studies.common import make_bench, print_figures, result, study_parser
from kvseek.bench.variants import Variant
from kvseek.core.request import Request
from kvseek.engine.engine import Engine

STREAM_PROMPT = 4096  # tokens: above full_threshold, below which a step grows with every token
STEPS_ALONE = 60
WARM_STEPS = 20  # of those, before the first that counts
FIGURES: dict[str, Figure] = {
    "tokens": lambda entry: f"{entry['context']:,}",
    "alone\nms": figure("undisturbed_step_seconds", ".2f", 1e3),
    "mean\nms": figure("mean_step_seconds", ".2f", 1e3),
    "slowdown": lambda entry: f"{entry['slowdown']:.2f}",
    "longest\nms": figure("longest_step_seconds", ".2f", 1e3),
    "prompt\ns": lambda entry: f"{entry['prompt_seconds_beside']:.1f}",
    "alone\ns": lambda entry: f"{entry['prompt_seconds_alone']:.1f}",
}


def step(engine: Engine) -> tuple[float, set[int]]:
    """Seconds of a step, and the requests that got a token."""
    began = time.perf_counter()
    outputs = engine.step()
    return time.perf_counter() - began, {output.request_id for output in outputs if output.token_id is not None}


def measure(engine: Engine, context: int, seed: int) -> dict[str, Any]:
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


def make_engine(bench: Bench, variant: Variant, cell: Cell) -> Engine:
    """An engine over the bench's random weights, with the rows in host memory."""
    cache = bench.new_cache(bench.row_storage("always", [cell]), variant, [cell])
    decoder = bench.decoder(variant, cache, bench.indexes(variant, cache, [cell]), [cell], hot_rows=True)
    decoder.steps.prepare()
    return bare_engine(decoder.config, decoder)


def run(own: argparse.Namespace) -> dict[str, Any]:
    """Every context."""
    # Every prompt is to be read from its first token on.
    own.offload, own.methods = "always", f"{own.method}{',' if ':' in own.method else ':'}cache.reuse=false"
    bench, results = make_bench(own, "--prefill", "--batches", "2"), list[dict[str, Any]]()
    bench.load()
    for cell in bench.cells:
        engine = make_engine(bench, bench.variants[0], cell)
        results.append({"method": own.method, **measure(engine, cell.context, bench.arguments.seed)})
        del engine
        free_memory()
    return result("reading_beside", bench, results, method=own.method)


PARSER = study_parser(__doc__, contexts="32768,131072")
PARSER.add_argument("--method", default="pariskv", help="default: %(default)s")
main = command(PARSER.parse_args, run, partial(print_figures, figures=FIGURES))


if __name__ == "__main__":
    sys.exit(main())
