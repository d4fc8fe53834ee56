"""Slots that share extents, and several requests of one slot, in one batch: what each selects is what it selects alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.plugins.index_cases import KV_HEADS, context_of, select_rows

from kvseek.core.extents import ExtentTable
from kvseek.core.index_context import IndexContext
from kvseek.plugins.contract import Index
from kvseek.plugins.registry import get_method

from . import gpu_context


def check_shared_extents(
    method: str, config: Any, shape: tuple[str, int, int], make: Callable[[IndexContext], Index]
) -> None:
    """Of two extents that a second slot shares, and of keys of its own behind them."""
    dtype, dim, group = shape
    torch.manual_seed(dim + group)
    table, lengths = ExtentTable(5, 3, 8, gpu_context.PLACE), [3000, 2600, 2048, 0, 0]
    index = make(
        context_of(
            config,
            dim,
            group,
            table,
            lengths,
            codebooks=get_method(method).traits(config).codebooks(dim),
            dtype=getattr(torch, dtype),
            device=gpu_context.PLACE,
            cuda=gpu_context.method_kernels(method, config, dtype, dim, group),
            shares_extents=True,
        )
    )
    assert index.context.scratch_extents == 4 * 3
    keys, others = (part.to(gpu_context.PLACE) for part in gpu_context.keys_of_slots([3000, 552], dim, dtype))
    table.reserve(0, 3000)
    index.build(0, keys, keys)
    for slot, own in ((1, others), (2, others[:, :0])):  # the last slot has nothing but what it shares
        table.reserve(slot, lengths[slot], table.of_slot(0)[:2])
        index.adopt(slot, 2048)
        index.append(slot, 2048, own)
        index.publish(slot, 2048, own.shape[1])
    slots = [0, 1, 0, 2]
    queries = torch.randn(4, KV_HEADS * group, dim, device=gpu_context.PLACE).to(getattr(torch, dtype))
    together = select_rows(index, queries, slots).rows
    for request, slot in enumerate(slots):
        alone = select_rows(index, queries[[request]], [slot]).rows
        assert torch.equal(together[request], alone[0])
    own = select_rows(index, queries[[1, 1]], [0, 1]).rows
    assert not torch.equal(own[0], own[1]), "the slots have different keys"
