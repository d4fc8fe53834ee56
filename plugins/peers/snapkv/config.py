"""Fields of the method `snapkv`."""

from __future__ import annotations

from dataclasses import dataclass

from kvseek.core.errors import require
from kvseek.plugins.contract import LAST_QUERIES
from kvseek.plugins.peers.base import TopK

EVICTS = True
PAPER = {"top_k": 1024, "window": 32, "kernel": 7, "cache.local": 32}


@dataclass(frozen=True)
class Config(TopK):
    """How many rows are kept, and who chooses them.

    Attributes
    ----------
    window : int
        Last queries of a prompt, whose attention chooses its rows; at most as many as the local window has tokens.
    kernel : int
        Neighbouring rows over which the largest attention counts; odd.
    """

    top_k: int = 1024
    window: int = 32
    kernel: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        limit = f"from 1 to {LAST_QUERIES}"
        require(1 <= self.window <= LAST_QUERIES, "window", self.window, limit, "32 is the default")
        require(self.kernel >= 1 and self.kernel % 2 == 1, "kernel", self.kernel, "odd and >= 1", "7 is the default")
