"""Sequences to train a model of the needle tasks on: a context, and many questions about it with their right answers.

They are drawn differently from the tasks' contexts: how many facts there are, of which forms, and how far apart they stand
varies from sequence to sequence. So a model that knows the tasks has not seen their layouts.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .contexts import Ids, write_context
from .facts import IS, THE, Fact, FactSource, ask
from .vocabulary import BOS

FORMS = ((0.45, (1.0, 0.0, 0.0)), (0.15, (0.2, 0.8, 0.0)), (0.2, (0.2, 0.0, 0.8)), (0.2, (0.5, 0.25, 0.25)))
# share of the sequences, and in these the shares of facts with one value, with four, and of chains
FULL_SHARE = 0.3  # of the sequences have as many facts as fit; the others down to one in some hundred tokens
MOST_ASKED = 3072  # tokens of questions and answers
LONGEST = 40  # tokens of a fact
FOURS = 12  # one question for four values to so many facts


@dataclass(frozen=True)
class Sequence:
    """A sequence of a batch; all arrays are [tokens].

    Attributes
    ----------
    ids : int32
    positions : int32
        Rising, from 0 on; with jumps where sentences begin, so that a short sequence shows distances of a long one.
    answers : bool
        Whether the token is one of an answer, and so to be predicted.
    """

    ids: Ids
    positions: Ids
    answers: NDArray[np.bool_]


def make_sequence(seed: list[int], tokens: int, *, bare: float, jumps: float, positions: int) -> Sequence:
    """One sequence, the same for the same arguments.

    Parameters
    ----------
    seed : list of int
        Of numpy's generator: three numbers, where contexts of an evaluation have four.
    tokens : int
        At least 128.
    bare : float
        Share of the questions for one value that are the fact's own first words again, without a question around them.
    jumps : float
        Share of the sequences whose positions jump, up to `positions` in all.
    """
    numbers = np.random.default_rng(seed)
    choices = random.Random(int(numbers.integers(1 << 60)))
    room = int(min(0.45 * tokens * choices.uniform(0.5, 1.15), MOST_ASKED * choices.uniform(0.4, 1)))
    facts = _facts(choices, tokens - 1 - room)
    asked: list[int] = []
    marks: list[bool] = []
    begins: list[int] = []
    for about in _asked_about(facts, choices):
        _, question, gold = ask(about)
        if about[0].form == "value" and len(about) == 1 and choices.random() < bare:
            question = [*THE, *about[0].names, *IS]
        if len(asked) + len(question) + len(gold) <= room:
            begins.append(len(asked))
            asked += question + gold
            marks += [False] * len(question) + [True] * len(gold)
    context = write_context(facts, tokens - 1 - len(asked), numbers)
    written = len(context.ids)
    ids = np.concatenate([[BOS], context.ids, np.array(asked, dtype=np.int32)]).astype(np.int32)
    answers = np.concatenate([np.zeros(1 + written, dtype=bool), np.array(marks, dtype=bool)])
    starts = 1 + np.concatenate([context.starts, written + np.array(begins, dtype=np.int64)])
    reach = positions if choices.random() < jumps else tokens
    return Sequence(ids, _positions(tokens, reach, starts, choices, numbers), answers)


def _facts(choices: random.Random, room: int) -> list[Fact]:
    """Facts that fit into `room` tokens, of forms and a density that are drawn first."""
    shares = choices.choices([shares for _, shares in FORMS], [share for share, _ in FORMS])[0]
    density = 1.0 if choices.random() < FULL_SHARE else 2 ** -choices.uniform(0.3, 1 + math.log2(max(room, 128) / 64))
    wanted = max(LONGEST, int(room * density))
    source = FactSource(choices)
    facts: list[Fact] = []
    used = 0
    while used < wanted and used + LONGEST <= room:
        (form,) = choices.choices((source.single, source.several, source.chain), shares)
        facts.append(form() if form != source.chain or source.variables_left >= 4 else source.single())
        used += facts[-1].tokens
    return facts


def _asked_about(facts: list[Fact], choices: random.Random) -> list[list[Fact]]:
    """Every fact once, in any order, and now and then four of one value."""
    singles = [fact for fact in facts if fact.form == "value"]
    turns = [[fact] for fact in choices.sample(facts, len(facts))]
    if len(singles) >= 4:
        for _ in range(sum(choices.random() < 0.5 for _ in range(len(singles) // FOURS + 1))):
            turns.insert(choices.randrange(min(len(turns), 16)), choices.sample(singles, 4))
    return turns


def _positions(
    tokens: int, reach: int, starts: NDArray[np.int64], choices: random.Random, numbers: np.random.Generator
) -> Ids:
    """Positions with jumps at some of the starts of sentences, of `reach` - `tokens` at most, as often small as large."""
    steps = np.ones(tokens, dtype=np.int64)
    steps[0] = 0
    if reach > tokens:
        total = tokens * (reach / tokens) ** choices.random() - tokens
        chosen = numbers.choice(starts, min(len(starts), int(2 ** choices.uniform(0, 6))), replace=False)
        parts = numbers.exponential(size=len(chosen))
        steps[chosen] += (parts / parts.sum() * total).astype(np.int64)
    return np.cumsum(steps).astype(np.int32)
