"""Tasks in English, after RULER's (Hsieh et al. 2024, arXiv 2404.06654), and wide ones, for any model with its own tokenizer.

Texts and questions are this file's own; how answers are scored is RULER's: an answer has all references (`found`), or one. A
prompt and its longest answer have exactly as many tokens as asked for: the rest is haystack text.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cache, lru_cache, partial
from itertools import product
from typing import Any

from kvseek.bench.accuracy.haystack import Haystack
from kvseek.bench.accuracy.questions import Conversation, Question, Score
from kvseek.core.config import EngineConfig
from kvseek.core.errors import ConfigError
from kvseek.engine.tokenizer import Tokenizer


def words_of(text: str) -> list[str]:
    """The words of a list that stands in the code as text."""
    return text.split()


ADJECTIVES = words_of(
    """
amber ancient bitter bright broken calm clever crooked distant dusty eager faded gentle golden hollow icy
ivory jolly lonely lucky mellow modest narrow noble orange patient polite proud quiet rapid rusty scarlet
secret silent silver sleepy smooth solemn sturdy tender timid velvet violet wooden
"""
)
NOUNS = words_of(
    """
anchor anvil barrel basket beacon blanket bottle bridge bucket button candle canvas carpet castle chimney
compass curtain drum engine feather fiddle garden hammer harbour helmet island jacket kettle ladder lantern
marble mirror needle orchard paddle pebble pillow pocket quarry ribbon saddle shovel spindle statue temple
thimble trumpet tunnel valley wagon whistle window
"""
)
FIRST_NAMES = words_of(
    """
Ada Agnes Albert Alma Anton Astrid Bruno Carl Clara Dora Edgar Edith Elias Emil Erik Esther Felix Flora Frida
Georg Greta Hanna Hugo Ida Ingrid Ivan Jonas Karin Klara Lars Lena Linus Magda Marta Max Nina Olaf Oskar Paula
Rosa Simon Sofia Tilda Ulrik Vera Viktor Walter Wilma
"""
)
LAST_NAMES = words_of(
    """
Abel Ahlgren Barlow Becker Blom Borg Brandt Calder Dahl Eklund Falk Fisher Forsberg Gibbs Grant Haas Hansen
Hale Holm Iversen Jansen Keller Kemp Lang Larsen Lind Marlow Meyer Moss Nash Nyberg Olsen Palmer Pike Quist
Reed Rhodes Sand Shaw Sorensen Stein Tanner Thorne Vance Voss Wagner Webb Winter
"""
)
TOWNS = words_of(
    """
Aarhus Antwerp Basel Bergen Bordeaux Bremen Cadiz Cardiff Dresden Dublin Florence Galway Geneva Ghent Glasgow
Granada Graz Hamburg Krakow Leeds Leipzig Lisbon Lucerne Lyon Malmo Marseille Munich Naples Nantes Odense
Oporto Palermo Prague Riga Rouen Seville Tallinn Trieste Turin Utrecht Valencia Verona Vienna Vilnius York
Zagreb
"""
)
TRADES = words_of(
    """
