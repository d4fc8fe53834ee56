"""Does retrieval get worse as a request generates on and on? Recall and memory by step of one long generation.

    python evaluation/drift.py --engine_dir DIR --text FILE --prompt_tokens 4096 --steps 10000 --every 50 --follow

Keys that are generated are indexed as they leave the window, long after the prompt's. Every so many steps the rows that
a few layers selected are compared with the exact top k of the same query over the true keys, which come from the row
pool. The engine runs as it serves; an observer copies what the indexes select.

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

from kvseek.core.errors import ConfigError, KvseekError
from kvseek.core.request import FinishReason, Request, SamplingParams, StepOutput
from kvseek.engine.draws.sampling import Drawn, Sampler
from kvseek.engine.engine import Engine
from kvseek.evaluation.needle import check_vocabulary
from kvseek.evaluation.needle_tasks.tasks import make_dialogues
from kvseek.evaluation.selection_quality import Quality, compare_fresh, measure
from kvseek.evaluation.selection_tap import SelectionTap
from kvseek.measurement.machine import describe, resident_bytes
from kvseek.measurement.output import run_command
from kvseek.plugins.registry import get_method, method_traits

SPAN = 1000  # steps whose figures are averaged
DOCUMENT_TASK = "niah_multikey"  # whose context is the document with --needle
QUESTION_TOKENS = 32  # more than DOCUMENT_TASK reserves for a question and its answer


@dataclass(frozen=True)
class Sample:
    """One measured step: the figures of each layer, and memory in bytes."""

    step: int
    cached_tokens: int
    retrieval_tokens: int
    layers: dict[int, Quality]
    resident: int
    device: int
    extents: int  # of the row pool, owned by the request


class ScriptedSampler(Sampler):
    """Gives a document's tokens, whatever the model makes of them; after the last, what the model draws."""

    def __init__(self, request: Request, vocab_size: int, script: Sequence[int]):
        super().__init__(request, vocab_size)
        self._script = iter(script)

    def take(self, drawn: Drawn | int) -> int:
        """See Sampler.take. A token is drawn as in generation, then replaced by the script's."""
        return next(self._script, super().take(drawn))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine_dir", type=Path, required=True, help="an engine of a method that selects rows")
    source = parser.add_mutually_exclusive_group(required=True)
    text_help = (
        "UTF-8 text: the document, whose first tokens are the prompt; of several texts, --topic_tokens of each in turn"
    )
    source.add_argument("--text", type=Path, nargs="+", help=text_help)
    source.add_argument("--needle", action="store_true", help="the document is a context of the needle tasks")
    parser.add_argument("--prompt_tokens", type=int, default=4096)
    parser.add_argument("--topic_tokens", type=int, default=250, help="tokens until the next of several texts goes on")
    parser.add_argument("--steps", type=int, default=10_000, help="tokens to generate; end tokens do not end it")
    parser.add_argument("--follow", action="store_true", help="feed the document's next tokens, not those drawn")
    parser.add_argument("--every", type=int, default=50, help="steps between two measurements")
    parser.add_argument("--layers", help="comma list; the first that selects, the middle and the last if left out")
    parser.add_argument("--temperature", type=float, default=1.0, help="1 keeps the model out of loops")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads; torch's choice if left out")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--output", type=Path, help="write the JSON to this file too")
    arguments = parser.parse_args(argv)
    for name in ("prompt_tokens", "topic_tokens", "steps", "every"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} = {getattr(arguments, name)}: must be >= 1; leave it out for the default")
    return arguments


