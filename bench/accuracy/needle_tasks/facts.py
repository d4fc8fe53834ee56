"""Facts that a context states, sentences of filler words around them, and questions about them with their answers, as token ids.

Three forms of facts, KEY being an adjective and a noun, VALUE three words or five digits:

    value     the KEY is VALUE .
    values    the same with four values: four such sentences of one key
    chain     var X1 = VALUE .   var X2 = X1 .   and so on, up to four variables

Four kinds of questions; what stands after "answer" up to the right answer is part of the question:

    value     question what is the KEY ? answer the KEY is                            VALUE .
    four      question what is first the KEY second the KEY ... ? answer              first the KEY is VALUE second ... .
    values    question what are all the KEY ? answer                                  first the KEY is VALUE second ... .
    chain     question trace X3 ? answer X3 =                                         X2 = X1 = VALUE .
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvseek.bench.accuracy.needle_tasks.vocabulary import (
    ADJECTIVES,
    DIGITS,
    FILLER,
    FULL_STOP,
    NOUNS,
    ORDINALS,
    VALUE_WORDS,
    VARIABLES,
    encode,
)
from kvseek.bench.accuracy.questions import Score
from kvseek.core.errors import ConfigError

SHORTEST, LONGEST = 5, 14  # tokens of a filler sentence, the full stop counted
STRAY_SHARE = 0.02  # of the filler tokens are words that facts are made of, so that no class of words gives facts away
Ids = NDArray[np.int32]
Round = tuple[str, list[int], list[int]]  # kind of question, its ids, ids of the right answer

PIECES = {"records": 7, "lists": 2}  # tokens of what stands in an answer several times
VALUES = 4  # of a fact with several values, and keys of a question of kind "four"
DIGIT_SHARE = 0.4  # of the values that are numbers

THE, IS, VAR, EQUALS, ANSWER = (encode(word) for word in ("the", "is", "var", "=", "? answer"))


@dataclass(frozen=True)
class Fact:
    """What a context states in one or more sentences.

    Attributes
    ----------
    form : str
        "value", "values" or "chain".
    names : list of int
        The key's adjective and noun; or the chain's variables, that with the value first.
    values : list of list of int
        One value, or several in the order of their sentences.
    sentences : list of list of int
        In the order in which they stand in the context.
    asked : Round or None
        The question about a fact of wide.py.
    places : sequence of float or None
        Depths of the sentences in the context, 0 to 1; by chance if None.
    """

    form: str
    names: list[int]
    values: list[list[int]]
    sentences: list[list[int]]
    asked: Round | None = None
    places: Sequence[float] | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all sentences."""
        return sum(map(len, self.sentences))


class FactSource:
    """Makes facts of keys and variables that no other fact of this source has; raises ConfigError if all keys have been used."""

    def __init__(self, choices: random.Random) -> None:
        self._choices = choices
        self._keys: set[tuple[int, int]] = set()
        self._words: set[int] = set()
        self._pairs: set[tuple[int, int]] = set()
        self._variables = choices.sample(VARIABLES, len(VARIABLES))

    @property
    def variables_left(self) -> int:
        """Variables that no chain has yet."""
        return len(self._variables)

    def single(self) -> Fact:
        """A fact with one value."""
        return _keyed("value", self.key(), [self._value(self._numeric())])

    def several(self) -> Fact:
        """A fact with four values, all words or all numbers, that begin differently: the first token tells which is meant."""
        numeric = self._numeric()
        by_first: dict[int, list[int]] = {}
        while len(by_first) < VALUES:
            value = self._value(numeric)
            by_first.setdefault(value[0], value)
        return _keyed("values", self.key(), list(by_first.values()))

    def chain(self, length: int | None = None) -> Fact:
        """A chain of `length` variables, 2 to 4 by chance if left out."""
        names = [self.variable() for _ in range(length or self._choices.randint(2, 4))]
        value = self._value(self._numeric())
        sources = [value, *([name] for name in names)]
        sentences = [[*VAR, name, *EQUALS, *source, FULL_STOP] for name, source in zip(names, sources, strict=False)]
        return Fact("chain", names, [value], sentences)

    def variable(self) -> int:
        """A variable."""
        return self._variables.pop()

    @property
    def words_taken(self) -> int:
        """Calls of `word` so far."""
        return len(self._words)

    def word(self, among: range) -> int:
        """A word that no other call has given; at most half of those of `among` may have been."""
        if 2 * self.words_taken > len(among):
            raise ValueError(f"words_taken = {self.words_taken}: must be <= {len(among) // 2}; state less")
        while True:
            word = self._choices.choice(among)
            if word not in self._words:
                self._words.add(word)
                return word

    def new_pair(self, first: int, second: int) -> bool:
        """Note a pair of neighbours; whether it had not been noted."""
        pair = (first, second)
        new = pair not in self._pairs
        self._pairs.add(pair)
        return new

    def key(self) -> list[int]:
        """An adjective and a noun."""
        if len(self._keys) == (names := len(ADJECTIVES) * len(NOUNS)):
            raise ConfigError(
                f"--lengths: a context has more than {names:,} facts: must be <= {names:,}; give shorter ones"
            )
        while True:
            key = (self._choices.choice(ADJECTIVES), self._choices.choice(NOUNS))
            if key not in self._keys:
                self._keys.add(key)
                return list(key)

    def _numeric(self) -> bool:
        return self._choices.random() < DIGIT_SHARE

    def _value(self, numeric: bool) -> list[int]:
        return self._choices.choices(DIGITS, k=5) if numeric else self._choices.choices(VALUE_WORDS, k=3)


