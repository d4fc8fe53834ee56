"""Fields of the method `magicpig`."""

from __future__ import annotations

from dataclasses import dataclass

from kvseek.core.errors import require
from kvseek.plugins.peers.base import DenseFirst

PAPER = {"top_k": 2048, "bits": 10, "tables": 150, "dense_layers": 1}


@dataclass(frozen=True)
class Config(DenseFirst):
    """How many rows are kept, and how they are hashed.

    Attributes
    ----------
    bits : int
        Random planes of a hash table, which a key and a query must lie on the same side of.
    tables : int
        Hash tables.
    seed : int
        Of the planes.
    """

    top_k: int = 2048
    bits: int = 10
    tables: int = 150
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.bits <= 15, "bits", self.bits, "from 1 to 15", "10 is the default")
        require(self.tables >= 1, "tables", self.tables, ">= 1", "150 is the default")
