"""The tasks: what a context states, and what is asked about it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvseek.core.errors import ConfigError

from . import wide
from .facts import Fact, FactSource, Round, ask, write_context
from .vocabulary import BOS

FIRST_SEED = 10**6  # of contexts that are evaluated
ROUNDS = 8  # of a dialogue of multi_turn
LONGEST_FACT = 10  # tokens of a sentence whose value is a number
VALUE_TURNS = 5  # of eight rounds ask for one value; one for four, one for all values of a key, and one for a chain

Stated = tuple[list[Fact], list[list[Fact]]]  # facts of a context, and those that each question is about


@dataclass
class Dialogue:
    """Questions on one context, asked one after another; most dialogues have one."""

    context: list[int]
    rounds: list[Round]
    seed: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of context, questions and right answers."""
        return len(self.context) + sum(len(question) + len(gold) for _, question, gold in self.rounds)


def _scattered(tokens: int) -> int:
    """Facts that a context states, where it does not consist of them."""
    return max(8, tokens // 128)


def _single(source: FactSource, choices: random.Random, tokens: int, rounds: int) -> Stated:
    facts = [source.single()]
    return facts, [facts]


def _multikey(source: FactSource, choices: random.Random, tokens: int, rounds: int) -> Stated:
    facts = [source.single() for _ in range(_scattered(tokens))]
    return facts, [choices.sample(facts, 1)]


def _dense(source: FactSource, choices: random.Random, tokens: int, rounds: int) -> Stated:
    """As many facts as fit beside the longest question and answer; the last few tokens are filler."""
    facts = [source.single()]
    left = tokens - 1 - _length(ask(facts)) - 2 - facts[0].tokens  # 2: an answer may be a number of five digits
    while left >= LONGEST_FACT:
        facts.append(source.single())
        left -= facts[-1].tokens
    return facts, [choices.sample(facts, 1)]


def _multivalue(source: FactSource, choices: random.Random, tokens: int, rounds: int) -> Stated:
    several = [source.several() for _ in range(max(1, tokens // 2048))]
    others = [source.single() for _ in range(_scattered(tokens) // 2)]
    return several + others, [choices.sample(several, 1)]


def _multiquery(source: FactSource, choices: random.Random, tokens: int, rounds: int) -> Stated:
    facts = [source.single() for _ in range(_scattered(tokens))]
    return facts, [choices.sample(facts, 4)]


def _variables(source: FactSource, choices: random.Random, tokens: int, rounds: int) -> Stated:
    chains = [source.chain() for _ in range(max(4, min(96, tokens // 256)))]
    return chains, [choices.sample(chains, 1)]


def _dialogue(source: FactSource, choices: random.Random, tokens: int, rounds: int) -> Stated:
    """Facts of all forms; each eight questions ask for all kinds, in any order, and for no fact of one value twice."""
    mixtures = -(-rounds // ROUNDS)
    wanted = mixtures * (VALUE_TURNS + 4)
    singles = [source.single() for _ in range(max(12, _scattered(tokens), wanted))]
    several = [source.several() for _ in range(max(2, tokens // 4096))]
    chains = [source.chain() for _ in range(max(2, min(48, tokens // 1024)))]
    chosen = choices.sample(singles, wanted)
    turns: list[list[Fact]] = []
    for _ in range(mixtures):
        mixture = [[chosen.pop()] for _ in range(VALUE_TURNS)]
        mixture += [[chosen.pop() for _ in range(4)], [choices.choice(several)], [choices.choice(chains)]]
        turns += choices.sample(mixture, ROUNDS)
    return singles + several + chains, turns[:rounds]


def _extract(source: FactSource, choices: random.Random, tokens: int, rounds: int) -> Stated:
    facts = [wide.records(source, choices, max(4, min(wide.MOST_RECORDS, tokens // 128)))]
    return facts, [facts]


def _copy(source: FactSource, choices: random.Random, tokens: int, rounds: int) -> Stated:
    facts = [wide.passage(source, choices, min(wide.LONGEST_PASSAGE, tokens // 5))]
    return facts, [facts]


def _count(source: FactSource, choices: random.Random, tokens: int, rounds: int) -> Stated:
    most = max(4, min(wide.MOST_COUNTED, tokens // 256))
    facts = [wide.count(source, choices, choices.randint(3, most)) for _ in range(3)]
    return facts, [choices.sample(facts, 1)]


def _compare(source: FactSource, choices: random.Random, tokens: int, rounds: int) -> Stated:
    facts = [wide.lists(source, choices, wide.LONGEST_LIST, choices.randint(4, 12), distant=True)]
    return facts, [facts]


def _long_chain(source: FactSource, choices: random.Random, tokens: int, rounds: int) -> Stated:
    """A prompt of some 260 tokens; the answer has the others, up to 8,000."""
    prompt = 1 + 6 * wide.TABLE_WORDS + 2 + 5 + wide.LINE
    lines = max(2, min(wide.MOST_LINES, 1 + (tokens - prompt - 1) // wide.LINE))
    facts = [wide.long_chain(source, choices, wide.TABLE_WORDS, lines)]
    return facts, [facts]


TASKS: dict[str, Callable[[FactSource, random.Random, int, int], Stated]] = {
    "niah_single": _single,
    "niah_multikey": _multikey,
    "niah_multikey_dense": _dense,
    "niah_multivalue": _multivalue,
    "niah_multiquery": _multiquery,
    "variable_tracking": _variables,
    "multi_turn": _dialogue,
    "extract": _extract,
    "copy": _copy,
    "count": _count,
    "compare": _compare,
    "long_chain": _long_chain,
}
WIDE = ("extract", "copy", "count", "compare", "long_chain")  # which older models have not learnt


def make_dialogues(task: str, tokens: int, contexts: int, *, rounds: int = ROUNDS, first: int = 0) -> list[Dialogue]:
    """Dialogues on `contexts` different contexts, the same for the same arguments.

    Parameters
    ----------
    task : str
        One of TASKS.
    tokens : int
        Of context, question and right answer together, or a few less; of all rounds of a dialogue.
    rounds : int
        Questions of a dialogue of multi_turn; the others have one.
    first : int
        Number of the first context; those before it are left out.

    Raises
    ------
    ConfigError
        If the questions leave no room for the facts that they ask for.
    """
    asked = rounds if task == "multi_turn" else 1
    return [_made(task, tokens, asked, FIRST_SEED + number) for number in range(first, first + contexts)]


def _made(task: str, tokens: int, rounds: int, seed: int) -> Dialogue:
    numbers = np.random.default_rng([list(TASKS).index(task), tokens, rounds, seed])
    choices = random.Random(int(numbers.integers(1 << 60)))
    facts, asked_about = TASKS[task](FactSource(choices), choices, tokens, rounds)
    asked = [ask(about) for about in asked_about]
    room, needed = tokens - 1 - sum(map(_length, asked)), sum(fact.tokens for fact in facts)
    if room < needed:
        raise ConfigError(
            f"--lengths {tokens}: {task} with {rounds} questions a context needs {tokens - room + needed} tokens; ask in a "
            "longer context, or fewer with --rounds"
        )
    return Dialogue([BOS, *write_context(facts, room, numbers).ids.tolist()], asked, seed)


def _length(asked: Round) -> int:
    """Tokens of a question and its answer."""
    return sum(map(len, asked[1:]))
