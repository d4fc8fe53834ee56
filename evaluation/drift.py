"""Does retrieval get worse as a request generates on and on? Recall and memory by step of one long generation.

    python evaluation/drift.py --engine_dir PARISKV --text FILE --prompt_tokens 4096 --steps 10000 --every 50 --follow

Keys that are generated are indexed as they leave the window, long after the prompt's. Every so many steps the rows that
a few layers selected are compared with the exact top k of the same query over the true keys, which come from the row
pool. The engine runs as it serves; only the index's selection is overheard.

What recall loses may be the data's doing and not the index's: a model that samples on and on leaves what it knows, its
attention becomes flat, and which rows are the top k is then chance. Hence --follow, which feeds the document's own
tokens; the attention that the rows hold; and an index built afresh from the same keys at the first and the last
measurement.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvseek.benchmarks.machine import describe, resident_bytes
from kvseek.benchmarks.output import show, write_result
from kvseek.engine.engine import Engine
from kvseek.engine.errors import ConfigError, KvseekError
from kvseek.engine.memory import ExtentTable, extents_for
from kvseek.engine.request import FinishReason, Request, SamplingParams, StepOutput
from kvseek.engine.sampling import Sampler
from kvseek.evaluation.overhear import Heard, Listener, recall_of
from kvseek.plugins.base import Index
from kvseek.plugins.flat.method import exact_top_k
from kvseek.plugins.registry import get_method

SPAN = 1000  # steps whose recall is averaged to a figure
PROMPT_TASK = "niah_multikey"  # of the needle folder, whose context is the prompt with --needle
PROMPT_SEED = 10**6


@dataclass(frozen=True)
class Sample:
    """One measured step: recall of each layer, in 0..1, and memory in bytes."""

    step: int
    cached_tokens: int
    retrieval_tokens: int
    recall: dict[int, float]
    resident: int
    device: int
    extents: int  # of the row pool, owned by the request


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine_dir", type=Path, required=True, help="an engine of a method that selects rows")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=Path, help="UTF-8 text whose first tokens are the prompt")
    source.add_argument("--needle", type=Path, help="the needle folder: the prompt is a context of its tasks")
    parser.add_argument("--prompt_tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10_000, help="tokens to generate; end tokens do not end it")
    parser.add_argument("--every", type=int, default=50, help="steps between two measurements")
    parser.add_argument("--layers", help="comma list; the first, the middle and the last if left out")
    parser.add_argument("--temperature", type=float, default=1.0, help="1 keeps the model out of loops")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads; torch's choice if left out")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--output", type=Path, help="write the JSON to this file too")
    arguments = parser.parse_args(argv)
    for name in ("prompt_tokens", "steps", "every"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} = {getattr(arguments, name)}: must be >= 1; leave it out for the default")
    return arguments


def chosen_layers(text: str | None, num_layers: int) -> list[int]:
    """Layers to measure; raises ConfigError."""
    if text is None:
        return sorted({0, num_layers // 2, num_layers - 1})
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) < num_layers for part in parts):
        raise ConfigError(f"--layers = {text!r}: must be a comma list of layers below {num_layers}, or left out")
    return sorted({int(part) for part in parts})


def prompt(arguments: argparse.Namespace, engine: Engine) -> tuple[int, ...]:
    """The prompt's token ids."""
    wanted: int = arguments.prompt_tokens
    if arguments.needle is not None:
        from kvseek.evaluation.needle import load_tasks

        tasks = load_tasks(arguments.needle)
        return tuple(int(i) for i in tasks.make_example(PROMPT_TASK, wanted, PROMPT_SEED).context)
    ids = engine.tokenizer.encode(arguments.text.read_text(encoding="utf-8"))
    if len(ids) < wanted:
        raise ConfigError(
            f"--prompt_tokens = {wanted}: {arguments.text} has {len(ids)} tokens; lower it or give a longer one"
        )
    return tuple(ids[:wanted])


