"""Fields of the method `squeezedattention`."""

from __future__ import annotations

from dataclasses import dataclass

from kvseek.core.errors import require
from kvseek.plugins.peers.base import TopK

PAPER = {"top_k": 1024, "cluster_share": 0.05}  # its budgets are shares of a prompt, 10 % to 30 %


@dataclass(frozen=True)
class Config(TopK):
    """How many rows are kept, and in how many clusters they are.

    Attributes
    ----------
    cluster_share : float
        Clusters for each row of a prompt.
    iterations : int
        Of k-means over a prompt's keys.
    """

    top_k: int = 1024
    cluster_share: float = 0.05
    iterations: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.cluster_share <= 1, "cluster_share", self.cluster_share, "in (0, 1]", "0.05 is the default")
        require(self.iterations >= 0, "iterations", self.iterations, ">= 0", "10 is the default")
