"""Fields of the method `retrievalattention`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvseek.core.errors import require
from kvseek.plugins.peers.base import TopK

PAPER = {"top_k": 100, "cache.sink": 128, "cache.local": 512}


@dataclass(frozen=True)
class Config(TopK):
    """How many rows are kept, and how a graph of them is walked.

    Attributes
    ----------
    links : int
        Neighbours of a row in the graph, and nearest rows of a query of which it is made.
    beam : int
        Rows that a round of the walk looks at the neighbours of, and rows that it begins at.
    rounds : int
        Rounds of the walk.
    """

    top_k: int = 100
    links: int = 32
    beam: int = 32
    rounds: int = 6

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            require(value >= 1, field.name, value, ">= 1", f"{field.default} is the default")
