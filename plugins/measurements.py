"""What a method says of itself for measurements, in measurements.py of its folder.

`costs(config, model, length, itemsize) -> SelectionCosts` are those of a decode step beside the matrices, over a retrieval region
of `length` tokens, for the benchmark's floor model (bench/speed/device/floors.py); `itemsize` is the bytes of a number of the row
pool. All counts are for one request, one layer and one KV head, computed from a model and not counted in a run. Layers that
attend densely cost as much as with dense attention.

`stages(index, query, slot) -> Stages` are those of a selection, at each of which rows are lost or kept; a method may do without.
It looks at one query [H, D] of one slot before `select` does. It changes nothing in the index, which must be the reference, and
may be slow; it raises KernelError for an index of another kind. bench/accuracy/stage_losses.py counts with it at which stages
rows are lost.
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


@dataclass(frozen=True)
class SelectionCosts:
    """Costs of choosing rows of a retrieval region and of attending to them.

    Attributes
    ----------
    rows : float
        Retrieval rows attended to.
    index_bytes : float
        Bytes of the index in device memory that every step reads.
    rerank_bytes : float
        Further bytes of device memory that are read to choose rows.
    reranked_keys : float
        Keys that are read from the row pool to choose rows.
    host_cores : bool
        Whether rows and reranked keys in host memory are read by host cores, not over PCIe.
    dense_layers : int
        Number of first layers that attend densely.
    upkeep_steps, upkeep_after : int
        Decode steps in which every layer does its upkeep once (`Index.refresh`), as soon as a request has done `upkeep_after`
        steps since its prompt. A benchmark times as many, after as many.
    """

    rows: float
    index_bytes: float = 0.0
    rerank_bytes: float = 0.0
    reranked_keys: float = 0.0
    host_cores: bool = False
    dense_layers: int = 0
    upkeep_steps: int = 1
    upkeep_after: int = 0


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