def selection_settings(engine: Engine) -> tuple[int, str]:
    """top_k and group_reduce of the engine's method; raises ConfigError for one that has no such fields."""
    settings = get_method(engine.config.method).configure(engine.config.method_config)
    names = {field.name for field in dataclasses.fields(settings)}
    if not {"top_k", "group_reduce"} <= names:
        raise ConfigError(f"--engine_dir: method {engine.config.method!r}: must have fields top_k and group_reduce")
    return settings.top_k, settings.group_reduce


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Generate and measure; the JSON-able report."""
    engine = Engine.load(arguments.engine_dir, arguments.threads)
    top_k, group_reduce = selection_settings(engine)
    layers = chosen_layers(arguments.layers, engine.config.model.num_layers)
    listener = Listener(engine, layers)
    ids = prompt(arguments, engine)
    sampling = SamplingParams(temperature=arguments.temperature, seed=arguments.seed)
    # One token comes from prefill; another is left over, so that the last measured step finds the request's rows in place.
    request = engine.submit(Request(ids, arguments.steps + 2, sampling))
    samples, step = [], 0
    while step < arguments.steps:
        for output in engine.step():
            step += counts(output)
            if counts(output) and step % arguments.every == 0 and output.attended_tokens < output.cached_tokens:
                recall = {layer: recall_of(listener.heard(layer), top_k, group_reduce) for layer in layers}
                samples.append(take_sample(engine, listener, step, output, recall))
    engine.cancel(request)
    if not samples:
        raise ConfigError(f"--steps = {arguments.steps}: no step that was measured attended sparsely; generate more")
    return {
        "evaluation": "drift",
        "machine": describe(),
        "engine": dataclasses.asdict(engine.config),
        "prompt_tokens": len(ids),
        "steps": step,
        "every": arguments.every,
        "temperature": arguments.temperature,
        "seed": arguments.seed,
        "top_k": top_k,
        **summarise(samples, step),
        "samples": [dataclasses.asdict(sample) for sample in samples],
    }


def counts(output: StepOutput) -> bool:
    """Whether an output is a token of a decode step; raises KvseekError if the request failed."""
    if output.finish_reason is FinishReason.ERROR:
        raise KvseekError(f"the generation failed: {output.error}")
    return output.token_id is not None and output.cached_tokens > 0


def take_sample(engine: Engine, listener: Listener, step: int, output: StepOutput, recall: dict[int, float]) -> Sample:
    """Recall and memory after a step."""
    cuda = engine.config.device == "cuda"
    extents = listener.cache.extents
    return Sample(
        step=step,
        cached_tokens=output.cached_tokens,
        retrieval_tokens=listener.cache.lengths[listener.slot],
        recall=recall,
        resident=resident_bytes(),
        device=torch.cuda.memory_allocated() if cuda else 0,
        extents=extents.capacity - extents.free,
    )


def summarise(samples: Sequence[Sample], steps: int) -> dict[str, Any]:
    """Mean recall of every thousand steps, and the last thousand against the first."""
    spans: dict[int, list[float]] = {}
    for sample in samples:
        mean = sum(sample.recall.values()) / len(sample.recall)
        spans.setdefault((sample.step - 1) // SPAN, []).append(mean)
    by_span = [
        {"first_step": span * SPAN + 1, "samples": len(values), "recall": sum(values) / len(values)}
        for span, values in sorted(spans.items())
    ]
    last = [sample for sample in samples if sample.step > steps - SPAN]
    first = [sample for sample in samples if sample.step <= SPAN]
    change = None
    if first and last and steps > SPAN:
        change = _mean_recall(last) - _mean_recall(first)
    return {"by_thousand": by_span, "last_minus_first_thousand": change}


def _mean_recall(samples: Sequence[Sample]) -> float:
    values = [value for sample in samples for value in sample.recall.values()]
    return sum(values) / len(values)


def print_report(report: dict[str, Any]) -> None:
    """Print a row for each thousand steps: recall by layer, and memory at the last step measured."""
    from rich.console import Console
    from rich.table import Table

    layers = list(report["samples"][0]["recall"])
    table = Table("steps", "recall", *(f"layer {layer}" for layer in layers), "cached", "resident", "device", "extents")
    for span in report["by_thousand"]:
        first = span["first_step"]
        part = [sample for sample in report["samples"] if first <= sample["step"] < first + SPAN]
        means = (sum(sample["recall"][layer] for sample in part) / len(part) for layer in layers)
        memory = (f"{part[-1][name] / 2**20:,.0f} MiB" for name in ("resident", "device"))
        table.add_row(
            f"{first:,}–{part[-1]['step']:,}",
            f"{span['recall']:.3f}",
            *(f"{mean:.3f}" for mean in means),
            f"{part[-1]['cached_tokens']:,}",
            *memory,
            str(part[-1]["extents"]),
        )
    console = Console()
    console.width = max(console.width, 110)
    console.print(table)
    if report["last_minus_first_thousand"] is not None:
        console.print(
            f"recall@{report['top_k']}, last thousand steps minus first: {report['last_minus_first_thousand']:+.3f}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    try:
        arguments = parse(argv)
        report = run(arguments)
        if arguments.output:
            write_result(arguments.output, report)
    except (KvseekError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    show(report, arguments.json, print_report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
