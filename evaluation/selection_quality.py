"""How good is one selection of rows? Against the exact top k, and against an index built afresh from the same keys."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.extents import ExtentTable, extents_for
from kvseek.evaluation.selection_tap import Heard, recall_of, single_rows
from kvseek.plugins.contract import Index, LayerRows
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


def group_reduction(settings: Any) -> str:
    """How the heads of a group agree by a method's settings; softmax_mean where a method does not let them choose."""
    return str(getattr(settings, "group_reduce", "softmax_mean"))


def measure(heard: Heard, top_k: int, group_reduce: str) -> Quality:
    """Set a selection against the exact top k, by the method's group reduction; attention is averaged over the heads."""
    grouped = heard.queries.reshape(heard.keys.shape[0], -1, heard.keys.shape[2])
    exact = exact_top_k(grouped, heard.keys, top_k, group_reduce, heard.scaling)
    weights = (grouped.float() @ heard.keys.float().transpose(1, 2) * heard.scaling).softmax(dim=-1).mean(dim=1)
    selected = weights * _membership(heard.rows, weights.shape[1])
    return Quality(
        recall=recall_of(heard, top_k, group_reduce),
        mass=selected.sum(dim=1).mean().item(),
        exact_mass=weights.gather(1, exact).sum(dim=1).mean().item(),
    )


def compare_fresh(heard: Heard, index: Index, method: str, top_k: int, group_reduce: str) -> FreshQuality:
    """Set a selection of `index`, of method `method`, against that of a fresh index for the same queries."""
    fresh = dataclasses.replace(heard, rows=fresh_rows(heard, index, method))
    ours, theirs = (_membership(each.rows, heard.keys.shape[1]) for each in (heard, fresh))
    return FreshQuality(
        recall=recall_of(heard, top_k, group_reduce),
        fresh_recall=recall_of(fresh, top_k, group_reduce),
        same_rows=((ours & theirs).sum() / ours.sum()).item(),
    )


@torch.inference_mode()
def fresh_rows(heard: Heard, index: Index, method: str) -> Tensor:
    """What an index that is built from `heard.keys` in one go selects for `heard.queries`: int32 [G, entries].

    It has the settings and kernels of `index`, but extents, work space and a row pool (without values) of its own. Of the
    prompt's last queries, which Index.build asks for, it gets these instead.
    """
    kv_heads, n, dim = heard.keys.shape
    extents = ExtentTable(1, extents_for(n), extents_for(n), index.context.device)
    extents.reserve(0, n)
    context = dataclasses.replace(index.context, extents=extents, lengths=[n], shared={})
    pool = heard.keys.new_zeros((extents.capacity, kv_heads, EXTENT_TOKENS, 2, dim))
    fresh = get_method(method).create(context)
    fresh.bind(LayerRows(pool, pool.data_ptr(), pool.stride(0)))
    queries, keys = heard.queries[:, None], heard.keys
    order = fresh.arrange(0, keys, queries)
    if order is not None:
        keys = keys.gather(1, order[..., None].expand_as(keys))
    extents.write(pool[:, :, :, 0], 0, 0, keys)
    fresh.build(0, keys, queries)
    fresh.finish_build(0)
    rows = single_rows(fresh.select(heard.queries[None], [0]), n)[0]
    if order is None:
        return rows
    tokens = order.gather(1, rows.clamp(min=0).long()).int()  # its places, as places of `heard.keys`
    return torch.where(rows < 0, rows, tokens)


def _membership(rows: Tensor, n: int) -> Tensor:
    """Which of n positions are among rows [G, entries], where -1 is none: bool [G, n]."""
    found = torch.zeros(rows.shape[0], n + 1, dtype=torch.bool, device=rows.device)
    return found.scatter_(1, torch.where(rows < 0, n, rows).long(), True)[:, :n]
