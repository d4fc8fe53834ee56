"""Fields of the method `flat`."""

from __future__ import annotations

from dataclasses import dataclass

from kvseek.core.errors import require


@dataclass(frozen=True)
class Config:
    """Number of rows that are kept.

    Attributes
    ----------
    top_k : int
        Rows per KV head.
    """

    top_k: int = 100

    def __post_init__(self) -> None:
        require(self.top_k >= 1, "top_k", self.top_k, ">= 1", "100 is the default")
