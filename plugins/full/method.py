"""Dense attention behind the index contract: there is nothing to index and nothing to select."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvseek.core.batch import Batch
from kvseek.plugins.contract import Budget, Index, Traits


@dataclass(frozen=True)
class Config:
    """Dense attention has nothing to set."""


class FullIndex(Index):
    """An index that keeps nothing; every request attends to every row."""

    bytes_per_token = 0.0

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """See Index.build; there is nothing to index."""

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """See Index.append; there is nothing to take in."""

    def budget(self, length: int) -> Budget:
        """See Index.budget. The rows are all rows of the region."""
        return Budget(length)

    def select(self, queries: Tensor, batch: Batch) -> None:
        """See Index.select. Returns None, which stands for every row."""


def traits(config: Config) -> Traits:
    """Return the method's traits: it selects no rows, so there are none to keep."""
    return Traits(kept_steps=0, prefix_reuse="entries", rounded_rows=True, verifies_drafts=True)


create = FullIndex
