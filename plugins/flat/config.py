"""Fields of the method `flat`."""

from __future__ import annotations

from dataclasses import dataclass

from kvseek.core.config import require
from kvseek.plugins.shared.group import require_group_reduce


@dataclass(frozen=True)
class Config:
    """Number of rows that are kept, and the group reduction (plugins/shared/group.py) of their exact scores.

    Attributes
    ----------
    top_k : int
        Rows per KV head.
    group_reduce : str
        "mean", "max" or "softmax_mean".
    """

    top_k: int = 100
    group_reduce: str = "softmax_mean"

    def __post_init__(self) -> None:
        require(self.top_k >= 1, "top_k", self.top_k, ">= 1", "100 is the default")
        require_group_reduce(self.group_reduce)
