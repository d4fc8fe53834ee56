"""Stages of a method's selection, at each of which rows are lost or kept; for measurements only.

A method may have `stages(index, query, slot) -> Stages` in stages.py of its folder. It looks at one query [H, D] of one slot
before `select` does. It changes nothing in the index, which must be the reference, and may be slow; it raises KernelError for
an index of another kind. bench/accuracy/stage_losses.py uses it to count at which stages rows are lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from kvseek.core.errors import KernelError
from kvseek.plugins.contract import Index
from kvseek.plugins.ranking import ScanIndex

Kind = TypeVar("Kind", bound=Index)


@dataclass(frozen=True)
class Stage:
    """One stage of a selection.

    Attributes
    ----------
    name : str
        Name that no other stage of the method has.
    kept : Tensor, bool [G, n]
        By place: whether the row could still be selected after the stage.
    ideal : bool
        Whether the stage stands for a limit, such as a budget of whole pages. Then `kept` are the rows that a perfect ranking
        would take within that limit, and the method's own ranking may select other rows. Otherwise every selected row is kept.
    """

    name: str
    kept: Tensor
    ideal: bool = False


@dataclass(frozen=True)
class Stages:
    """The stages of a selection in order, and the name of the last stage, which chooses among the rows that all others keep."""

    stages: tuple[Stage, ...]
    last: str

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all stages, the last included."""
        return (*(stage.name for stage in self.stages), self.last)

    def blame(self, missed: Tensor) -> Mapping[str, Tensor]:
        """Split missed rows, bool [G, n] by place, by the first stage that does not keep them: one bool [G, n] per stage."""
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


def candidate_stages(kind: type[ScanIndex], scan: str, index: Index, query: Tensor, slot: int) -> Stages:
    """Find the stages of a query [H, D] in an index of a kind: the candidates, stage `scan`, and the `estimate` of these."""
    found = require_index(index, kind)
    kv_heads, n = found.context.num_kv_heads, found.context.lengths[slot]
    if n <= found.config.top_k:
        kept = everything(found, slot)
    else:
        lanes = found.lanes(query.view(kv_heads, -1, query.shape[-1]))
        kept = by_place(found.candidates(lanes, slot, n), n)
    return Stages((Stage(scan, kept),), last="estimate")


def require_index(index: Index, kind: type[Kind]) -> Kind:
    """Return the index if it is of the kind whose stages are known; raises KernelError for others, such as a GPU's index."""
    if not isinstance(index, kind) or index.context.cuda is not None:
        raise KernelError(
            f"stages of {type(index).__module__}.{type(index).__name__}: must be a {kind.__name__}; "
            "measure with the reference"
        )
    return index


def stored_keys(index: Index, slot: int) -> Tensor:
    """Read the keys of a slot's retrieval region from the row pool, in the order of places: float32 [G, n, D]."""
    context = index.context
    assert context.rows is not None, "an index that has built a slot has rows"
    return context.extents.read(context.rows.pool, slot, context.lengths[slot])[:, :, 0].float()
