"""Time per output token with and without speculation, for drafts that are right with a given probability, and for n-grams.

    kvseek bench --speculation none,0,0.4,0.6,0.8 --shape llama-3.1-8b --contexts 131072 --batches 1,8
    kvseek bench --speculation none,0,ngram --engine_dir DIR --text FILE --questions QUESTION ...

Requests are greedy and answer all `--tokens`, first without drafts: of that answer drafts of a given probability are made.
The kinds take turns; a first round is not measured, in which the engine learns what its steps take.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kvseek.bench.engines import served_config, write_served_engine
from kvseek.bench.machine import describe, describe_gpu
from kvseek.bench.output import (
    Document,
    add_output_flags,
    at_least_one,
    command,
    figure,
    figures_table,
    numbers,
    print_whole,
    progress,
    write_result,
)
from kvseek.bench.variants import parse_variants
from kvseek.core.command_line import Parser, memory_size
from kvseek.core.config import CHOICES
from kvseek.core.errors import ConfigError, KvseekError
from kvseek.core.request import Request, RequestStatistics
from kvseek.engine.engine import Engine
from kvseek.engine.speculation import NGRAM, Drafter, NgramDrafter, Speculation

from .drafts import GivenDrafter
from .shapes import get_shape

NONE = "none"
WORDS = 250  # of the smallest vocabulary, from which prompts are drawn
Kind = str | float  # NONE, NGRAM, or the probability that a token of a draft is right


def make_parser() -> Parser:
    """Make the parser of `kvseek bench --speculation`."""
    parser = Parser(prog="kvseek bench --speculation", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--speculation", default="none,0,0.4,0.6,0.8", help=f"comma list: {NONE}, {NGRAM}, probabilities of drafts")
    add("--num_speculative_tokens", type=int, default=Speculation().num_speculative_tokens, help="default: %(default)s")
    engines = parser.add_mutually_exclusive_group(required=True)
    engines.add_argument("--shape", help="of a model with random weights, such as llama-3.1-8b (bench/speed/shapes.py)")
    engines.add_argument("--engine_dir", type=Path, help="asks --questions about --text")
    add(
        "--methods",
        type=parse_variants,
        default="nested",
        help="one, with --shape; bench/README.md says how to write it",
    )
    add("--layers", type=int, help="with --shape, for a trial (default: all)")
    add("--device", choices=CHOICES["device"], default="cuda", help="with --shape (default: %(default)s)")
    add("--dtype", choices=CHOICES["dtype"], default="bfloat16", help="with --shape (default: %(default)s)")
    add("--row_memory", type=memory_size, default="40GiB", help="with --shape (default: %(default)s)")
    add("--contexts", default="131072", help="with --shape: comma list of prompt lengths")
    add("--batches", default="1", help="with --shape: comma list of requests at a time")
    add("--slots", type=int, default=8, help="with --shape: max_batch_size, most rows of a step on a GPU")
    add("--text", type=Path, default=Path("examples/harbour_log.txt"), help="default: %(default)s")
    add("--characters", type=int, default=16_000, help="first ones of the text that are asked about")
    add("--questions", nargs="*", default=(), help="each is one request")
    add("--tokens", type=int, default=256, help="of an answer (default: %(default)s)")
    add("--rounds", type=int, default=3, help="default: %(default)s")
    add("--threads", type=int, help="CPU threads")
    add("--seed", type=int, default=0)
    add_output_flags(parser, ", after each batch")
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags; raises ConfigError."""
    arguments: argparse.Namespace = make_parser().parse_args(argv)
    at_least_one(arguments, "tokens", "rounds", "slots", "characters")
    arguments.kinds = [_kind(text) for text in arguments.speculation.split(",")]
    arguments.contexts, arguments.batches = (
        numbers(name, getattr(arguments, name)) for name in ("contexts", "batches")
    )
    if NONE not in arguments.kinds:
        raise ConfigError(f"--speculation = {arguments.speculation!r}: must have {NONE}, the base; add it")
    if (arguments.engine_dir is not None) != bool(arguments.questions):
        raise ConfigError(f"--questions: has {len(arguments.questions)}: must come with --engine_dir, and only then")
    if len(arguments.methods) != 1:
        raise ConfigError(f"--methods: has {len(arguments.methods)}: must be one; run once for each")
    return arguments


def _kind(text: str) -> Kind:
    if text in (NONE, NGRAM):
        return text
    try:
        chance = float(text)
    except ValueError:
        chance = -1.0
    if not 0 <= chance <= 1:
        raise ConfigError(f"--speculation: {text!r}: must be {NONE}, {NGRAM} or a probability, 0 to 1; write it so")
    return chance


@contextlib.contextmanager
def loaded(arguments: argparse.Namespace) -> Iterator[Engine]:
    """Load the engine that is measured; raises as Engine.load."""
    speculation = Speculation(num_speculative_tokens=arguments.num_speculative_tokens)
    with tempfile.TemporaryDirectory(prefix="kvseek-bench-") as name:
        directory = arguments.engine_dir
        if directory is None:
            directory, longest = Path(name) / "engine", max(arguments.contexts)
            model = get_shape(arguments.shape, longest + arguments.tokens)
            slots = max(arguments.slots, *arguments.batches)
            config = served_config(arguments, arguments.methods[0], model, slots, longest, longest + arguments.tokens)
            # A prompt is read once for all kinds.
            config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, reuse=None))
            write_served_engine(directory, config, arguments.seed, arguments.shape, arguments.text.read_text("utf-8"))
        with contextlib.closing(Engine.load(directory, arguments.threads, speculation=speculation)) as engine:
            yield engine


