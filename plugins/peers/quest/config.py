"""Fields of the method `quest`."""

from __future__ import annotations

from dataclasses import dataclass

from kvseek.core.errors import require
from kvseek.plugins.peers.base import TopK

PAPER = {"top_k": 2048, "page": 16, "dense_layers": 2}


@dataclass(frozen=True)
class Config(TopK):
    """How many rows are kept, and how they lie together.

    Attributes
    ----------
    top_k : int
        Rows per KV head.
    page : int
        Neighbouring rows that are taken together.
    dense_layers : int
        First layers, which attend to every row.
    """

    top_k: int = 2048
    page: int = 16
    dense_layers: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.page >= 1, "page", self.page, ">= 1", "16 is the default")
        require(self.dense_layers >= 0, "dense_layers", self.dense_layers, ">= 0", "2 is the default")
