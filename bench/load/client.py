"""A load tester for streams of OpenAI's completions, in one event loop, where the public ones cannot be installed.

Its figures are those of aiperf and of vLLM's `vllm bench serve`: TTFT ends with the first piece of text, TPOT is the time from
the first piece to the last one over the tokens after the first, and tokens are counted by the server.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import aiohttp
import msgspec

from .cells import Answer, Cell, LoadTestError

EVENT, DONE = b"data: ", b"[DONE]"
NO_LIMIT = aiohttp.ClientTimeout()  # `send` has one for all


class Delta(msgspec.Struct, frozen=True):
    """A piece of an answer to a chat."""

    content: str | None = None


class Choice(msgspec.Struct):
    """What an event has of an answer."""

    text: str = ""
    delta: Delta = Delta()


class Cached(msgspec.Struct, frozen=True):
    """Tokens of a prompt that were not read."""

    cached_tokens: int = 0


class Usage(msgspec.Struct):
    """Tokens that the server has counted."""

    completion_tokens: int
    prompt_tokens: int = 0
    prompt_tokens_details: Cached = Cached()


class Fault(msgspec.Struct):
    """Why an answer breaks off."""

    message: str


class Event(msgspec.Struct):
    """What is read of an event; of the rest no objects are made, as there may be tens of thousands a second."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Fault | None = None


read_event = msgspec.json.Decoder(Event).decode
Ask = Callable[[int], Awaitable[Answer]]  # sends the request of a cell with this number


class Client:
    """Asks one server for completions of texts and of chats; use it in `async with`.

    Parameters
    ----------
    url : str
        Base URL with /v1.
    fields : mapping
        What all requests have besides the prompt and the length of the answer: the model, parameters of sampling.
    """

    def __init__(self, url: str, fields: Mapping[str, Any]) -> None:
        self._base, self._fields = url, fields

    async def __aenter__(self) -> Client:
        # As many connections as requests. No proxy leads to a server of this machine.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=NO_LIMIT, trust_env=False
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def answer(
        self, prompt: str | Sequence[Mapping[str, str]], tokens: int, arrivals: list[float] | None = None, **fields: Any
    ) -> Answer:
        """Send a prompt, or a chat's messages, and read an answer of exactly so many tokens; raises LoadTestError.

        Parameters
        ----------
        arrivals : list, optional
            Gets the time of each piece of text as it arrives, for those who look before the end.
        **fields
            What this request has besides.
        """
        arrivals, counted, rest = [] if arrivals is None else arrivals, Usage(0), b""
        url = f"{self._base}/completions" if isinstance(prompt, str) else f"{self._base}/chat/completions"
        body = {
            "prompt" if isinstance(prompt, str) else "messages": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            **self._fields,
            **fields,
        }
        body["stream_options"] = {"include_usage": True}
        sent = time.perf_counter()
        try:
            async with self._session.post(url, json=body) as response:
                if response.status != 200:
                    raise LoadTestError(f"{url}: status {response.status}: {(await response.text())[:500]}")
                async for received in response.content.iter_any():
                    now = time.perf_counter()
                    *lines, rest = (rest + received).split(b"\n")
                    for line in lines:
                        if not line.startswith(EVENT) or (data := line.removeprefix(EVENT).strip()) == DONE:
                            continue
                        event = read_event(data)
                        if event.error is not None:
                            raise LoadTestError(f"{url}: {event.error.message}")
                        if any(choice.text or choice.delta.content for choice in event.choices):
                            arrivals.append(now)
                        if event.usage is not None:
                            counted = event.usage
        except aiohttp.ClientError as error:
            raise LoadTestError(f"{url}: {type(error).__name__}: {error}; see the server's log") from None
        if not arrivals:
            raise LoadTestError(f"{url}: an answer of {tokens} tokens without text; see the server's log")
        cached = counted.prompt_tokens_details.cached_tokens
        return Answer(sent, tuple(arrivals), counted.completion_tokens, counted.prompt_tokens, cached)


async def send(cell: Cell, ask: Ask, seconds: float, seed: int = 0) -> list[Answer]:
    """Send a cell's requests, and collect their answers; raises LoadTestError if one fails or all take more than `seconds`."""
    numbers = iter(range(len(cell.lengths)))

    async def one_after_the_other() -> list[Answer]:
        return [await ask(number) for number in numbers]

    async def at(arrival: float, number: int) -> list[Answer]:
        await asyncio.sleep(arrival)
        return [await ask(number)]

    if cell.rate is None:
        work = [one_after_the_other() for _ in range(cell.concurrency)]
    else:
        draw = random.Random(seed)
        pauses = [0.0, *(draw.expovariate(cell.rate) for _ in cell.lengths[1:])]
        work = [at(arrival, number) for arrival, number in zip(accumulate(pauses), numbers, strict=True)]
    try:
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            tasks = [group.create_task(part) for part in work]
    except TimeoutError:
        raise LoadTestError(
            f"{cell.name}: not done in {seconds:.0f} s; raise --seconds, or measure fewer cells"
        ) from None
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [answer for task in tasks for answer in task.result()]
