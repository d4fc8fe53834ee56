"""The seven tasks: what a context states, and what is asked about it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvseek.core.errors import ConfigError

from .facts import Fact, FactSource, ask, write_context
from .vocabulary import BOS

FIRST_SEED = 10**6  # of contexts that are evaluated
ROUNDS = 8  # of a dialogue of multi_turn
MOST_QUESTIONS = 64  # on one context, each alone: there are names for so many chains
LONGEST_FACT = 10  # tokens of a sentence whose value is a number
VALUE_TURNS = 5  # of eight rounds ask for one value; one for four, one for all values of a key, and one for a chain

Round = tuple[str, list[int], list[int]]  # kind of question, its ids, ids of the right answer
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


@dataclass(frozen=True)
class Asked:
    """What a task is to state and to ask: tokens of a context with all that is asked about it, and questions."""

    tokens: int
    questions: int


def _scattered(asked: Asked) -> int:
    """Facts that a context states, where it does not consist of them."""
    return max(8, asked.tokens // 128)


def _single(source: FactSource, choices: random.Random, asked: Asked) -> Stated:
    facts = [source.single() for _ in range(asked.questions)]
    return facts, [[fact] for fact in facts]


def _multikey(source: FactSource, choices: random.Random, asked: Asked) -> Stated:
    facts = [source.single() for _ in range(max(_scattered(asked), asked.questions))]
    return facts, [[fact] for fact in choices.sample(facts, asked.questions)]


def _dense(source: FactSource, choices: random.Random, asked: Asked) -> Stated:
    """As many facts as fit beside the longest question and answer; the last few tokens are filler."""
    facts = [source.single()]
    left = (
        asked.tokens - 1 - _longest([[facts[0]]]) - 2 - facts[0].tokens
    )  # 2: an answer may be a number of five digits
    while left >= LONGEST_FACT:
        facts.append(source.single())
        left -= facts[-1].tokens
    if len(facts) < asked.questions:
        raise ConfigError(f"--questions = {asked.questions}: must be <= {len(facts)}, facts of this context; ask fewer")
    return facts, [[fact] for fact in choices.sample(facts, asked.questions)]


def _multivalue(source: FactSource, choices: random.Random, asked: Asked) -> Stated:
    several = [source.several() for _ in range(max(asked.questions, asked.tokens // 2048))]
    others = [source.single() for _ in range(_scattered(asked) // 2)]
    return several + others, [[fact] for fact in choices.sample(several, asked.questions)]


def _multiquery(source: FactSource, choices: random.Random, asked: Asked) -> Stated:
    facts = [source.single() for _ in range(_scattered(asked))]
    return facts, [choices.sample(facts, 4) for _ in range(asked.questions)]


def _variables(source: FactSource, choices: random.Random, asked: Asked) -> Stated:
    chains = [source.chain() for _ in range(max(4, min(96, asked.tokens // 256), asked.questions))]
    return chains, [[chain] for chain in choices.sample(chains, asked.questions)]


def _dialogue(source: FactSource, choices: random.Random, asked: Asked) -> Stated:
    """Facts of all forms; each eight questions ask for all kinds, in any order, and for no fact of one value twice."""
    mixtures = -(-asked.questions // ROUNDS)
    wanted = mixtures * (VALUE_TURNS + 4)
    singles = [source.single() for _ in range(max(12, _scattered(asked), wanted))]
    several = [source.several() for _ in range(max(2, asked.tokens // 4096))]
    chains = [source.chain() for _ in range(max(2, min(48, asked.tokens // 1024)))]
    chosen = choices.sample(singles, wanted)
    turns: list[list[Fact]] = []
    for _ in range(mixtures):
        mixture = [[chosen.pop()] for _ in range(VALUE_TURNS)]
        mixture += [[chosen.pop() for _ in range(4)], [choices.choice(several)], [choices.choice(chains)]]
        turns += choices.sample(mixture, ROUNDS)
    return singles + several + chains, turns[: asked.questions]


TASKS: dict[str, Callable[[FactSource, random.Random, Asked], Stated]] = {
    "niah_single": _single,
    "niah_multikey": _multikey,
    "niah_multikey_dense": _dense,
    "niah_multivalue": _multivalue,
    "niah_multiquery": _multiquery,
    "variable_tracking": _variables,
    "multi_turn": _dialogue,
}


def make_dialogues(
    task: str, tokens: int, contexts: int, *, questions: int = 1, rounds: int = ROUNDS, first: int = 0
) -> list[Dialogue]:
    """Dialogues on `contexts` different contexts, the same for the same arguments.

    Parameters
    ----------
    task : str
        One of TASKS.
    tokens : int
        Of context, question and right answer together, or a few less; of all rounds of a dialogue.
    questions : int
        Asked on each context, every one in a dialogue of its own. For multi_turn 1: a dialogue of `rounds` questions.
    first : int
        Number of the first context; those before it are left out.

    Raises
    ------
    ConfigError
        If there are too many questions, or they leave no room for the facts that they ask for.
    """
    if questions > MOST_QUESTIONS:
        raise ConfigError(f"--questions = {questions}: must be <= {MOST_QUESTIONS}; raise --n instead")
    dialogues: list[Dialogue] = []
    for seed in range(FIRST_SEED + first, FIRST_SEED + first + contexts):
        dialogues += _dialogues(task, Asked(tokens, rounds if task == "multi_turn" else questions), seed)
    return dialogues


def _dialogues(task: str, asked: Asked, seed: int) -> list[Dialogue]:
    """All dialogues on one context."""
    numbers = np.random.default_rng([list(TASKS).index(task), asked.tokens, asked.questions, seed])
    choices = random.Random(int(numbers.integers(1 << 60)))
    facts, asked_about = TASKS[task](FactSource(choices), choices, asked)
    rounds = [ask(about) for about in asked_about]
    lengths = [len(question) + len(gold) for _, question, gold in rounds]
    room = asked.tokens - 1 - (sum(lengths) if task == "multi_turn" else _longest(asked_about))
    needed = sum(fact.tokens for fact in facts)
    if room < needed:
        raise ConfigError(
            f"--lengths {asked.tokens}: {task} with {asked.questions} questions a context needs "
            f"{asked.tokens - room + needed} tokens; ask in a longer context, or fewer with --questions or --rounds"
        )
    context = [BOS, *write_context(facts, room, numbers).ids.tolist()]
    groups = [rounds] if task == "multi_turn" else [[one] for one in rounds]
    return [Dialogue(context, group, seed) for group in groups]


def _longest(asked_about: Sequence[Sequence[Fact]]) -> int:
    """Tokens of the longest question and its answer."""
    return max(sum(map(len, ask(about)[1:])) for about in asked_about)