baker barber bookbinder brewer butcher carpenter clockmaker cook dentist florist gardener glazier goldsmith
grocer innkeeper joiner locksmith mason miller nurse optician painter pharmacist plumber potter printer sailor
tailor teacher weaver
"""
)
SYLLABLES = ["".join(pair) for pair in product("bdfgklmnprstvz", "aeiou")]

SLACK = 32  # tokens that an answer may have beyond 1.5 times those of the right one
KEYS = 4  # of niah_multikey and niah_multiquery, and values of niah_multivalue
HOPS = 4  # of variable_tracking
COMMON, FREQUENT = 10, 3  # words that are asked for
LISTED, CHANGED = 24, 4  # words of a list of `compare`, and those that the other list lacks
MARK = "kvseekmark"  # what no chat template changes
Scorer = Callable[[str], Score]


@dataclass
class Asked:
    """What one context states and what is asked about it.

    Attributes
    ----------
    question, begun : str
        The question, and how its answer begins.
    answer : str
        What a right answer goes on with.
    score : callable
        Score of an answer's text.
    inserted : list of (float, str)
        Sentences with their depths in the haystack, 0 to 1.
    items : list of str
        What stands behind the haystack.
    """

    question: str
    begun: str
    answer: str
    score: Scorer
    inserted: list[tuple[float, str]] = field(default_factory=list)
    items: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Source:
    """What a task is made of.

    Attributes
    ----------
    choices : random.Random
        Seeded by task, length and context.
    size : int
        Items to state, or, of tasks in a haystack, tokens of the context.
    number : int
        Of the context.
    depths : int
        Places of the needle of niah_single, one after another by `number`.
    passage : callable
        Haystack text of so many tokens.
    """

    choices: random.Random
    size: int
    number: int
    depths: int
    passage: Callable[[int], str]

    def names(self, count: int) -> list[str]:
        """Different names of two words."""
        pairs = self.choices.sample(range(len(ADJECTIVES) * len(NOUNS)), count)
        return [f"{ADJECTIVES[pair // len(NOUNS)]} {NOUNS[pair % len(NOUNS)]}" for pair in pairs]

    def figures(self, count: int, digits: int) -> list[str]:
        """Different numbers of so many digits."""
        return [str(one) for one in self.choices.sample(range(10 ** (digits - 1), 10**digits), count)]

    def scattered(self, sentences: Sequence[str]) -> list[tuple[float, str]]:
        """The sentences in their order, at random depths."""
        return list(zip(sorted(self.choices.random() for _ in sentences), sentences, strict=True))


def found(references: Sequence[str], text: str) -> Score:
    """The share of the references that occur in an answer, whatever their case: RULER's string_match_all."""
    part = sum(one.lower() in text.lower() for one in references) / len(references)
    return Score(part == 1, part)


def same_number(number: int, text: str) -> Score:
    """Whether the first number of an answer is the right one."""
    given = re.search(r"\d+", text)
    right = given is not None and int(given[0]) == number
    return Score(right, float(right))


def same_words(passage: str, text: str) -> Score:
    """The share of a passage's words that an answer repeats in their order."""
    words, given = passage.split(), text.split()
    blocks = SequenceMatcher(None, words, given, autojunk=False).get_matching_blocks()
    return Score(given[: len(words)] == words, sum(block.size for block in blocks) / len(words))


def same_records(records: Mapping[str, str], text: str) -> Score:
    """The share of the records that an answer has right; a wrong or unfinished JSON object has those before its fault too."""
    given = dict(re.findall(r'"([^"]+)"\s*:\s*"?(\d+)', "{" + text))
    part = sum(given.get(name) == value for name, value in records.items()) / len(records)
    return Score(given == records and "}" in text, part)


def same_set(right: Sequence[str], words: Sequence[str], text: str) -> Score:
    """The words that an answer names among `words`: those named rightly over those named or right (Jaccard's index)."""
    named = set(re.findall(r"[a-z]+", text.lower())) & set(words)
    part = len(named & set(right)) / len(named | set(right))
    return Score(part == 1, part)


def fact(name: str, number: str) -> str:
    """A needle."""
    return f"The secret number of the {name} is {number}."


def about(names: Sequence[str], numbers: Sequence[str], what: str = "number") -> Asked:
    """The question about the numbers of names; without the facts."""
    listed = ", ".join(f"the {name}" for name in names)
    verb = f"{what} of {listed} {'is' if what == 'number' else 'are'}"
    answer = " " + ", ".join(numbers) + "."
    return Asked(f"What is the secret {what} of {listed}?", f"The secret {verb}", answer, partial(found, numbers))


def niah_single(source: Source) -> Asked:
    """One needle, at one of `depths` depths."""
    (name,), (number,) = source.names(1), source.figures(1, 7)
    depth = source.number % source.depths / max(1, source.depths - 1)
    asked = about([name], [number])
    asked.inserted = [(depth, fact(name, number))]
    return asked


def niah_multikey(source: Source) -> Asked:
    """Needles of several keys, one of which is asked for."""
    names, numbers = source.names(KEYS), source.figures(KEYS, 7)
    asked = about(names[:1], numbers[:1])
    stated = list(map(fact, names, numbers))
    asked.inserted = source.scattered(source.choices.sample(stated, KEYS))
    return asked


