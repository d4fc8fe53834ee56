"""A conversation that grows: time to first token of each turn beside the tokens that it reads, after an edit, and of a fork."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvseek.engine.tokenizer import Tokenizer

from .cells import Answer, percentiles
from .client import Client

FRESH = 5  # prompts as long as what a turn says, of which nothing is known


@dataclass(frozen=True)
class Conversation:
    """Turns, and the tokens that each of them says and is answered."""

    turns: int
    said: int
    answered: int

    @property
    def tokens(self) -> int:
        """Tokens of the whole."""
        return self.turns * (self.said + self.answered)


async def measure_conversation(client: Client, tokenizer: Tokenizer, text: str, load: Conversation) -> dict[str, Any]:
    """The result of one conversation, whose answers are forced to be the text's; raises LoadTestError if a request fails.

    Then a turn whose history was edited in the middle, and one that goes on from the middle in another way.
    """
    cycle = itertools.cycle(tokenizer.encode(text, add_special_tokens=False))
    ids = list(itertools.islice(cycle, load.tokens + load.said))
    other, both, half = ids[::-1][: load.said], load.said + load.answered, load.turns // 2 * (load.said + load.answered)

    async def ask(prompt: Sequence[int], salt: str = "conversation") -> Answer:
        answer = ids[len(prompt) :][: load.answered]
        forced = (answer + ids)[: load.answered]
        return await client.answer(tokenizer.decode(prompt), load.answered, forced_tokens=forced, cache_salt=salt)

    await ask(ids[: load.tokens // 8], "warm")
    fresh = [await ask(ids[number * both :][: load.said], f"fresh {number}") for number in range(FRESH)]
    turns = [await ask(ids[: turn * both + load.said]) for turn in range(load.turns)]
    last = (load.turns - 1) * both + load.said
    edited = [*ids[: half - len(other)], *other, *ids[half:last]]
    after = {"edited": await ask(edited), "forked": await ask([*ids[:half], *other])}
    alone = percentiles(answer.ttft for answer in fresh)
    assert alone is not None
    beyond = [answer.ttft - alone["p50"] for answer in turns]
    return {
        "turns": load.turns,
        "tokens": turns[-1].prompt_tokens + load.answered,
        "read_tokens": percentiles(answer.read_tokens for answer in turns[1:]),
        "fresh_ttft_seconds": alone,
        "ttft_seconds": percentiles(answer.ttft for answer in turns),
        "beyond_seconds": {**(percentiles(beyond) or {}), "max": max(beyond)},
        **{name: _turn(answer) for name, answer in after.items()},
        "each": [_turn(answer) for answer in turns],
    }


def _turn(answer: Answer) -> dict[str, Any]:
    return {"prompt_tokens": answer.prompt_tokens, "read_tokens": answer.read_tokens, "ttft_seconds": answer.ttft}
