"""What every suite of tasks asks: conversations about a context, with the score of each answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvseek.core.config import EngineConfig


@dataclass(frozen=True)
class Score:
    """How good an answer is.

    Attributes
    ----------
    exact : bool
        All of it is right.
    part : float
        The share of it that is right, 0 to 1, as the task counts it.
    """

    exact: bool
    part: float


@dataclass(frozen=True)
class Question:
    """A question as token ids, which may begin the answer, the most tokens of the answer, and its score by text and token ids.

    Attributes
    ----------
    gold : sequence of int
        Tokens of a right answer, for training; empty if the suite has none.
    """

    ids: Sequence[int]
    max_tokens: int
    score: Callable[[str, Sequence[int]], Score]
    gold: Sequence[int] = ()


@dataclass(frozen=True)
class Conversation:
    """Questions on one context, each behind the earlier ones and their answers.

    Attributes
    ----------
    context : sequence of int
        Token ids with which the prompt begins.
    end_id : int or None
        The token that ends an answer, in place of the model's end tokens, and is part of it.
    """

    context: Sequence[int]
    questions: Sequence[Question]
    end_id: int | None = None


class Suite(Protocol):
    """Tasks for one kind of model.

    Attributes
    ----------
    settings : mapping
        What the questions depend on beside task, length and number; JSON-able.
    """

    settings: Mapping[str, Any]

    def check(self, config: EngineConfig, name: str) -> None:
        """Raise ConfigError if an engine's model cannot take part."""
        ...

    def conversations(self, task: str, length: int, count: int, first: int) -> list[Conversation]:
        """Conversations on the contexts `first` to `first + count - 1`, the same for the same arguments; raises ConfigError."""
        ...
