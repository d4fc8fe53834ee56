"""Fields of the method `pqcache`."""

from __future__ import annotations

from dataclasses import dataclass

from kvseek.core.errors import require
from kvseek.plugins.peers.base import TopK

PAPER = {"top_k": 1024, "parts": 2, "bits": 6}  # its budgets are shares of a prompt, a tenth or a fifth


@dataclass(frozen=True)
class Config(TopK):
    """How many rows are kept, and how keys are quantized.

    Attributes
    ----------
    parts : int
        Parts of a key, each of which is coded by its nearest centroid; divides the head size.
    bits : int
        Of a part's code: 2^bits centroids a slot, KV head and part.
    iterations : int
        Of k-means over a prompt's keys.
    """

    top_k: int = 1024
    parts: int = 2
    bits: int = 6
    iterations: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.parts >= 1, "parts", self.parts, ">= 1", "2 is the default")
        require(1 <= self.bits <= 8, "bits", self.bits, "from 1 to 8", "6 is the default")
        require(self.iterations >= 0, "iterations", self.iterations, ">= 0", "10 is the default")
