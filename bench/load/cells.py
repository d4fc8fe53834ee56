"""What a load test measures: cells, the answers of each, and the figures of these answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvseek.core.errors import KvseekError
from kvseek.engine.tokenizer import Tokenizer

PERCENTILES = (50, 99)


class LoadTestError(KvseekError):
    """A load test that cannot run, or whose figures would be wrong; the message says why and what to do."""


@dataclass(frozen=True)
class Cell:
    """One load.

    Attributes
    ----------
    lengths : tuple
        Tokens of the prompt and of the answer of each request, in the order in which they are sent.
    concurrency : int
        Requests at a time: the next one is sent when another has ended.
    rate : float or None
        Requests a second that are sent on average, at random times and whatever has ended; then `concurrency` means nothing.
    """

    lengths: tuple[tuple[int, int], ...]
    concurrency: int = 1
    rate: float | None = None

    @property
    def prompt_tokens(self) -> int:
        """Mean of the prompts, rounded."""
        return round(sum(prompt for prompt, _ in self.lengths) / len(self.lengths))

    @property
    def output_tokens(self) -> int:
        """Mean of the answers, rounded."""
        return round(sum(answer for _, answer in self.lengths) / len(self.lengths))

    @property
    def name(self) -> str:
        """What it is, for people who wait for it."""
        pace = f"{self.concurrency} at a time" if self.rate is None else f"{self.rate:g} a second"
        return f"{len(self.lengths)} requests, {pace}, prompts of {self.prompt_tokens:,} tokens"


@dataclass(frozen=True)
class Answer:
    """When a request was sent, and when each piece of its answer arrived; seconds of one clock.

    A piece is an event with text. The server may put several tokens into one, so that `tokens`, which the server counts, may be
    more than there are pieces. So it does those of the prompt, and those of them that it had read before.
    """

    sent: float
    arrivals: tuple[float, ...]
    tokens: int
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def read_tokens(self) -> int:
        """Tokens of the prompt that the server had to read."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def ttft(self) -> float:
        """Time to first token, seconds."""
        return self.arrivals[0] - self.sent

    @property
    def tpot(self) -> float:
        """Time per output token after the first, seconds: the mean of this answer, which aiperf calls inter token latency."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces: vLLM's inter-token latency, aiperf's inter chunk latency."""
        return [later - earlier for earlier, later in itertools.pairwise(self.arrivals)]


def cells(
    concurrencies: Sequence[int], lengths: Sequence[int], base: tuple[int, int], requests: int, output_tokens: int
) -> list[Cell]:
    """Every concurrency with prompts of base[1] tokens, and every prompt length at concurrency base[0]; none twice.

    A cell has `requests` requests, or twice its concurrency if that is more.
    """
    pairs = [*((concurrency, base[1]) for concurrency in concurrencies), *((base[0], length) for length in lengths)]
    return [
        Cell(((length, output_tokens),) * max(requests, 2 * concurrency), concurrency)
        for concurrency, length in dict.fromkeys(pairs)
    ]


def prompts(tokenizer: Tokenizer, text: str, cell: Cell) -> list[str]:
    """A prompt for each request of a cell, all of them different pieces of `text`, which is as if it began again at its end.

    Raises LoadTestError if the text is too short. Text that is cut and tokenised again may have a token more or less.
    """
    ids, number = tokenizer.encode(text, add_special_tokens=False), len(cell.lengths)
    if len(ids) < number:
        raise LoadTestError(
            f"--text has {len(ids)} tokens: must be >= {number}, for as many different prompts; give a longer text"
        )
    starts = (place * len(ids) // number for place in range(number))
    return [
        tokenizer.decode(list(itertools.islice(itertools.cycle(ids), start, start + length)))
        for start, (length, _) in zip(starts, cell.lengths, strict=True)
    ]


def figures(cell: Cell, answers: Sequence[Answer]) -> dict[str, Any]:
    """Figures of a cell, in seconds; raises LoadTestError unless all answers came and are of the length that was asked for."""
    found, asked = (
        sorted(lengths) for lengths in ((a.tokens for a in answers), (answer for _, answer in cell.lengths))
    )
    if found != asked:
        raise LoadTestError(
            f"{len(found)} answers of {sorted(set(found))} tokens: must be {len(asked)} of {sorted(set(asked))}, or rates and "
            "times would be of another load; look at the tool's own report"
        )
    seconds = max(answer.arrivals[-1] for answer in answers) - min(answer.sent for answer in answers)
    return {
        "concurrency": cell.concurrency,
        "rate": cell.rate,
        "prompt_tokens": cell.prompt_tokens,
        "requests": len(answers),
        "output_tokens": cell.output_tokens,
        "seconds": seconds,
        "requests_per_second": len(answers) / seconds,
        "tokens_per_second": sum(found) / seconds,
        "ttft_seconds": percentiles(answer.ttft for answer in answers),
        "tpot_seconds": percentiles(answer.tpot for answer in answers),
        "itl_seconds": percentiles(gap for answer in answers for gap in answer.gaps),
    }


def percentiles(values: Iterable[float]) -> dict[str, float] | None:
    """Percentiles by their names, p50 and p99, interpolated between the nearest two values; None of no values."""
    if not (found := list(values)):
        return None
    return {
        f"p{percent}": float(value)
        for percent, value in zip(PERCENTILES, np.percentile(found, PERCENTILES), strict=True)
    }