def _keyed(form: str, key: list[int], values: list[list[int]]) -> Fact:
    return Fact(form, key, values, [[*THE, *key, *IS, *value, FULL_STOP] for value in values])


def ask(facts: Sequence[Fact]) -> Round:
    """Kind, token ids and right answer of the question about a fact, or about the values of four."""
    if len(facts) > 1:
        question = encode("question what is")
        for ordinal, fact in zip(ORDINALS, facts, strict=True):
            question += [ordinal, *THE, *fact.names]
        return "four", question + ANSWER, _listed([(fact.names, fact.values[0]) for fact in facts])
    (fact,) = facts
    if fact.asked:
        return fact.asked
    if fact.form == "values":
        question = [*encode("question what are all the"), *fact.names, *ANSWER]
        return "values", question, _listed([(fact.names, value) for value in fact.values])
    if fact.form == "chain":
        backwards = fact.names[::-1]
        steps = [number for name in backwards[1:] for number in (name, *EQUALS)]
        question = [*encode("question trace"), backwards[0], *ANSWER, backwards[0], *EQUALS]
        return "chain", question, [*steps, *fact.values[0], FULL_STOP]
    question = [*encode("question what is the"), *fact.names, *ANSWER, *THE, *fact.names, *IS]
    return "value", question, [*fact.values[0], FULL_STOP]


def _listed(answers: Sequence[tuple[list[int], list[int]]]) -> list[int]:
    ids: list[int] = []
    for ordinal, (key, value) in zip(ORDINALS, answers, strict=True):
        ids += [ordinal, *THE, *key, *IS, *value]
    return [*ids, FULL_STOP]


def score(kind: str, gold: Sequence[int], given: Sequence[int]) -> Score:
    """Compare an answer's token ids with the right ones; what stands after the first full stop does not count.

    `exact`: every token is right; for all values of a key: every value is there, in any order. `part`: share of the tokens that
    are right at their places, or of the values, records or words of a list that are there.
    """
    gold, given = list(gold), list(given)
    if FULL_STOP in given:
        given = given[: given.index(FULL_STOP) + 1]
    if kind in ("four", "values"):
        wanted, found = _values(gold), _values(given)
        part = sum(value in found for value in wanted) / len(wanted)
        return Score(part == 1 if kind == "values" else given == gold, part)
    if kind in PIECES:
        wanted, found = (_pieces(PIECES[kind], answer) for answer in (gold, given))
        return Score(given == gold, sum(piece in found for piece in wanted) / len(wanted))
    same = sum(a == b for a, b in zip(gold, given, strict=False))
    return Score(given == gold, same / len(gold))


def _pieces(tokens: int, answer: list[int]) -> list[list[int]]:
    return [answer[start : start + tokens] for start in range(0, len(answer) - 1, tokens)]


def _values(answer: list[int]) -> list[list[int]]:
    """The values of an answer that lists them: what stands between "is" and the next ordinal or the full stop."""
    ends = [place for place, number in enumerate(answer) if number in (*ORDINALS, FULL_STOP)]
    listed = [answer[start:end] for start, end in pairwise(ends)]
    return [part[part.index(IS[0]) + 1 :] for part in listed if IS[0] in part]


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
        depths = np.sort(numbers.random(len(fact.sentences))) if fact.places is None else np.array(fact.places)
        chosen = depths * len(gaps)
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
