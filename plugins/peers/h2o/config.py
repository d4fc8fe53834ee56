"""Fields of the method `h2o`."""

from __future__ import annotations

from dataclasses import dataclass

from kvseek.core.errors import require
from kvseek.plugins.peers.base import TopK

EVICTS = True
PAPER = {"top_k": 1024, "recent_share": 0.5}  # a fifth of its prompts of 5,000 tokens, half of it for the latest rows


@dataclass(frozen=True)
class Config(TopK):
    """How many rows are kept, and how many of them for being recent.

    Attributes
    ----------
    recent_share : float
        Share of the rows that are the latest ones.
    recent_queries : int
        Latest queries, whose attention to the rows that leave the window counts as these rows' past.
    """

    top_k: int = 1024
    recent_share: float = 0.5
    recent_queries: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.recent_share <= 1, "recent_share", self.recent_share, "in [0, 1]", "0.5 is the default")
        require(self.recent_queries >= 1, "recent_queries", self.recent_queries, ">= 1", "256 is the default")

    @property
    def recent(self) -> int:
        """Latest rows that are kept."""
        return int(self.recent_share * self.top_k)
