"""Facts whose questions are wide: long answers, or such as depend on many places of a context. Forms, and answers to questions:

    records   the KEY weighs D D D .   several times          question extract ? answer           the KEY weighs D D D the KEY ...
    passage   passage X = w w w ...                           question copy X ? answer X =        w w w ...
    count     pick X = W .   the KEY met W .   n times        question count X ? answer X =       W is D D .
    lists     list X = w w w .   list Y = w w w .             question compare X Y ? answer X =   w both w only w both ...
    chain     table u first v u second w ... .                question grow N ? answer from ...   from L u first v to M v from ...

A count's answer begins with the word that was counted and a comparison's with a word of the list, so that decode steps have to
look for the rest, and not the prompt's reading, which is dense. A long chain is a tree: line n names line n / 2 and repeats its
word u, and the table leads from u to the line's own word v, by `first` where n is even and by `second` where it is odd. So it
depends on a line half the answer before, and on the table.
"""

from __future__ import annotations

import random

from kvseek.bench.accuracy.needle_tasks.facts import ANSWER, EQUALS, IS, THE, Fact, FactSource
from kvseek.bench.accuracy.needle_tasks.vocabulary import (
    ADJECTIVES,
    DIGITS,
    FILLER,
    FULL_STOP,
    ORDINALS,
    VALUE_WORDS,
    encode,
)

MOST_RECORDS, LONGEST_PASSAGE, MOST_COUNTED, LONGEST_LIST = 64, 1000, 30, 24
TABLE_WORDS = 40  # of the table of a long chain, which then has 242 tokens
MOST_LINES = 1000
LINE = 8  # tokens
WORDS = range(ADJECTIVES.start, VALUE_WORDS.stop)  # of passages and lists

WEIGHS, PASSAGE, PICK, MET, LIST, TABLE, FROM, TO, BOTH, ONLY = (
    encode(word) for word in ("weighs", "passage", "pick", "met", "list", "table", "from", "to", "both", "only")
)


def records(source: FactSource, choices: random.Random, count: int) -> Fact:
    """Objects and their weights, all of which are asked for in the order of the context."""
    stated = [[*THE, *source.key(), *WEIGHS, *choices.choices(DIGITS, k=3)] for _ in range(count)]
    gold = [number for record in stated for number in record]
    asked = ("records", [*encode("question extract"), *ANSWER], [*gold, FULL_STOP])
    return Fact("records", [], [], [[*record, FULL_STOP] for record in stated], asked)


def passage(source: FactSource, choices: random.Random, tokens: int) -> Fact:
    """A passage without full stops to be repeated; no two neighbours stand together twice, so two words tell the next."""
    words: list[int] = []
    while len(words) < tokens:
        word = choices.choice(WORDS)
        if not words or source.new_pair(words[-1], word):
            words.append(word)
    name = source.variable()
    asked = ("passage", [*encode("question copy"), name, *ANSWER, name, *EQUALS], [*words, FULL_STOP])
    return Fact("passage", [name], [words], [[*PASSAGE, name, *EQUALS, *words, FULL_STOP]], asked)


def count(source: FactSource, choices: random.Random, times: int) -> Fact:
    """How often a word was met, which a variable stands for."""
    name, word = source.variable(), source.word(VALUE_WORDS)
    met = [[*THE, *source.key(), *MET, word, FULL_STOP] for _ in range(times)]
    met.insert(choices.randint(0, times), [*PICK, name, *EQUALS, word, FULL_STOP])
    figures = [DIGITS[times // 10], DIGITS[times % 10]]
    asked = (
        "count",
        [*encode("question count"), name, *ANSWER, name, *EQUALS],
        [word, *IS, *figures, FULL_STOP],
    )
    return Fact("count", [name], [[word]], met, asked)


def lists(source: FactSource, choices: random.Random, length: int, changed: int, *, distant: bool = False) -> Fact:
    """Two lists of `length` words, each with `changed` that the other lacks; asked of each word of the first: has the second it?

    `distant`: one stands near the context's beginning and one near its end.
    """
    words = [source.word(WORDS) for _ in range(length + changed)]
    first = choices.sample(words[:length], length)
    second = choices.sample(words[changed:], length)
    names = [source.variable(), source.variable()]
    stated = [[*LIST, name, *EQUALS, *own, FULL_STOP] for name, own in zip(names, (first, second), strict=True)]
    gold = [number for word in first for number in (word, *(BOTH if word in second else ONLY))]
    question = [*encode("question compare"), *names, *ANSWER, names[0], *EQUALS]
    asked = ("lists", question, [*gold, FULL_STOP])
    return Fact("lists", names, [first, second], stated, asked, (0.05, 0.95) if distant else None)


def long_chain(source: FactSource, choices: random.Random, words: int, lines: int) -> Fact:
    """A table of `words` words, and `lines` lines that follow it, the first of which is in the question."""
    listed = [source.word(VALUE_WORDS) for _ in range(words)]
    leads: dict[tuple[int, int], int] = {}
    for ordinal in ORDINALS[:2]:
        leads |= {(word, ordinal): to for word, to in zip(listed, choices.sample(listed, words), strict=True)}
    entries = choices.sample(list(leads.items()), 2 * words)
    table = [number for (word, ordinal), to in entries for number in (word, ordinal, to)]
    values = [choices.choice(listed)]
    written: list[int] = []
    for line in range(1, lines + 1):
        ordinal, before = ORDINALS[line % 2], values[line // 2]
        values.append(leads[before, ordinal])
        written += [*FROM, FILLER[line // 2], before, ordinal, values[-1], *TO, FILLER[line], values[-1]]
    question = [*encode("question grow"), FILLER[lines], *ANSWER, *written[:LINE]]
    return Fact(
        "long_chain", [], [], [[*TABLE, *table, FULL_STOP]], ("long_chain", question, [*written[LINE:], FULL_STOP])
    )
