"""Speculation: several tokens of a request in one decode step, which are guessed (a draft) and then verified.

**A step** has rows, each a (request, position): a request's latest token and its draft behind it share one slot. All their keys
and values go to the window before attention, and a row sees those up to its own position (`Retrieval.begin_step`). A draft ends
where tokens would leave the window, so an eviction moves accepted tokens alone, and taking back the others is to count less
(`Retrieval.accept`): their window rows are written again by the tokens that take their place. So a method may speculate if its
steps leave nothing in its index (Traits.verifies_drafts).

**Which tokens are accepted.** Position by position, the engine draws what it would have drawn without a draft: from the same
logits, with the same random bits of the seed, after the same tokens. While the draft has that token, the next row's logits are
those of the next step; the first token that differs ends the step. So speculation changes no token and no log probability. A
draft that is given without chance is accepted with the probability p(draft), and otherwise a token comes from p without it: that
is the rule of Leviathan and others, "Fast inference from transformers via speculative decoding" (ICML 2023, algorithm 1), whose
draft distribution q is 1 at the draft.

**Drafts** are what followed the latest occurrence of the last tokens in prompt and output (`NgramDrafter`; Saxena, "Prompt lookup
decoding", 2023), or what the model's multi-token-prediction head guesses (`MtpDrafter`). An NgramDrafter predicts each token,
and counts whether it was right, also where nothing is drafted: a request whose text repeats nothing costs a look into a table a
token, and no step.

**How many tokens** (`StepCosts`): as many as give most tokens a second, from the chance of each and from what steps of so many
rows have taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvseek.core.config import MOST_DRAFTED, EngineConfig
from kvseek.core.errors import ConfigError, require
from kvseek.engine.cache.reuse import shares_extents
from kvseek.plugins.registry import METHODS as RETRIEVAL_METHODS
from kvseek.plugins.registry import get_method, method_traits

NGRAM, MTP = METHODS = ("ngram", "mtp")  # vLLM's names
NGRAMS = (4, 3, 2)  # tokens that have to agree with an earlier place, the most first: the longest match wins
FACTORS = (0x2545F491, 0x1B873593, 0x5BD1E995, 0x38B34AE5)  # odd numbers, of the sum that places an n-gram in its table
SPARE_PLACES = 4096  # of a table, for the output
# Chance that a prediction comes true, before anything is known: of the first token of a match, and of one behind 1, 2 to 3, 4 to
# 7 and more tokens that it has predicted.
CHANCES = (0.25, 0.5, 0.7, 0.85, 0.95)
MTP_CHANCES = (0.8, 0.7, 0.6, 0.5)  # likewise, of a multi-token-prediction head's first, second, third and later ones
PATIENCE = 32  # steps without a draft after which such a head is believed again
MEMORY = 8  # tokens over which a chance is averaged
SAMPLES = 5  # times of steps of a number of rows; the shortest counts, as disturbances only lengthen
MOST_AGE = 32  # steps after which the oldest time of each number of rows is forgotten
UNTRIED_ROW = 0.125  # of the time of a step of one row takes each further row, where none has been tried


@dataclass(frozen=True)
class Speculation:
    """How an engine speculates; no field of an engine, but of a process that loads it.

    Attributes
    ----------
    method : str
        "ngram", or "mtp": by the model's multi-token-prediction head.
    num_speculative_tokens : int
        Most tokens of a draft, 1 to 7.

    Raises
    ------
    ConfigError
        For other values.
    """

    method: str = NGRAM
    num_speculative_tokens: int = MOST_DRAFTED

    def __post_init__(self) -> None:
        require(self.method in METHODS, "speculation", self.method, f"one of {METHODS}", "leave it out for none")
        count = self.num_speculative_tokens
        limit = f"in [1, {MOST_DRAFTED}]"
        require(1 <= count <= MOST_DRAFTED, "num_speculative_tokens", count, limit, f"{MOST_DRAFTED} is the default")


def read_speculation(method: str | None, num_speculative_tokens: int | None = None) -> Speculation | None:
    """Make of two settings how an engine speculates; None: not at all. Raises ConfigError."""
    if method is None:
        name, count, limit = "num_speculative_tokens", num_speculative_tokens, "left out without speculation"
        require(count is None, name, count, limit, "give that too")
        return None
    return Speculation(method, MOST_DRAFTED if num_speculative_tokens is None else num_speculative_tokens)


def check_speculation(config: EngineConfig, speculation: Speculation | None) -> None:
    """Raise ConfigError if an engine cannot speculate as it is asked to."""
    if speculation is None:
        return
    if not method_traits(config).verifies_drafts:
        others = ", ".join(name for name in RETRIEVAL_METHODS if get_method(name).traits().verifies_drafts)
        raise ConfigError(
            f"speculation = {speculation.method!r}: must be left out with method = {config.method!r}, whose steps change what "
            f"later ones select; methods that speculate: {others}"
        )
    name, method, remedy = "speculation", speculation.method, "leave it out, or build another engine"
    limit = "left out with an engine that has no multi-token-prediction head"
    own = "build a hybrid, such as Qwen3-Next, with --mtp, for the CPU, or choose 'ngram'"
    require(method != MTP or config.model.mtp, name, method, limit, own)
    require(config.runtime == "torch", name, method, f"left out with runtime = {config.runtime!r}", remedy)
    if config.device == "cuda":
        # Work space has room for max_batch_size regions, and is smaller where requests share none.
        limit = f"left out with method = {config.method!r} on a GPU where requests share no extents"
        require(shares_extents(config), name, method, limit, remedy)
        limit = "left out on a GPU with max_batch_size = 1, the most rows of a step"
        require(config.max_batch_size > 1, name, method, limit, remedy)


class Drafter(Protocol):
    """Guesses the tokens of one request."""

    def follow(self, generated: Sequence[int]) -> None:
        """Look at the request's output so far: all of it, of which the last call knows a beginning."""

    def draft(self, most: int) -> list[int]:
        """Guess the next tokens, at most so many."""

    def chances(self, most: int) -> list[float]:
        """Return how likely it is that the first 1, 2, ... tokens of `draft(most)` are all right."""


