"""A context: sentences of filler words, with the sentences of facts scattered among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .facts import Fact
from .vocabulary import DIGITS, FILLER, FULL_STOP, encode

SHORTEST, LONGEST = 5, 14  # tokens of a filler sentence, the full stop counted
STRAY_SHARE = 0.02  # of the filler tokens are words that facts are made of, so that no class of words gives facts away

Ids = NDArray[np.int32]


def _filler_shares() -> tuple[Ids, NDArray[np.float64]]:
    """Tokens of filler and their shares: 90 % filler words, the n-th in proportion to 1 / (n + 20), and a few of grammar."""
    ids = np.array([*FILLER, *encode("the is ,")], dtype=np.int32)
    falling = 1 / (np.arange(len(FILLER)) + 20)
    return ids, np.cumsum([*(0.9 * falling / falling.sum()), 0.05, 0.03, 0.02])


_TOKENS, _CUMULATED = _filler_shares()


@dataclass(frozen=True)
class Context:
    """Token ids [tokens] of a context, and the places [sentences] at which its sentences begin."""

    ids: Ids
    starts: NDArray[np.int64]


def write_context(facts: Sequence[Fact], tokens: int, numbers: np.random.Generator) -> Context:
    """State all facts in a context of exactly `tokens` tokens; the sentences of a fact keep their order.

    Raises
    ------
    ValueError
        If the facts' sentences have more than `tokens` tokens.
    """
    room = tokens - sum(fact.tokens for fact in facts)
    if room < 0:
        raise ValueError(f"tokens = {tokens}: must be >= {tokens - room}, those of the facts; state fewer facts")
    filler = _filler(room, numbers)
    gaps = np.append(filler.starts, room)
    # A sentence goes into the gap before a filler sentence or after the last: a real number says which, and the order
    # of sentences that go into the same gap.
    placed: list[tuple[float, list[int]]] = []
    for fact in facts:
        chosen = np.sort(numbers.random(len(fact.sentences))) * len(gaps)
        placed += zip(chosen.tolist(), fact.sentences, strict=True)
    placed.sort(key=lambda one: one[0])
    lengths = np.array([len(sentence) for _, sentence in placed], dtype=np.int64)
    where = np.repeat(gaps[[int(place) for place, _ in placed]], lengths)
    stated = np.array([number for _, sentence in placed for number in sentence], dtype=np.int32)
    begins = np.zeros(room, dtype=bool)
    begins[filler.starts] = True
    stated_begins = np.zeros(len(stated), dtype=bool)
    stated_begins[np.cumsum(lengths) - lengths] = True
    return Context(np.insert(filler.ids, where, stated), np.flatnonzero(np.insert(begins, where, stated_begins)))


def _filler(tokens: int, numbers: np.random.Generator) -> Context:
    """Sentences of random words, `tokens` in all."""
    ids = _TOKENS[np.searchsorted(_CUMULATED, numbers.random(tokens) * _CUMULATED[-1])]
    stray = np.flatnonzero(numbers.random(tokens) < STRAY_SHARE)
    ids[stray] = numbers.integers(DIGITS.start, FILLER.start, len(stray))
    ends = np.cumsum(numbers.integers(SHORTEST, LONGEST + 1, tokens // SHORTEST + 1))
    ends = ends[ends < tokens]
    if tokens:
        ids[np.append(ends, tokens) - 1] = FULL_STOP
    return Context(ids, np.append(0, ends)[: tokens or 0].astype(np.int64))