def niah_multikey_dense(source: Source) -> Asked:
    """A context of nothing but needles."""
    count = min(source.size, len(ADJECTIVES) * len(NOUNS))
    names, numbers = source.names(count), source.figures(count, 7)
    place = source.choices.randrange(count)
    asked = about([names[place]], [numbers[place]])
    asked.items = [f" {fact(name, number)}" for name, number in zip(names, numbers, strict=True)]
    return asked


def niah_multivalue(source: Source) -> Asked:
    """Several needles of one key."""
    (name,), numbers = source.names(1), source.figures(KEYS, 7)
    asked = about([name], numbers, "numbers")
    asked.question = f"What are all {KEYS} secret numbers of the {name}?"
    asked.inserted = source.scattered([fact(name, number) for number in numbers])
    return asked


def niah_multiquery(source: Source) -> Asked:
    """Needles of several keys, all of which are asked for."""
    names, numbers = source.names(KEYS), source.figures(KEYS, 7)
    asked = about(names, numbers, "numbers")
    asked.question = asked.question.replace("What is the secret numbers", "What are the secret numbers")
    asked.inserted = source.scattered(source.choices.sample(list(map(fact, names, numbers)), KEYS))
    return asked


def variable_tracking(source: Source) -> Asked:
    """A chain of assignments; all variables that have its value are asked for."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    names = ["".join(source.choices.choices(letters, k=5)) for _ in range(HOPS + 1)]
    (number,) = source.figures(1, 5)
    values = [number, *(f"VAR {name}" for name in names)]
    lines = [f"VAR {name} = {value}." for name, value in zip(names, values, strict=False)]
    return Asked(
        f"Which variables have the value {number}, by themselves or by way of others? There are {len(names)}.",
        f"The variables with the value {number} are",
        " " + ", ".join(names) + ".",
        partial(found, names),
        source.scattered(lines),
    )


@cache
def made_up_words() -> list[str]:
    """Words of three syllables, which no text has, in a random order."""
    words = ["".join(parts) for parts in product(SYLLABLES, repeat=3)]
    return random.Random(0).sample(words, len(words))


def common_words(source: Source) -> Asked:
    """A list of words, of which some come ten times as often as all others."""
    rare = max(3, -(-source.size // 4096))  # times that a rare word comes: a vocabulary is limited
    others = max(0, source.size - 10 * rare * COMMON) // rare
    pool = [f"{adjective}{noun}" for adjective in ADJECTIVES for noun in NOUNS]
    words = source.choices.sample(NOUNS, COMMON)
    listed = words * 10 * rare + source.choices.sample(pool + made_up_words(), others) * rare
    source.choices.shuffle(listed)
    return Asked(
        f"What are the {COMMON} words that come most often in the list?",
        f"The {COMMON} words that come most often are",
        " " + ", ".join(words) + ".",
        partial(found, words),
        items=[f" {word}," for word in listed],
    )


def frequent_words(source: Source) -> Asked:
    """Made-up words, the n-th in proportion to 1 / n²; the most frequent ones are asked for."""
    words = source.choices.sample(made_up_words(), 50)
    shares = [1 / (rank * rank) for rank in range(1, len(words) + 1)]
    listed = [word for word, share in zip(words, shares, strict=True) for _ in range(int(source.size * share / 1.63))]
    source.choices.shuffle(listed)
    asked = words[:FREQUENT]
    return Asked(
        f"What are the {FREQUENT} most frequent words of the coded text?",
        f"The {FREQUENT} most frequent words are",
        " " + ", ".join(asked) + ".",
        partial(found, asked),
        items=[f" {word}" for word in listed],
    )


@dataclass(frozen=True)
class Person:
    """Whom a passage is about."""

    name: str
    born: str
    works: str
    trade: str


def people(source: Source) -> tuple[list[Person], list[str]]:
    """Persons, and a passage about each, which names the next one as a friend."""
    count = min(source.size, len(FIRST_NAMES) * len(LAST_NAMES))
    names = [f"{first} {last}" for first, last in source.choices.sample(list(product(FIRST_NAMES, LAST_NAMES)), count)]
    found = []
    for name in names:
        born, works = source.choices.sample(TOWNS, 2)
        found.append(Person(name, born, works, source.choices.choice(TRADES)))
    passages = [
        f" {one.name} was born in {one.born} in {source.choices.randint(1900, 1999)} and works as a {one.trade} in {one.works}. "
        f"The best friend of {one.name} is {other.name}."
        for one, other in zip(found, found[1:] + found[:1], strict=True)
    ]
    return found, passages


def qa_single(source: Source) -> Asked:
    """Where one of many persons works."""
    persons, passages = people(source)
    one = source.choices.choice(persons)
    source.choices.shuffle(passages)
    where, answer = f"In which town does {one.name} work?", f"{one.name} works in"
    return Asked(where, answer, f" {one.works}.", partial(found, [one.works]), items=passages)


def qa_multihop(source: Source) -> Asked:
    """Where the friend of a person works: two passages are needed."""
    persons, passages = people(source)
    place = source.choices.randrange(len(persons))
    one, friend = persons[place], persons[(place + 1) % len(persons)]
    source.choices.shuffle(passages)
    where = f"In which town does the best friend of {one.name} work?"
    answer = f"The best friend of {one.name} works in"
    return Asked(where, answer, f" {friend.works}.", partial(found, [friend.works]), items=passages)


def extract(source: Source) -> Asked:
    """Records scattered over the context, one for 128 tokens and at most 64, all of which go into one JSON object."""
    count = max(4, min(64, source.size // 128))
    records = dict(zip(source.names(count), source.figures(count, 3), strict=True))
    asked = (
        f"Write the weight of each of the {count} objects as one JSON object, in the order of the text: their names are "
        "the keys."
    )
    answer = json.dumps({name: int(value) for name, value in records.items()})[1:]
    stated = [f"The {name} weighs {value} pounds." for name, value in records.items()]
    return Asked(asked, "{", answer, partial(same_records, records), source.scattered(stated))


def copy(source: Source) -> Asked:
    """A passage of a fifth of the context, at most 1,000 tokens, is to be repeated."""
    passage = source.passage(min(1000, source.size // 5))
    marked = f"Here the marked passage begins: {passage} Here the marked passage ends."
    question = "Repeat the marked passage word for word."
    depth = source.choices.random()
    return Asked(question, "The marked passage is:", " " + passage, partial(same_words, passage), [(depth, marked)])


def count(source: Source) -> Asked:
    """How often something is said that is scattered over the context."""
    towns = source.choices.sample(TOWNS, 3)
    times = [source.choices.randint(3, max(4, min(30, source.size // 256))) for _ in towns]
    arrivals = [town for town, number in zip(towns, times, strict=True) for _ in range(number)]
    source.choices.shuffle(arrivals)
    ships = source.names(len(arrivals))
    stated = [f"The ship {ship} arrived in {town}." for ship, town in zip(ships, arrivals, strict=True)]
    return Asked(
        f"How many ships arrived in {towns[0]}?",
        f"The number of ships that arrived in {towns[0]} is",
        f" {times[0]}.",
        partial(same_number, times[0]),
        source.scattered(stated),
    )


def compare(source: Source) -> Asked:
    """Two lists, one near the beginning and one near the end: which words of the first does the second lack?"""
    words = source.choices.sample(NOUNS, LISTED + CHANGED)
    first, lacking = words[:LISTED], words[:CHANGED]
    second = words[CHANGED:]
    first, second = source.choices.sample(first, LISTED), source.choices.sample(second, LISTED)
    lists = [f"List {name}: {', '.join(one)}." for name, one in (("one", first), ("two", second))]
    return Asked(
        f"Which {CHANGED} words of list one are not in list two?",
        f"The {CHANGED} words of list one that are not in list two are",
        " " + ", ".join(lacking) + ".",
        partial(same_set, lacking, words),
        [(0.05, lists[0]), (0.95, lists[1])],
    )


WIDE = (extract, copy, count, compare)
HAYSTACK = (niah_single, niah_multikey, niah_multivalue, niah_multiquery, variable_tracking)
ITEMS = (niah_multikey_dense, common_words, frequent_words, qa_single, qa_multihop)
IN_HAYSTACK: Mapping[str, Callable[[Source], Asked]] = {one.__name__: one for one in (*HAYSTACK, *WIDE)}
OF_ITEMS: Mapping[str, Callable[[Source], Asked]] = {one.__name__: one for one in ITEMS}
TASKS = [one.__name__ for one in (*HAYSTACK, *ITEMS, *WIDE)]
INSTRUCTION = "Read the text. A question about it follows.\n\n"


class TextSuite:
    """The tasks of this file for one tokenizer; see questions.Suite.

    Parameters
    ----------
    settings : mapping
        With "chat", whether the model's chat template writes the prompts, and "depths", of niah_single.
    """

    def __init__(self, tokenizer: Tokenizer, text: str, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self._tokenizer, self._haystack = tokenizer, Haystack(text, tokenizer)
        self._inside = lru_cache(1 << 16)(tokenizer.encode_inside)

    def check(self, config: EngineConfig, name: str) -> None:
        """See Suite: any model can take part."""

    def conversations(self, task: str, length: int, count: int, first: int) -> list[Conversation]:
        """See Suite."""
        return [self._conversation(task, length, number) for number in range(first, first + count)]

    def _conversation(self, task: str, length: int, number: int) -> Conversation:
        if task in IN_HAYSTACK:
            context, question, room = self._fitted(task, length, length, number)
            if room < 0:
                raise ConfigError(f"--lengths {length}: {task} needs {length - room} tokens; ask in a longer context")
            return Conversation(context, [question])
        # The most items that fit.
        low, high = 0, length
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._fitted(task, length, middle, number)[2] >= 0
            low, high = (middle, high) if fits else (low, middle)
        least = 100 if task in ("common_words", "frequent_words") else 2
        if low < least:
            raise ConfigError(f"--lengths {length}: {task} has room for {low} items: must be >= {least}; raise it")
        context, question, _ = self._fitted(task, length, low, number)
        return Conversation(context, [question])

    def _fitted(self, task: str, length: int, size: int, number: int) -> tuple[list[int], Question, int]:
        """The context, the question, and the tokens that are left for the haystack, below 0 if it does not fit."""
        choices = random.Random(f"{task} {length} {number}")
        source = Source(choices, size, number, self.settings["depths"], partial(self._passage, choices))
        asked = {**IN_HAYSTACK, **OF_ITEMS}[task](source)
        head, tail = self._around(asked)
        gold = self._inside(asked.answer)
        answer = 3 * len(gold) // 2 + SLACK
        stated = [(depth, self._inside(f" {sentence}")) for depth, sentence in asked.inserted]
        items = [token for item in asked.items for token in self._inside(item)]
        room = length - answer - len(head) - len(tail) - len(items) - sum(len(ids) for _, ids in stated)
        question = Question(tail, answer, lambda text, _: asked.score(text), gold)
        return [*head, *self._filled(max(0, room), stated, choices), *items], question, room

    def _around(self, asked: Asked) -> tuple[list[int], list[int]]:
        """Token ids before the context and behind it."""
        question = f"\n\n{asked.question}"
        if not self.settings["chat"]:
            begin = self._tokenizer.encode("", True)  # the special tokens alone
            head, tail = [*begin, *self._inside(INSTRUCTION)], self._inside(f"{question}\n{asked.begun}")
            return head, list(tail)
        messages = [
            {"role": "user", "content": f"{INSTRUCTION}{MARK}{question}"},
            {"role": "assistant", "content": asked.begun},
        ]
        text = self._tokenizer.apply_chat_template(messages, continue_final_message=True)
        before, _, behind = text.partition(MARK)
        return self._tokenizer.encode(before, False), self._tokenizer.encode(behind, False)

    def _filled(self, room: int, stated: Sequence[tuple[float, Sequence[int]]], choices: random.Random) -> list[int]:
        """Haystack text of `room` tokens with the sentences at their depths."""
        parts = self._haystack.take(room, choices)
        placed = [(place / max(1, len(parts)), ids) for place, ids in enumerate(parts, 1)]
        # A sentence of depth 0 stands before all others, one of depth 1 behind them.
        merged = sorted([*placed, *stated], key=lambda one: one[0])
        return [token for _, ids in merged for token in ids]

    def _passage(self, choices: random.Random, tokens: int) -> str:
        ids = [token for sentence in self._haystack.take(tokens, choices) for token in sentence]
        return " ".join(self._tokenizer.decode(ids).split())
