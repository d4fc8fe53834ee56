"""A conversation that grows: time to first token of each turn beside the tokens that it reads, after an edit, and of a fork."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
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
    pieces = itertools.cycle(tokenizer.encode(text, add_special_tokens=False))

    def piece(tokens: int) -> str:
        """A message of so many tokens, of which the template's end of a message is the last."""
        return tokenizer.decode(list(itertools.islice(pieces, tokens - 1)))

    said, answers = [], []
    for _ in range(load.turns):
        said.append({"role": "user", "content": piece(load.said)})
        answers.append(piece(load.answered))

    async def ask(chat: Sequence[Mapping[str, str]], salt: str = "conversation") -> Answer:
        forced = tokenizer.encode(answers[len(chat) // 2], add_special_tokens=False)
        return await client.answer(chat, len(forced), forced_tokens=forced, cache_salt=salt)

    history = [{"role": "assistant", "content": answer} for answer in answers]
    whole = [message for turn in zip(said, history, strict=True) for message in turn][:-1]
    half, other = load.turns // 2 * 2, said[-1]
    await ask(whole[: half // 4 * 2 + 1], "warm")
    fresh = [await ask([message], f"fresh {number}") for number, message in enumerate(said[:FRESH])]
    turns = [await ask(whole[: 2 * turn + 1]) for turn in range(load.turns)]
    edited = [*whole[: half - 2], other, *whole[half - 1 :]]
    after = {"edited": await ask(edited), "forked": await ask([*whole[:half], other])}
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
