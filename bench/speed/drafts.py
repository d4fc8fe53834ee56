"""Drafts that are right with a probability that is given, for measurements and tests of speculation."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvseek.engine.speculation import Guesses


class GivenDrafter:
    """Drafts a known answer, of which each token is replaced by another one by chance; a Drafter of engine/speculation.py.

    Parameters
    ----------
    answer : sequence of int
        What the request answers without speculation.
    acceptance : float
        Probability that a token is left as it is.
    """

    def __init__(self, answer: Sequence[int], acceptance: float, seed: int = 0) -> None:
        chance = random.Random(seed)
        self._answer, self._seen, self.guesses = list(answer), 0, Guesses()
        self._right = [chance.random() < acceptance for _ in answer]

    def follow(self, generated: Sequence[int]) -> None:
        for place in range(self._seen, min(len(generated), len(self._answer))):
            self.guesses.count(self._right[place])
        self._seen = len(generated)

    def draft(self, most: int) -> list[int]:
        each = zip(self._answer, self._right, strict=True)
        return [token if right else token ^ 1 for token, right in list(each)[self._seen : self._seen + most]]

    def chances(self, most: int) -> list[float]:
        return self.guesses.chances(min(most, len(self._answer) - self._seen))