def batches_of(arguments: argparse.Namespace, engine: Engine) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    """Prompts of each batch that is measured, with its name."""
    if arguments.engine_dir is None:
        for context in arguments.contexts:
            for batch in arguments.batches:
                chance = random.Random(arguments.seed)
                yield f"{batch} x {context}", [tuple(chance.choices(range(1, WORDS), k=context)) for _ in range(batch)]
        return
    text, tokenizer = arguments.text.read_text("utf-8")[: arguments.characters], engine.tokenizer
    for question in arguments.questions:
        messages = [{"role": "user", "content": f"{text}\n\n{question}"}]
        yield (
            question,
            [tuple(tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=True), False))],
        )


def answer(engine: Engine, prompts: Sequence[tuple[int, ...]], tokens: int, speculate: bool) -> Answers:
    """Ask all prompts together; raises KvseekError if one fails."""
    own = {engine.submit(Request(prompt, tokens, speculate=speculate)): list[int]() for prompt in prompts}
    statistics_of = list[RequestStatistics]()
    while engine.has_work:
        for output in engine.step():
            if output.error:
                raise KvseekError(output.error)
            if output.token_id is not None:
                own[output.request_id].append(output.token_id)
            if output.finish_reason is not None and output.statistics is not None:
                statistics_of.append(output.statistics)
    return Answers(list(own.values()), statistics_of)


@dataclasses.dataclass(frozen=True)
class Answers:
    """What the requests of a batch answered, and their statistics."""

    tokens: list[list[int]]
    statistics: list[RequestStatistics]

    @property
    def seconds(self) -> float:
        """Mean time per output token of the requests."""
        return statistics.mean(one.tpot_seconds for one in self.statistics)


def measure(arguments: argparse.Namespace, engine: Engine, prompts: Sequence[tuple[int, ...]]) -> list[Document]:
    """Time a batch for every kind, in turns; raises KvseekError if an answer is another than without drafts."""
    expected = answer(engine, prompts, arguments.tokens, speculate=False).tokens
    seconds, last = {kind: list[float]() for kind in arguments.kinds}, dict[Kind, Answers]()
    for number in range(1 + arguments.rounds):
        for kind in arguments.kinds:
            engine.make_drafter = maker(kind, prompts, expected, number)
            found = last[kind] = answer(engine, prompts, arguments.tokens, speculate=kind != NONE)
            if found.tokens != expected:
                raise KvseekError(f"--speculation {kind}: an answer differs from that without drafts; report this")
            if number:
                seconds[kind].append(found.seconds)
    base = statistics.median(seconds[NONE])
    return [
        {
            "speculation": str(kind),
            "tpot_seconds": statistics.median(seconds[kind]),
            "least_seconds": min(seconds[kind]),
            "to_none": statistics.median(seconds[kind]) / base,
            "drafted": sum(one.drafted_tokens for one in last[kind].statistics),
            "accepted": sum(one.accepted_tokens for one in last[kind].statistics),
            "generated": sum(one.generated_tokens for one in last[kind].statistics),
        }
        for kind in arguments.kinds
    ]


def maker(
    kind: Kind, prompts: Sequence[tuple[int, ...]], expected: Sequence[list[int]], seed: int
) -> Callable[[Request], Drafter]:
    """Make what makes the drafters of a kind."""
    if isinstance(kind, str):
        return lambda request: NgramDrafter(request.prompt_ids)
    known, chance = dict(zip(prompts, expected, strict=True)), kind
    return lambda request: GivenDrafter(known[request.prompt_ids], chance, seed)


def run(arguments: argparse.Namespace) -> Document:
    """Measure; the document of the result."""
    results: list[Document] = []
    with loaded(arguments) as engine:
        config = engine.config
        gpu = {"gpu": describe_gpu(torch.device("cuda", 0))} if config.device == "cuda" else {}
        document: dict[str, Any] = {
            "benchmark": "speculation",
            "machine": describe() | gpu,
            "shape": arguments.shape,
            "method": config.method,
            "dtype": config.dtype,
            "weight_only_precision": config.weight_only_precision,
            "threads": torch.get_num_threads(),
            "num_speculative_tokens": arguments.num_speculative_tokens,
            "results": results,
        }
        for name, prompts in batches_of(arguments, engine):
            found = measure(arguments, engine, prompts)
            steps = {str(rows): seconds for rows, seconds in sorted(engine.step_costs.measured().items())}
            results += [{"batch": name, "prompt_tokens": len(prompts[0])} | one for one in found]
            document["step_seconds_by_rows"] = steps
            for one in found:
                progress(f"{name}, {one['speculation']}: {one['tpot_seconds'] * 1e3:.2f} ms ({one['to_none']:.3f})")
            if arguments.output:
                write_result(arguments.output, document)
    return document


def print_table(document: Document) -> None:
    """Print what was measured."""
    figures = {
        "drafts": figure("speculation"),
        "ms a token": figure("tpot_seconds", ".2f", 1e3),
        "× none": figure("to_none", ".3f"),
        "least": figure("least_seconds", ".2f", 1e3),
        "tokens": figure("generated"),
        "drafted": figure("drafted"),
        "accepted": figure("accepted"),
    }
    table = figures_table(f"{document['method']}, {document['dtype']}", "batch", figures, document["results"], "batch")
    steps = document["step_seconds_by_rows"]
    table.caption = "steps by rows, ms: " + ", ".join(f"{rows}: {seconds * 1e3:.2f}" for rows, seconds in steps.items())
    print_whole(table)


main = command(parse, run, print_table)

if __name__ == "__main__":
    sys.exit(main())
