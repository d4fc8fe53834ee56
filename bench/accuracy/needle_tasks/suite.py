"""The needle tasks as a suite: answers are compared by their token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvseek.bench.accuracy.questions import Conversation, Question, Score
from kvseek.core.config import EngineConfig
from kvseek.core.errors import ConfigError

from . import vocabulary
from .facts import score
from .tasks import make_dialogues

EXTRA_TOKENS = 8  # an answer may be so much longer than the right one


class NeedleSuite:
    """See questions.Suite.

    Parameters
    ----------
    rounds : int
        Questions of a dialogue of multi_turn.
    """

    def __init__(self, rounds: int) -> None:
        self.settings: Mapping[str, Any] = {"rounds": rounds}

    def longest(self, length: int, tasks: Sequence[str]) -> int:
        """Most tokens of prompt and answer together in contexts of this length."""
        return length + EXTRA_TOKENS * (self.settings["rounds"] if "multi_turn" in tasks else 1)

    def check(self, config: EngineConfig, name: str) -> None:
        """See Suite: the model must have the words of the tasks."""
        words = config.model.vocab_size
        if words != vocabulary.SIZE:
            remedy = "build the engine from a model that train_needle.py wrote, or leave --suite out"
            raise ConfigError(
                f"{name}: vocab_size = {words}: must be {vocabulary.SIZE}, the words of the tasks; {remedy}"
            )

    def conversations(self, task: str, length: int, count: int, first: int) -> list[Conversation]:
        """See Suite."""
        dialogues = make_dialogues(task, length, count, rounds=self.settings["rounds"], first=first)
        return [
            Conversation(dialogue.context, [question(*one) for one in dialogue.rounds], vocabulary.FULL_STOP)
            for dialogue in dialogues
        ]


def question(kind: str, ids: Sequence[int], gold: Sequence[int]) -> Question:
    """One round of a dialogue."""
    return Question(ids, len(gold) + EXTRA_TOKENS, partial(_score, kind, gold))


def _score(kind: str, gold: Sequence[int], text: str, ids: Sequence[int]) -> Score:
    return score(kind, gold, ids)
