"""Fields of the method `infinigen`."""

from __future__ import annotations

from dataclasses import dataclass

from kvseek.core.errors import require
from kvseek.plugins.peers.base import DenseFirst

PAPER = {"top_k": 1024, "partial": 0.2, "dense_layers": 1}


@dataclass(frozen=True)
class Config(DenseFirst):
    """How many rows are kept, and by how much of the keys.

    Attributes
    ----------
    partial : float
        Share of the turned channels that queries, and as many that keys, are loudest in; products count these alone.
    """

    top_k: int = 1024
    partial: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.partial <= 1, "partial", self.partial, "in (0, 1]", "0.2 is the default")
