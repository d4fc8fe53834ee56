"""What a load test measures: cells, the answers of each, the figures of these answers, and their table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvseek.bench.output import markdown
from kvseek.core.errors import KvseekError
from kvseek.engine.tokenizer import Tokenizer

PERCENTILES = (50, 99)
HEADINGS = (
    *("tool", "port", "concurrency", "prompt tokens", "requests", "tokens/s"),
    *("TTFT p50, s", "TTFT p99, s", "TPOT p50, ms", "TPOT p99, ms"),
)


class LoadTestError(KvseekError):
    """A load test that cannot run, or whose figures would be wrong; the message says why and what to do."""


@dataclass(frozen=True)
class Cell:
    """One load: `concurrency` requests at a time, `requests` in all, each with a prompt and an answer of so many tokens."""

    concurrency: int
    prompt_tokens: int
    requests: int
    output_tokens: int


@dataclass(frozen=True)
class Answer:
    """When a load tester sent a request, and when it received the first and the last of `tokens` tokens; seconds of its clock."""

    sent: float
    first: float
    last: float
    tokens: int

    @property
    def ttft(self) -> float:
        """Time to first token, seconds."""
        return self.first - self.sent

    @property
    def tpot(self) -> float:
        """Time per output token after the first, seconds: the mean of this answer."""
        return (self.last - self.first) / (self.tokens - 1)


def cells(
    concurrencies: Sequence[int], lengths: Sequence[int], base: tuple[int, int], requests: int, output_tokens: int
) -> list[Cell]:
    """Every concurrency with prompts of base[1] tokens, and every prompt length at concurrency base[0]; none twice.

    A cell has `requests` requests, or twice its concurrency if that is more.
    """
    pairs = [*((concurrency, base[1]) for concurrency in concurrencies), *((base[0], length) for length in lengths)]
    return [
        Cell(concurrency, length, max(requests, 2 * concurrency), output_tokens)
        for concurrency, length in dict.fromkeys(pairs)
    ]


def prompts(tokenizer: Tokenizer, text: str, cell: Cell) -> list[str]:
    """A prompt for each request of a cell, all of them different pieces of `text`.

    Raises LoadTestError if the text is too short. Text that is cut and tokenised again may have a token more or less.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    last = len(ids) - cell.prompt_tokens
    if last < cell.requests:
        needed = cell.prompt_tokens + cell.requests
        raise LoadTestError(
            f"--text has {len(ids)} tokens: must be >= {needed} for {cell.requests} prompts of {cell.prompt_tokens}; "
            "give a longer text, or smaller --prompt_tokens"
        )
    starts = (number * last // cell.requests for number in range(cell.requests))
    return [tokenizer.decode(ids[start : start + cell.prompt_tokens]) for start in starts]


def figures(cell: Cell, answers: Sequence[Answer]) -> dict[str, Any]:
    """Figures of a cell, in seconds; raises LoadTestError unless all answers came and are of the length that was asked for."""
    lengths = {answer.tokens for answer in answers}
    if len(answers) != cell.requests or lengths != {cell.output_tokens}:
        raise LoadTestError(
            f"{len(answers)} answers of {sorted(lengths)} tokens: must be {cell.requests} of {cell.output_tokens}, or rates and "
            "times would be of another load; look at the tool's own report"
        )
    seconds = max(answer.last for answer in answers) - min(answer.sent for answer in answers)
    return {
        "concurrency": cell.concurrency,
        "prompt_tokens": cell.prompt_tokens,
        "requests": cell.requests,
        "output_tokens": cell.output_tokens,
        "seconds": seconds,
        "requests_per_second": len(answers) / seconds,
        "tokens_per_second": sum(answer.tokens for answer in answers) / seconds,
        "ttft_seconds": percentiles(answer.ttft for answer in answers),
        "tpot_seconds": percentiles(answer.tpot for answer in answers),
    }


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Percentiles by their names, p50 and p99; interpolated between the nearest two values."""
    found = np.percentile(list(values), PERCENTILES)
    return {f"p{percentile}": float(value) for percentile, value in zip(PERCENTILES, found, strict=True)}


def captions(document: dict[str, Any]) -> tuple[str, str]:
    """What the figures are of: engine and machine, server and answers."""
    engine, server, machine = document["engine"], document["server"], document["machine"]
    where = f"{machine['cores']} cores of {machine['cpu']}, kvseek commit {str(machine['commit'])[:10]}"
    limits = f"--threads {server['threads']}, --max_queue_size {server['max_queue_size']}"
    answers = f"Answers of {document['results'][0]['output_tokens']} tokens."
    first = f"{engine['name']} ({engine['method']}, max_batch_size {engine['max_batch_size']}) on {where}."
    return first, f"Server: {limits}. {answers}"


def row(result: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table."""
    ttft, tpot = result["ttft_seconds"], result["tpot_seconds"]
    return (
        *(result["tool"], result["door"], str(result["concurrency"]), f"{result['prompt_tokens']:,}"),
        *(str(result["requests"]), f"{result['tokens_per_second']:.3g}"),
        *(f"{ttft[name]:.3g}" for name in ("p50", "p99")),
        *(f"{tpot[name] * 1e3:.3g}" for name in ("p50", "p99")),
    )


def print_table(document: dict[str, Any]) -> None:
    """Print captions and table."""
    print(f"{' '.join(captions(document))}\n\n{markdown([HEADINGS, *map(row, document['results'])])}")
