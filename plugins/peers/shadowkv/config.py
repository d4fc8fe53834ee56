"""Fields of the method `shadowkv`."""

from __future__ import annotations

from dataclasses import dataclass

from kvseek.core.errors import require
from kvseek.plugins.peers.base import TopK

PAPER = {"top_k": 2432, "chunk": 8, "outlier_share": 0.158, "cache.local": 32}  # 2,048 rows and 48 chunks of outliers


@dataclass(frozen=True)
class Config(TopK):
    """How many rows are kept, and how they lie together.

    Attributes
    ----------
    chunk : int
        Neighbouring rows that are taken together.
    outlier_share : float
        Share of the rows that are the chunks least like their mean key, whatever the query.
    """

    top_k: int = 2432
    chunk: int = 8
    outlier_share: float = 0.158

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.chunk >= 1, "chunk", self.chunk, ">= 1", "8 is the default")
        fits = 0 <= self.outlier_share < 1
        require(fits, "outlier_share", self.outlier_share, "in [0, 1)", "0.158 is the default")

    @property
    def outliers(self) -> int:
        """Chunks of outliers."""
        return round(self.outlier_share * self.top_k / self.chunk)
