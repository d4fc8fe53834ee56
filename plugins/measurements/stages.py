"""What a method may tell about a selection: the stages through which a row comes to be selected, for measurements alone.

`stages(index, query, slot) -> Stages`, in stages.py of a method's folder, looks at one query [H, D] of one slot before
`select` does. It changes nothing of the index, which must be the reference, and may be slow; it raises KernelError for an
index that it does not know. evaluation/stage_losses.py counts by it where rows are lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from kvseek.core.errors import KernelError
from kvseek.plugins.contract import Index

Kind = TypeVar("Kind", bound=Index)


@dataclass(frozen=True)
class Stage:
    """One stage of a selection.

    Attributes
    ----------
    name : str
        Unique in the method.
    kept : Tensor, bool [G, n]
        By place, rows that could still be selected after the stage.
    ideal : bool
        The stage stands for a limit, such as a budget of whole pages: `kept` is what a perfect ranking would take within
        that limit. The method's own ranking may select other rows. Otherwise every selected row is kept.
    """

    name: str
    kept: Tensor
    ideal: bool = False


@dataclass(frozen=True)
class Stages:
    """The stages of a selection in order, and what to call the last one, which chooses among the rows that they all keep."""

    stages: tuple[Stage, ...]
    last: str

    @property
    def names(self) -> tuple[str, ...]:
        """All stages, the last one included."""
        return (*(stage.name for stage in self.stages), self.last)

    def blame(self, missed: Tensor) -> Mapping[str, Tensor]:
        """Split missed rows by the first stage that does not keep them: bool [G, n] by place to one such a stage."""
        found = {}
        for stage in self.stages:
            found[stage.name] = missed & ~stage.kept
            missed = missed & stage.kept
        return {**found, self.last: missed}


def by_place(places: Tensor, length: int) -> Tensor:
    """Mark places [G, m] (-1: none) of a region of `length` rows: bool [G, length]."""
    marks = torch.zeros(places.shape[0], length + 1, dtype=torch.bool, device=places.device)
    return marks.scatter_(1, torch.where(places < 0, length, places.long()), True)[:, :length]


def everything(index: Index, slot: int) -> Tensor:
    """Keep every row of a slot: bool [G, n]."""
    context = index.context
    return torch.ones(context.num_kv_heads, context.lengths[slot], dtype=torch.bool, device=context.device)


def require_index(index: Index, kind: type[Kind]) -> Kind:
    """The index as the kind whose stages are known; raises KernelError for any other, such as one on a GPU."""
    if not isinstance(index, kind):
        raise KernelError(
            f"stages of {type(index).__module__}.{type(index).__name__}: must be a {kind.__name__}; "
            "measure with the reference"
        )
    return index


def stored_keys(index: Index, slot: int) -> Tensor:
    """Keys of a slot's retrieval region by place, from the row pool: float32 [G, n, D]."""
    context = index.context
    assert context.rows is not None, "an index that has built a slot has rows"
    return context.extents.read(context.rows.pool, slot, context.lengths[slot])[:, :, 0].float()
