"""Fields of the method."""

from dataclasses import dataclass

from kvseek.core.errors import require


@dataclass(frozen=True)
class Config:
    """How many rows are kept, and of how many.

    Attributes
    ----------
    top_k : int
        Rows per KV head.
    candidates : int
        Rows of the best blocks for each row that is kept.
    """

    top_k: int = 100
    candidates: int = 8

    def __post_init__(self) -> None:
        require(self.top_k >= 1, "top_k", self.top_k, ">= 1", "100 is the default")
        require(self.candidates >= 1, "candidates", self.candidates, ">= 1", "8 is the default")