class Guesses:
    """Counts how often a drafter's predictions come true, and makes chances of that.

    The more tokens a match has predicted in a row, the likelier is the next one: each number of tokens, up to a power of two,
    has a chance of its own.
    """

    def __init__(self, chances: Sequence[float] = CHANCES) -> None:
        self._chances = list(chances)
        self._run = 0  # tokens that the present match has predicted

    def count(self, right: bool) -> None:
        """Take note of whether the token that was predicted has come."""
        group = self._group(self._run)
        self._chances[group] += (right - self._chances[group]) / MEMORY
        self._run = self._run + 1 if right else 0

    def begin(self) -> None:
        """Take note that the next prediction is the first of a match."""
        self._run = 0

    def chances(self, count: int) -> list[float]:
        """Return the chance that the next 1, 2, ... `count` predictions all come true."""
        found, chance = list[float](), 1.0
        for run in range(self._run, self._run + count):
            chance *= self._chances[self._group(run)]
            found.append(chance)
        return found

    def _group(self, run: int) -> int:
        return min(run.bit_length(), len(self._chances) - 1)


class NgramDrafter:
    """Predicts what followed the latest place where the last tokens stood; a Drafter.

    A match goes on as long as it predicts well. A table gives each n-gram the place of its last occurrence, by a sum of its
    tokens: what shares a place with another loses it, and is not found.

    Parameters
    ----------
    prompt : sequence of int
        Making it takes some milliseconds for 128K tokens, and 4 bytes times the number of n-gram sizes for two places a token.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._tokens, self._prompt = list(prompt), len(prompt)
        places = 1 << (2 * (len(prompt) + SPARE_PLACES)).bit_length()
        self._mask, self._tables = places - 1, {size: np.zeros(places, dtype=np.int32) for size in NGRAMS}
        ids = np.array(prompt, dtype=np.int64)
        for size, table in self._tables.items():
            if size < len(prompt):
                # Place `end` is behind an n-gram; the last one of the prompt has no token behind it.
                ends = np.arange(size, len(prompt))
                sums = sum(ids[ends - 1 - back] * FACTORS[back] for back in range(size))
                table[(sums ^ sums >> 17) & self._mask] = ends  # of several places the last
        self.guesses, self._places = Guesses(), self._sums()
        self._at = self._find()

    def follow(self, generated: Sequence[int]) -> None:
        for token in generated[len(self._tokens) - self._prompt :]:
            self._take(token)

    def draft(self, most: int) -> list[int]:
        if not self._at:
            return []
        tokens, end = self._tokens[self._at : self._at + most], len(self._tokens) - self._at
        while len(tokens) < most:  # the text repeats what the match has begun with
            tokens.append(tokens[len(tokens) - end])
        return tokens

    def chances(self, most: int) -> list[float]:
        return self.guesses.chances(most) if self._at else []

    def _take(self, token: int) -> None:
        tokens, right = self._tokens, False
        if self._at:
            right = tokens[self._at] == token
            self.guesses.count(right)
        for table, place in zip(self._tables.values(), self._places, strict=True):
            table[place] = len(tokens)
        tokens.append(token)
        self._places = self._sums()
        self._at = self._at + 1 if right else self._find()

    def _find(self) -> int:
        """Return the place behind the longest n-gram that also ends the text; 0: there is none."""
        tokens = self._tokens
        for (size, table), place in zip(self._tables.items(), self._places, strict=True):
            at = int(table[place])
            if at and tokens[at - size : at] == tokens[-size:]:
                self.guesses.begin()
                return at
        return 0

    def _sums(self) -> list[int]:
        """Return the place in its table of each n-gram that ends the text, in the order of NGRAMS."""
        total, count, places = 0, 0, list[int]()
        for token, factor in zip(self._tokens[: -len(FACTORS) - 1 : -1], FACTORS, strict=False):
            total, count = total + token * factor, count + 1
            if count in self._tables:
                places.append((total ^ total >> 17) & self._mask)
        return [0] * (len(NGRAMS) - len(places)) + places[::-1]  # of a text that is shorter: nothing is found at 0


class DraftingHead(Protocol):
    """The MtpHead of engine/model/mtp.py."""

    def follow(self, slot: int, tokens: Sequence[int]) -> bool: ...

    def draft(self, slot: int, count: int) -> list[int]: ...


class MtpDrafter:
    """Has a model's multi-token-prediction head predict the tokens of the request in a slot; a Drafter.

    The head predicts only what is drafted, so that a request which it guesses badly costs next to nothing.
    """

    def __init__(self, head: DraftingHead, slot: int, prompt: Sequence[int]) -> None:
        self._head, self._slot = head, slot
        self._tokens, self._prompt = list(prompt), len(prompt)
        self._drafted, self._ready = list[int](), False
        self._guesses, self._idle = Guesses(MTP_CHANCES), 0

    def follow(self, generated: Sequence[int]) -> None:
        new = generated[len(self._tokens) - self._prompt :]
        for drafted, token in zip(self._drafted, new, strict=False):
            self._guesses.count(drafted == token)
            if drafted != token:
                break
        if new:
            self._idle = 0 if self._drafted else self._idle + 1
            self._drafted = []
        if self._idle == PATIENCE:
            self._guesses, self._idle = Guesses(MTP_CHANCES), 0
        self._guesses.begin()
        self._tokens += new
        self._ready = self._head.follow(self._slot, self._tokens)

    def draft(self, most: int) -> list[int]:
        self._drafted = self._head.draft(self._slot, most) if self._ready else []
        return list(self._drafted)

    def chances(self, most: int) -> list[float]:
        return self._guesses.chances(most) if self._ready else []


class StepCosts:
    """Learns what steps take by their number of rows, and chooses how many tokens each request drafts."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._steps = 0

    def record(self, rows: int, seconds: float) -> None:
        """Take note of a step that read nothing of prompts."""
        self._seconds.setdefault(rows, deque(maxlen=SAMPLES)).append(seconds)
        self._steps += 1
        if self._steps % MOST_AGE == 0:
            for times in self._seconds.values():
                times.popleft()
            self._seconds = {number: times for number, times in self._seconds.items() if times}

    def seconds(self, rows: int) -> float | None:
        """Estimate the time of a step; None if nothing is known."""
        found = [
            min(times) for other, times in self._seconds.items() if other >= rows
        ]  # no step is longer than a larger one
        below = max((other for other in self._seconds if other < rows), default=0)
        if rows not in self._seconds and below:
            found.append(min(self._seconds[below]) * (1 + UNTRIED_ROW * (rows - below) / below))
        return min(found, default=None)

    def measured(self) -> dict[int, float]:
        """Return the shortest of the latest times, in seconds, of each number of rows."""
        return {rows: min(times) for rows, times in self._seconds.items()}

    def choose(self, chances: Sequence[Sequence[float]], most_rows: int) -> list[int]:
        """Choose how many tokens each request drafts, so that the step gives most tokens a second.

        Parameters
        ----------
        chances : sequence of sequence of float
            By request, as Drafter.chances; as many as may be drafted.
        most_rows : int
            Most rows of the step.
        """
        requests = len(chances)
        found = sorted(((chance, number) for number, own in enumerate(chances) for chance in own), reverse=True)
        found = found[: max(0, most_rows - requests)]
        plain = self.seconds(requests)
        if not found or plain is None:
            return [0] * requests
        tokens, best, count = float(requests), requests / plain, 0
        for drafted, (chance, _) in enumerate(found, 1):
            tokens += chance
            seconds = self.seconds(requests + drafted)
            assert seconds is not None, "a step with fewer rows is known"
            if tokens / seconds > best:
                best, count = tokens / seconds, drafted
        counts = [0] * requests
        for _, number in found[:count]:
            counts[number] += 1
        return counts
