"""Streams of a server while prompts are read: their time per token, and the time to first token of short prompts."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvseek.engine.tokenizer import Tokenizer

from .cells import Answer, Cell, LoadTestError, percentiles, prompts
from .client import Client

PIECE = 32  # tokens of a stream that count as an answer: their mean is a time per output token
ANSWER = 2  # tokens of an answer to a prompt that arrives
PAUSE = 1.0  # seconds between two short prompts
SHORT, NOTHING, LONG, BOTH = "short prompts", "nothing", "long prompts", "both"  # what arrives in a part


@dataclass(frozen=True)
class Streams:
    """What runs, and what arrives beside it.

    Attributes
    ----------
    number, prompt_tokens, output_tokens : int
        Of the streams.
    long_prompt, short_prompt : int
        Tokens of prompts that arrive: long ones one after the other, short ones every PAUSE seconds.
    window : float
        Seconds of a part, or as long as its last long prompt takes.
    """

    number: int
    prompt_tokens: int
    output_tokens: int
    long_prompt: int
    short_prompt: int
    window: float


async def measure_beside(client: Client, tokenizer: Tokenizer, text: str, load: Streams) -> list[dict[str, Any]]:
    """The results of all parts: prompts without streams, then streams with what arrives beside them.

    Raises LoadTestError if a request fails, or a part is too short for PIECE tokens of a stream.
    """
    running, arriving = ((load.prompt_tokens, load.output_tokens),) * load.number, (load.long_prompt, load.short_prompt)
    *starts, long, short = prompts(tokenizer, text, Cell((*running, *((prompt, ANSWER) for prompt in arriving))))
    answers: list[list[float]] = []  # when the tokens of each stream's answers arrived

    async def stream(prompt: str) -> None:
        while True:  # one that ends begins again
            answers.append([])
            await client.answer(prompt, load.output_tokens, answers[-1])

    tasks: list[asyncio.Future[Any]] = []
    results = list[dict[str, Any]]()

    async def measure(part: str, streams: Sequence[asyncio.Future[Any]]) -> None:
        began = time.perf_counter()
        tasks.append(end := asyncio.ensure_future(_pass(client, long if part in (LONG, BOTH) else None, load.window)))
        shorts = await _arrive(client, short, end) if part in (SHORT, BOTH) else []
        longs = await end
        ended = longs[-1].arrivals[0] if longs else time.perf_counter()
        for task in streams:
            if task.done():
                task.result()  # raises why it has failed
        inside = [[at for at in times if began <= at <= ended] for times in answers]
        results.append({"part": part, "streams": len(streams), **_figures(inside, shorts, longs)})

    try:
        for part in (LONG, SHORT):
            await measure(part, ())
        tasks += (streams := [asyncio.ensure_future(stream(prompt)) for prompt in starts])
        while sum(map(bool, answers)) < load.number and not any(task.done() for task in streams):
            await asyncio.sleep(0.01)
        for part in (NOTHING, SHORT, LONG, BOTH):
            await measure(part, streams)
        return results
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pass(client: Client, prompt: str | None, seconds: float) -> list[Answer]:
    """Let so much time pass, or send a prompt again and again meanwhile, at least once; returns its answers."""
    answers, end = list[Answer](), time.perf_counter() + seconds
    if prompt is None:
        await asyncio.sleep(seconds)
    while prompt is not None and (not answers or time.perf_counter() < end):
        answers.append(await client.answer(prompt, ANSWER))
    return answers


async def _arrive(client: Client, prompt: str, end: asyncio.Future[Any]) -> list[Answer]:
    """Send a short prompt every PAUSE seconds until something else has ended; returns their answers, at least one."""
    sent = []
    while not end.done():
        sent.append(asyncio.ensure_future(client.answer(prompt, ANSWER)))
        await asyncio.wait([end], timeout=PAUSE)
    return await asyncio.gather(*sent)


def _figures(inside: Sequence[Sequence[float]], shorts: Sequence[Answer], longs: Sequence[Answer]) -> dict[str, Any]:
    """Figures of a part, from the tokens of each answer that arrived in it; raises LoadTestError if none has PIECE of them."""
    ends = [times[::PIECE] for times in inside]
    pieces = [(later - earlier) / PIECE for times in ends for earlier, later in itertools.pairwise(times)]
    if inside and not pieces:
        raise LoadTestError(f"no stream has had {PIECE} tokens in a part; raise --window")
    gaps = [later - earlier for times in inside for earlier, later in itertools.pairwise(times)]
    return {
        "tpot_seconds": percentiles(pieces),
        "itl_seconds": percentiles(gaps),
        "short_ttft_seconds": percentiles(answer.ttft for answer in shorts),
        "long_ttft_seconds": [answer.ttft for answer in longs],
    }
