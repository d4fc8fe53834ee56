"""The server under the traffic that people send, on a GPU or the CPU: sampled, mixed lengths, long answers, arrivals at a rate.

    python -m kvseek.bench.load.served --shape llama-3.1-8b --methods full,nested --loads mixture --output RESULT.json

For each method an engine of random weights of the shape, with a vocabulary trained on --text, behind `kvseek openai`, which a
client of the same machine asks for streams (client.py). --loads are some of

- mixture: lengths as in a published trace (`mixture`), for each --concurrency;
- arrivals: the same, sent at random times, for each of --rates;
- reasoning: prompts of 300 tokens and answers of 8,000, for each --concurrency;
- beside: running streams alone, with short prompts arriving, with prompts of 128K tokens arriving, and with both;
- conversation, alone: --turns turns of one, each with all that was said before, in an engine that keeps what it has read.

--bare repeats a concurrency with the engine in a process of its own, without server and text. The run ends when --seconds have
passed and its server has ended; each method has its share of them, and cells that were not measured then are named below the
tables. docs/load_testing.md has more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop

from kvseek.bench.engines import served_config, write_served_engine
from kvseek.bench.machine import describe, describe_gpu
from kvseek.bench.output import (
    add_output_flags,
    at_least_one,
    command,
    markdown,
    progress,
    rows,
    write_result,
)
from kvseek.bench.speed.shapes import get_shape
from kvseek.bench.variants import Variant, parse_variants
from kvseek.core.command_line import memory_size
from kvseek.core.config import CHOICES, EngineConfig
from kvseek.core.errors import KvseekError, text_of
from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.settings import ServeSettings

from .beside import PIECE, Streams, measure_beside
from .cells import Answer, Cell, LoadTestError, figures, prompts
from .client import Client, send
from .conversation import Conversation, measure_conversation
from .report import BARE, BESIDE, CONVERSATION, DOOR, SERVED, SERVER, captions, comparisons
from .targets import MODEL, bare_answers, openai_server, processor_seconds

LOADS = ("mixture", "arrivals", "reasoning", "beside")
CONVERSATION_LOAD, TURN = "conversation", (450, 50)  # tokens that a turn says and is answered: 200 turns are 100K
REASONING = (300, 8000)  # tokens of prompt and answer
STREAM_PROMPT, STREAM_ANSWER = 4096, 30_000  # of the load beside: more than full_threshold; more than its parts take
LONG_PROMPT, SHORT_PROMPT = 131_072, 300
# Percentiles of Mooncake's conversation trace, 12,031 requests of an hour of Kimi's service: the prompt's and the answer's
# tokens, which hardly depend on each other (rank correlation 0.07). Source: conversation_trace.jsonl in FAST25-release/traces of
# github.com/kvcache-ai/Mooncake at 3b5a594, of "Mooncake: Trading More Storage for Less Computation" (FAST 2025).
PERCENTS = (0, 10, 25, 50, 75, 90, 95, 99, 100)
PROMPTS = (891, 964, 2_306, 6_909, 15_367, 27_367, 39_550, 85_400, 126_195)  # mean 12,035
ANSWERS = (1, 24, 156, 350, 472, 597, 698, 1_118, 2_000)  # mean 343
LEAST_ANSWER = 50  # tokens: shorter answers, 15 % of the trace's, would have hardly a time per token
ROOM = 64  # tokens beside the longest request: a prompt that is tokenised again may have some more


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, help="of a model, such as llama-3.1-8b (bench/speed/shapes.py)")
    parser.add_argument(
        "--methods", type=parse_variants, default="full,nested", help="bench/README.md says how to write them"
    )
    names = (*LOADS, CONVERSATION_LOAD)
    parser.add_argument("--loads", nargs="+", choices=names, default=list(LOADS), help="default: all but conversation")
    for name, kind, numbers, text in (
        ("concurrency", int, [1, 8, 32, 64], "requests at a time, of mixture and reasoning"),
        ("rates", float, [0.5, 1.0, 2.0], "requests a second, of arrivals"),
    ):
        shown = " ".join(f"{number:g}" for number in numbers)
        parser.add_argument(f"--{name}", type=kind, nargs="+", default=numbers, help=f"{text} (default: {shown})")
    parser.add_argument("--bare", type=int, help="also ask the bare engine, at this one of --concurrency")
    parser.add_argument("--device", choices=CHOICES["device"], default="cuda", help="default: %(default)s")
    parser.add_argument("--dtype", choices=CHOICES["dtype"], default="bfloat16", help="default: %(default)s")
    parser.add_argument("--layers", type=int, help="of the model, for a trial (default: all)")
    parser.add_argument("--threads", type=int, help="CPU threads of the engine (default: torch's choice)")
    others: tuple[tuple[str, Callable[[str], Any], Any, str], ...] = (
        ("requests", int, 8, "least of a mixture; it has 2 for each at a time"),
        ("arrival_seconds", float, 45.0, "so long requests arrive"),
        ("streams", int, 8, "that run in the load beside"),
        ("turns", int, 200, "of the conversation"),
        ("window", float, 10.0, "seconds of each of its parts, at least"),
        ("scale", float, 1.0, "of the lengths of all loads, for a trial"),
        ("temperature", float, 0.6, "0: greedy"),
        ("top_p", float, 0.95, "1: all tokens"),
        ("top_k", int, 20, "0: all tokens"),
        ("max_batch_size", int, 64, "of the engine"),
        ("row_memory", memory_size, "88GiB", "for rows, in GPU memory unless the method says otherwise"),
        ("seconds", float, 450.0, "of the whole run"),
        ("seed", int, 0, "of weights, lengths, arrivals"),
        ("text", Path, Path("examples/harbour_log.txt"), "prompts are its pieces"),
    )
    for name, read, default, text in others:
        parser.add_argument(f"--{name}", type=read, default=default, help=f"{text} (default: %(default)s)")
    add_output_flags(parser, ", after each cell")
    arguments = parser.parse_args(argv)
    at_least_one(arguments, "concurrency", "requests", "streams", "turns", "max_batch_size")
    if CONVERSATION_LOAD in arguments.loads and len(arguments.loads) > 1:
        raise LoadTestError(f"--loads = {' '.join(arguments.loads)}: conversation must be alone; run it for itself")
    for name in ("rates", "arrival_seconds", "window", "scale", "seconds"):
        value = getattr(arguments, name)
        least = min(value) if isinstance(value, list) else value
        if not least > 0:
            raise LoadTestError(f"--{name} = {least:g}: must be > 0; leave it out for the default")
    if arguments.bare is not None and arguments.bare not in arguments.concurrency:
        raise LoadTestError(f"--bare = {arguments.bare}: must be one of --concurrency; add it there")
    return arguments


def sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of a request that say how tokens are drawn."""
    return {name: getattr(arguments, name) for name in ("temperature", "top_p", "top_k")}