def chosen_layers(text: str | None, num_layers: int, dense: int = 0) -> list[int]:
    """Layers to measure, the first behind the `dense` ones if left open; raises ConfigError."""
    if text is None:
        return sorted({min(dense, num_layers - 1), max(dense, num_layers // 2) % num_layers, num_layers - 1})
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) < num_layers for part in parts):
        raise ConfigError(f"--layers = {text!r}: must be a comma list of layers below {num_layers}, or left out")
    return sorted({int(part) for part in parts})


def document(arguments: argparse.Namespace, engine: Engine) -> tuple[int, ...]:
    """Token ids of the prompt and, with --follow, of what is fed after it; raises ConfigError if the text is too short."""
    wanted: int = arguments.prompt_tokens + (arguments.steps if arguments.follow else 0)
    if arguments.needle:
        check_vocabulary(engine.config, "--engine_dir")
        (dialogue,) = make_dialogues(DOCUMENT_TASK, wanted + QUESTION_TOKENS, 1)
        ids = dialogue.context
    else:
        texts = [engine.tokenizer.encode(path.read_text(encoding="utf-8")) for path in arguments.text]
        ids = in_turns(texts, arguments.topic_tokens) if len(texts) > 1 else texts[0]
    if len(ids) < wanted:
        followed = f" and --steps = {arguments.steps} with --follow" if arguments.follow else ""
        raise ConfigError(
            f"--prompt_tokens = {arguments.prompt_tokens}{followed}: the document must have {wanted} tokens, "
            f"{', '.join(map(str, arguments.text))} has {len(ids)}; ask for fewer or give a longer one"
        )
    return tuple(ids[:wanted])


def in_turns(texts: Sequence[Sequence[int]], span: int) -> list[int]:
    """Tokens of a document that changes its topic: `span` tokens of each text in turn, until all have ended."""
    starts = range(0, max(map(len, texts)), span)
    return [token for start in starts for text in texts for token in text[start : start + span]]


def rows_kept(engine: Engine) -> int:
    """Rows that the engine's method keeps; raises ConfigError for one that keeps no number of rows."""
    settings = get_method(engine.config.method).configure(engine.config.method_config)
    if not any(field.name == "top_k" for field in dataclasses.fields(settings)):
        raise ConfigError(f"--engine_dir: method {engine.config.method!r}: must have a field top_k; use another engine")
    return int(settings.top_k)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Generate and measure; the JSON-able report."""
    engine = Engine.load(arguments.engine_dir, arguments.threads)
    top_k = rows_kept(engine)
    dense = method_traits(engine.config).device_layers
    layers = chosen_layers(arguments.layers, engine.config.model.num_layers, dense)
    tap = SelectionTap.into(engine, layers)
    request = submit(engine, arguments, document(arguments, engine))
    samples: list[Sample] = []
    fresh: list[dict[str, Any]] = []
    step = 0
    while step < arguments.steps:
        if (step + 1) % arguments.every == 0:
            tap.expect()
        for output in engine.step():
            step += counts(output)
            if counts(output) and step % arguments.every == 0 and output.attended_tokens < output.cached_tokens:
                quality = {layer: measure(tap.last(layer), top_k) for layer in layers}
                samples.append(take_sample(engine, tap, step, output, quality))
                if len(samples) == 1 or step + arguments.every > arguments.steps:
                    fresh += fresh_comparisons(engine, tap, step, layers)
    engine.cancel(request)
    if not samples:
        raise ConfigError(f"--steps = {arguments.steps}: no step that was measured attended sparsely; generate more")
    settings = ("prompt_tokens", "topic_tokens", "steps", "follow", "every", "temperature", "seed")
    return {
        "evaluation": "drift",
        "machine": describe(),
        "engine": dataclasses.asdict(engine.config),
        "texts": [path.name for path in arguments.text or ()],
        **{name: getattr(arguments, name) for name in settings},
        "top_k": top_k,
        **summarise(samples, step),
        "fresh_index": fresh,
        "samples": [dataclasses.asdict(sample) for sample in samples],
    }


def submit(engine: Engine, arguments: argparse.Namespace, ids: tuple[int, ...]) -> int:
    """Queue the request, with --follow to be fed what follows the prompt in `ids`; returns its id."""
    sampling = SamplingParams(temperature=arguments.temperature, seed=arguments.seed)
    prompt, script = ids[: arguments.prompt_tokens], ids[arguments.prompt_tokens :]
    # One token comes from prefill; another is left over, so that the last measured step finds the request's rows in place.
    sequence = engine.prepare(Request(prompt, arguments.steps + 2, sampling))
    if arguments.follow:
        sequence.sampler = ScriptedSampler(sequence.request, engine.config.model.vocab_size, script)
    engine.enqueue(sequence)
    return sequence.request_id


def counts(output: StepOutput) -> bool:
    """Whether an output is a token of a decode step; raises KvseekError if the request failed."""
    if output.finish_reason is FinishReason.ERROR:
        raise KvseekError(f"the generation failed: {output.error}")
    return output.token_id is not None and output.cached_tokens > 0


def fresh_comparisons(engine: Engine, tap: SelectionTap, step: int, layers: Sequence[int]) -> list[dict[str, Any]]:
    """The last step's selections against those of fresh indexes, one JSON-able comparison a layer."""
    top_k = rows_kept(engine)
    found = []
    for layer in layers:
        index, method = engine.decoder.retrieval.indexes[layer], engine.config.method
        compared = compare_fresh(tap.last(layer), index, method, top_k)
        found.append({"step": step, "layer": layer, **dataclasses.asdict(compared)})
    return found


def take_sample(
    engine: Engine, tap: SelectionTap, step: int, output: StepOutput, quality: dict[int, Quality]
) -> Sample:
    """Figures and memory after a step."""
    cuda = engine.config.device == "cuda"
    extents = tap.cache.extents
    return Sample(
        step=step,
        cached_tokens=output.cached_tokens,
        retrieval_tokens=tap.cache.lengths[tap.slot],
        layers=quality,
        resident=resident_bytes(),
        device=torch.cuda.memory_allocated() if cuda else 0,
        extents=extents.capacity - extents.free,
    )


def summarise(samples: Sequence[Sample], steps: int) -> dict[str, Any]:
    """Means of every thousand steps, and the last thousand against the first."""
    spans: dict[int, list[Sample]] = {}
    for sample in samples:
        spans.setdefault((sample.step - 1) // SPAN, []).append(sample)
    by_span = [
        {"first_step": span * SPAN + 1, "samples": len(part), **_means(part)} for span, part in sorted(spans.items())
    ]
    first = [sample for sample in samples if sample.step <= SPAN]
    last = [sample for sample in samples if sample.step > steps - SPAN]
    change = None
    if first and last and steps > SPAN:
        before, after = _means(first), _means(last)
        change = {name: after[name] - before[name] for name in before}
    return {"by_thousand": by_span, "last_minus_first_thousand": change}


def _means(samples: Sequence[Sample]) -> dict[str, float]:
    """Means over samples and layers; `mass_ratio`: attention on the selected rows, relative to the exact top k."""
    measured = [one for sample in samples for one in sample.layers.values()]
    recall, mass, exact = (
        sum(getattr(m, n) for m in measured) / len(measured) for n in ("recall", "mass", "exact_mass")
    )
    return {"recall": recall, "mass_ratio": mass / exact, "exact_mass": exact}


def print_report(report: dict[str, Any]) -> None:
    """Print a row for each thousand steps, the comparison with fresh indexes, and memory."""
    from rich.console import Console
    from rich.table import Table

    layers = list(report["samples"][0]["layers"])
    figures = ("recall", "mass ratio", "exact mass", *(f"layer {layer}" for layer in layers))
    table = Table("steps", *figures, "cached", "resident", "device", "extents")
    for span in report["by_thousand"]:
        first = span["first_step"]
        part = [sample for sample in report["samples"] if first <= sample["step"] < first + SPAN]
        means = [sum(sample["layers"][layer]["recall"] for sample in part) / len(part) for layer in layers]
        memory = (f"{part[-1][name] / 2**20:,.0f} MiB" for name in ("resident", "device"))
        table.add_row(
            f"{first:,}–{part[-1]['step']:,}",
            *(f"{figure:.3f}" for figure in (span["recall"], span["mass_ratio"], span["exact_mass"], *means)),
            f"{part[-1]['cached_tokens']:,}",
            *memory,
            str(part[-1]["extents"]),
        )
    fresh = Table("step", "layer", "recall", "fresh index", "same rows")
    for row in report["fresh_index"]:
        shares = (f"{row[name]:.3f}" for name in ("recall", "fresh_recall", "same_rows"))
        fresh.add_row(f"{row['step']:,}", str(row["layer"]), *shares)
    console = Console()
    console.width = max(console.width, 130)
    console.print(table, fresh)
    change = report["last_minus_first_thousand"]
    if change is not None:
        changes = f"recall@{report['top_k']} {change['recall']:+.3f}, mass ratio {change['mass_ratio']:+.3f}"
        console.print(f"last thousand steps minus first: {changes}")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    return run_command(argv, parse, run, print_report)


if __name__ == "__main__":
    sys.exit(main())
