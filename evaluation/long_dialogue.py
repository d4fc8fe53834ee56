"""Dialogues longer than the needle folder's own: the same mixture of questions, asked for many more rounds.

A dialogue of that folder has eight rounds. Here the mixture is repeated, made from the folder's own building blocks
(Facts, ask, compose); no fact that has one value is asked for twice, and context, questions and right answers together
have the length that was asked for, as there.
"""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import numpy as np

from kvseek.core.errors import ConfigError

SINGLES, SINGLES_OF_FOUR, MIXTURE = (
    5,
    4,
    8,
)  # of eight questions: five on one fact, one on four, one on all values, a trace
SALT = 64 * 991  # keeps these dialogues apart from the folder's own of the same seed

Rounds = list[tuple[str, list[int], list[int]]]  # kind of question, its ids, ids of the right answer


def make_long_dialogue(tasks: ModuleType, length: int, seed: int, rounds: int) -> tuple[list[int], Rounds]:
    """Context ids and `rounds` questions; the same for the same length, seed and number of rounds.

    Raises
    ------
    ConfigError
        If the questions and answers leave no room for the facts that they ask for.
    """
    numbers = np.random.default_rng([length, seed, rounds, SALT])
    choices = random.Random(int(numbers.integers(1 << 60)))
    facts, questions = _facts_and_questions(tasks, choices, length, rounds)
    asked = [(kind, *tasks.ask(kind, fact)) for kind, fact in questions]
    room = length - 1 - sum(len(question) + len(gold) for _, question, gold in asked)
    needed = sum(len(statement) for fact in facts for statement in fact[3])
    if room < needed:
        raise ConfigError(
            f"--rounds = {rounds}: questions, answers and facts need {length - room + needed} tokens, more than --lengths "
            f"{length}; ask fewer rounds or in a longer context"
        )
    context, _ = tasks.compose(facts, room, numbers)
    ids = [tasks.BOS, *map(int, context)]
    return ids, [(kind, [*map(int, question)], [*map(int, gold)]) for kind, question, gold in asked]


def _facts_and_questions(
    tasks: ModuleType, choices: random.Random, length: int, rounds: int
) -> tuple[list[Any], list[tuple[str, Any]]]:
    """Facts of all kinds, at least as many as the folder's own dialogues state, and who is asked for, in order."""
    source = tasks.Facts(choices)
    mixtures = -(-rounds // MIXTURE)
    singles = [source.single() for _ in range(max(12, length // 128, mixtures * (SINGLES + SINGLES_OF_FOUR)))]
    groups = [source.multi() for _ in range(max(2, length // 4096))]
    chains = [source.chain(choices.randint(2, 4)) for _ in range(max(2, min(48, length // 1024)))]
    asked = choices.sample(singles, mixtures * (SINGLES + SINGLES_OF_FOUR))
    questions: list[tuple[str, Any]] = []
    for _ in range(mixtures):
        mixture = [("one", asked.pop()) for _ in range(SINGLES)]
        mixture.append(("four", [asked.pop() for _ in range(SINGLES_OF_FOUR)]))
        mixture += [("all", choices.choice(groups)), ("trace", choices.choice(chains))]
        choices.shuffle(mixture)
        questions += mixture
    return singles + groups + chains, questions[:rounds]