def scaled(tokens: int, scale: float) -> int:
    """A length by --scale; two tokens have a time between them."""
    return max(2, round(tokens * scale))


def mixture(requests: int, seed: int) -> tuple[tuple[int, int], ...]:
    """Prompt and answer lengths of so many requests, which together are distributed as the trace is, however few they are.

    Each takes its own share of the distribution, so that requests of two seeds differ in their order and in which prompt goes
    with which answer alone.
    """
    shares = (np.arange(requests) + 0.5) / requests * 100
    columns = []
    for number, quantiles in enumerate((PROMPTS, ANSWERS)):
        lengths = np.exp(np.interp(shares, PERCENTS, np.log(quantiles))).round().astype(int).tolist()
        random.Random(seed + number).shuffle(lengths)
        columns.append(lengths)
    return tuple((prompt, max(LEAST_ANSWER, answer)) for prompt, answer in zip(*columns, strict=True))


def loads(arguments: argparse.Namespace) -> list[tuple[str, Cell]]:
    """All cells but those of the load beside, with the load's name, in the order in which they are measured."""

    def lengths(pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        return tuple((scaled(prompt, arguments.scale), scaled(answer, arguments.scale)) for prompt, answer in pairs)

    def trace(requests: int) -> tuple[tuple[int, int], ...]:
        return lengths(mixture(requests, arguments.seed))

    numbers, rates = arguments.concurrency, arguments.rates
    made: dict[str, list[Cell]] = {
        "mixture": [Cell(trace(max(arguments.requests, 2 * number)), number) for number in numbers],
        "arrivals": [Cell(trace(max(1, round(rate * arguments.arrival_seconds))), rate=rate) for rate in rates],
        "reasoning": [Cell(lengths([REASONING] * number), number) for number in numbers],
    }
    return [(name, cell) for name, found in made.items() if name in arguments.loads for cell in found]


def beside_load(arguments: argparse.Namespace) -> Streams:
    """The load beside."""
    prompt, answer, long, short = (
        scaled(tokens, arguments.scale) for tokens in (STREAM_PROMPT, STREAM_ANSWER, LONG_PROMPT, SHORT_PROMPT)
    )
    return Streams(arguments.streams, prompt, answer, long, short, arguments.window)


def talk(arguments: argparse.Namespace) -> Conversation:
    """The load conversation."""
    said, answered = (scaled(tokens, arguments.scale) for tokens in TURN)
    return Conversation(arguments.turns, said, answered)


def engine_config(arguments: argparse.Namespace, variant: Variant) -> EngineConfig:
    """The engine of a method; see served_config."""
    talks = CONVERSATION_LOAD in arguments.loads
    longest = ROOM + (talk(arguments).tokens if talks else scaled(LONG_PROMPT + max(ANSWERS), arguments.scale))
    model = get_shape(arguments.shape, longest)
    config = served_config(arguments, variant, model, arguments.max_batch_size, longest, longest)
    return replace(config, cache=replace(config.cache, reuse=True)) if talks else config


class Run:
    """One method's measurements, until its share of the time has passed."""

    def __init__(self, arguments: argparse.Namespace, variant: Variant, engine_dir: Path, end: float) -> None:
        self.arguments, self.variant, self.engine_dir = arguments, variant, engine_dir
        self.end = end  # by time.monotonic
        self.settings = ServeSettings(threads=arguments.threads)
        self.load_seconds = 0.0
        self.tokenizer, self.text = Tokenizer(engine_dir), arguments.text.read_text(encoding="utf-8")

    @property
    def seconds(self) -> float:
        """Time that is left; raises LoadTestError if there is none."""
        left = self.end - time.monotonic()
        if left <= 0:
            raise LoadTestError("not begun, as the method's share of --seconds has passed")
        return left

    def served(self, found: Found) -> None:
        """Measure the server."""
        began = time.monotonic()
        with openai_server(self.engine_dir, self.settings, self.seconds) as (url, door):
            self.load_seconds = time.monotonic() - began
            progress(f"{self.variant.label}: the server is ready after {self.load_seconds:.1f} s")
            uvloop.run(self._served(url, door, found))

    async def _served(self, url: str, door: int, found: Found) -> None:
        fields = {"model": MODEL, **sampling(self.arguments)}
        async with Client(url, fields) as client:
            if CONVERSATION_LOAD in self.arguments.loads:
                with found.left_out(self.variant, CONVERSATION_LOAD):
                    async with asyncio.timeout(self.seconds):
                        result = await measure_conversation(client, self.tokenizer, self.text, talk(self.arguments))
                    found.add_conversation(self.variant, result)
                return

            async def answers(cell: Cell) -> list[Answer]:
                texts = prompts(self.tokenizer, self.text, cell)

                def ask(number: int) -> Awaitable[Answer]:
                    return client.answer(texts[number], cell.lengths[number][1])

                return await send(cell, ask, self.seconds, self.arguments.seed)

            longer = scaled(LONG_PROMPT // 8, self.arguments.scale)
            await answers(Cell(((longer, PIECE), (PIECE, PIECE)), 2))  # warm
            for load, cell in loads(self.arguments):
                with found.left_out(self.variant, f"{load}, {cell.name}"):
                    before = processor_seconds(door)
                    answered = await answers(cell)
                    found.add_cell(self.variant, load, SERVER, cell, answered, processor_seconds(door) - before)
            if "beside" in self.arguments.loads:
                with found.left_out(self.variant, "beside"):
                    async with asyncio.timeout(self.seconds):
                        streams = beside_load(self.arguments)
                        results = await measure_beside(client, self.tokenizer, self.text, streams)
                    found.add_beside(self.variant, results)

    def bare(self, found: Found) -> None:
        """Measure the engine without the server, if it can be loaded again in the time that is left."""
        number = self.arguments.bare
        asked = [
            (load, cell) for load, cell in loads(self.arguments) if cell.rate is None and cell.concurrency == number
        ]
        if not asked:
            return
        with found.left_out(self.variant, BARE):
            if self.seconds < self.load_seconds:
                raise LoadTestError("not begun: the time that is left does not suffice to load the engine again")
            cells = [(cell, prompts(self.tokenizer, self.text, cell)) for _, cell in asked]
            answered = bare_answers(self.engine_dir, self.settings, cells, sampling(self.arguments), self.seconds)
            for (load, cell), answers in zip(asked, answered, strict=True):
                with found.left_out(self.variant, f"{load}, {BARE}"):
                    if isinstance(answers, LoadTestError):
                        raise answers
                    found.add_cell(self.variant, load, BARE, cell, answers)


class Found:
    """The result as it grows."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._output = arguments.output
        names = ("shape", "layers", "dtype", "device", "max_batch_size", "row_memory", "threads", "scale", "seed")
        self.document: dict[str, Any] = {
            "benchmark": "served",
            "machine": describe(),
            **{name: getattr(arguments, name) for name in names},
            "sampling": sampling(arguments),
            "results": [],
            "beside": [],
            "conversations": [],
            "left_out": [],
        }
        if arguments.device == "cuda":
            self.document["gpu"] = describe_gpu(torch.device("cuda"))

    def add_cell(
        self,
        variant: Variant,
        load: str,
        asked: str,
        cell: Cell,
        answers: Sequence[Answer],
        door_seconds: float | None = None,
    ) -> None:
        result = {"method": variant.label, "load": load, "asked": asked, **figures(cell, answers)}
        if door_seconds is not None:
            result["door_seconds_per_token"] = door_seconds / sum(answer.tokens for answer in answers)
        self.document["results"].append(result)
        progress(f"{variant.label}, {asked}: {load}, {cell.name}: {result['seconds']:.1f} s")
        self._save()

    def add_beside(self, variant: Variant, results: Sequence[dict[str, Any]]) -> None:
        self.document["beside"] += [{"method": variant.label, **result} for result in results]
        self._save()

    def add_conversation(self, variant: Variant, result: dict[str, Any]) -> None:
        self.document["conversations"].append({"method": variant.label, **result})
        self._save()

    @contextlib.contextmanager
    def left_out(self, variant: Variant, what: str) -> Iterator[None]:
        """What fails inside, or takes more time than there is, is named in the result, and the run goes on."""
        try:
            yield
        except (KvseekError, TimeoutError) as error:
            reason = text_of(error) or "not done in time; raise --seconds, or measure fewer cells"
            self.document["left_out"].append({"method": variant.label, "what": what, "why": reason})
            progress(f"{variant.label}: {what}: {reason}")
            self._save()

    def _save(self) -> None:
        if self._output:
            write_result(self._output, self.document)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all methods, one after the other; raises LoadTestError if nothing could be measured."""
    found, began = Found(arguments), time.monotonic()
    text = arguments.text.read_text(encoding="utf-8")
    for number, variant in enumerate(arguments.methods, 1):
        end = began + arguments.seconds * number / len(arguments.methods)
        with tempfile.TemporaryDirectory(prefix="kvseek-bench-") as name, found.left_out(variant, "the engine"):
            engine_dir = Path(name) / "engine"
            write_served_engine(engine_dir, engine_config(arguments, variant), arguments.seed, arguments.shape, text)
            run = Run(arguments, variant, engine_dir, end)
            run.served(found)
            run.bare(found)
    if not any(found.document[name] for name in ("results", "beside", "conversations")):
        reasons = "; ".join(f"{one['method']}: {one['what']}: {one['why']}" for one in found.document["left_out"])
        raise LoadTestError(f"nothing could be measured: {reasons}")
    return found.document


def print_table(document: dict[str, Any]) -> None:
    """Print what was measured of, the tables, and what was left out."""
    print(" ".join(captions(document)))
    tables = (({**SERVED, **DOOR}, "results"), (BESIDE, "beside"), (CONVERSATION, "conversations"))
    for columns, results in ((columns, document.get(name, [])) for columns, name in tables):
        if results:
            print(f"\n{markdown(rows(columns, results))}")
    compared = (f"{method}: {what}: {ratio:.3f}" for method, what, ratio in comparisons(document))
    left_out = (f"left out: {one['method']}: {one['what']}: {one['why']}" for one in document["left_out"])
    print("", *compared, *left_out, sep="\n")


main = command(parse, run, print_table)


if __name__ == "__main__":
    raise SystemExit(main())
