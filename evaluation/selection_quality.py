"""How good is one selection of rows? Against the exact top k, and against an index built afresh from the same keys."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.extents import ExtentTable, extents_for
from kvseek.core.index_context import LayerRows
from kvseek.evaluation.selection_tap import TappedSelection, membership
from kvseek.measurement.index_batch import batch_of
from kvseek.plugins.contract import Index
from kvseek.plugins.flat.method import exact_top_k
from kvseek.plugins.registry import get_method


@dataclass(frozen=True)
class Quality:
    """A selection against the exact top k; shares in 0..1."""

    recall: float
    mass: float  # of the retrieval region's attention, on the selected rows
    exact_mass: float  # on the exact top k


@dataclass(frozen=True)
class FreshQuality:
    """A selection against that of a fresh index; shares in 0..1."""

    recall: float
    fresh_recall: float
    same_rows: float  # of the selected rows, those that the fresh index selects too


def recall_of(tapped: TappedSelection, top_k: int) -> float:
    """Share of the exact top k that was selected, mean over the KV heads."""
    exact = exact_top_k(_grouped(tapped), tapped.keys, top_k, tapped.scaling)
    return membership(tapped.rows, tapped.keys.shape[1]).gather(1, exact).float().mean().item()


def measure(tapped: TappedSelection, top_k: int) -> Quality:
    """Set a selection against the exact top k; attention is averaged over the heads."""
    grouped = _grouped(tapped)
    exact = exact_top_k(grouped, tapped.keys, top_k, tapped.scaling)
    weights = (grouped.float() @ tapped.keys.float().transpose(1, 2) * tapped.scaling).softmax(dim=-1).mean(dim=1)
    selected = weights * membership(tapped.rows, weights.shape[1])
    return Quality(
        recall=recall_of(tapped, top_k),
        mass=selected.sum(dim=1).mean().item(),
        exact_mass=weights.gather(1, exact).sum(dim=1).mean().item(),
    )


def compare_fresh(tapped: TappedSelection, index: Index, method: str, top_k: int) -> FreshQuality:
    """Set a selection of `index`, of method `method`, against that of a fresh index for the same queries."""
    fresh = dataclasses.replace(tapped, rows=fresh_rows(tapped, index, method))
    ours, theirs = (membership(each.rows, tapped.keys.shape[1]) for each in (tapped, fresh))
    return FreshQuality(
        recall=recall_of(tapped, top_k),
        fresh_recall=recall_of(fresh, top_k),
        same_rows=((ours & theirs).sum() / ours.sum()).item(),
    )


@torch.inference_mode()
def fresh_rows(tapped: TappedSelection, index: Index, method: str) -> Tensor:
    """What an index that is built from `tapped.keys` in one go selects for `tapped.queries`: int32 [G, entries].

    It has the settings and kernels of `index`, but extents, work space and a row pool (without values) of its own. Of the
    prompt's last queries, which Index.build asks for, it gets these instead.
    """
    kv_heads, n, dim = tapped.keys.shape
    extents = ExtentTable(1, extents_for(n), extents_for(n), index.context.device)
    extents.reserve(0, n)
    pool = tapped.keys.new_zeros((extents.capacity, kv_heads, EXTENT_TOKENS, 2, dim))
    rows = LayerRows(pool, pool.data_ptr(), pool.stride(0))
    fresh = get_method(method).create(
        dataclasses.replace(index.context, extents=extents, lengths=[n], rows=rows, shared={})
    )
    work = fresh.build(0, tapped.keys, tapped.queries[:, None])
    extents.write(pool[:, :, :, 0], 0, 0, tapped.keys)
    if work is not None:
        work.wait()
    batch = batch_of(fresh)
    selection = fresh.select(tapped.queries[None], batch)
    assert selection is not None, "an index selects whenever another of the same method and layer does"
    return selection.rows[0]


def _grouped(tapped: TappedSelection) -> Tensor:
    """Queries by KV head, [G, g, D]."""
    return tapped.queries.reshape(tapped.keys.shape[0], -1, tapped.keys.shape[2])
