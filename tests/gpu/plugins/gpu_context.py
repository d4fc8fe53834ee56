"""Contexts of indexes on the GPU and of their references on the CPU; and slots of them that share extents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.plugins.index_cases import KV_HEADS, context_of, select_rows
from torch import Tensor

from kvseek.bench.methods import method_kernels
from kvseek.core.extents import ExtentTable, extents_for
from kvseek.core.index_context import IndexContext
from kvseek.plugins.contract import Index
from kvseek.plugins.registry import get_method

PLACE = torch.device("cuda")  # of the indexes that are tested; the CPU where kernels are emulated

# dtype, head_dim, group size
SHAPES = [
    ("bfloat16", 128, 4),
    ("float16", 64, 3),
    ("float32", 96, 1),
    ("bfloat16", 256, 8),
    ("float32", 128, 16),
    ("float16", 128, 7),
    ("bfloat16", 64, 2),
]


def make_context(
    method: str,
    config: Any,
    dtype: str,
    dim: int,
    group: int,
    lengths: Sequence[int],
    device: str,
    room: int = 0,
    **fields: Any,
) -> IndexContext:
    """Slots in reverse order take extents from both ends of the pool, so tables are anything but the identity."""
    place = PLACE if device == "cuda" else torch.device(device)
    extents = [extents_for(length + room) for length in lengths]
    table = ExtentTable(len(lengths), max(1, *extents), sum(extents) + 3, place)
    for slot in reversed(range(len(lengths))):
        table.reserve(slot, lengths[slot] + room)
    return context_of(
        config,
        dim,
        group,
        table,
        list(lengths),
        codebooks=get_method(method).traits(config).codebooks(dim),
        dtype=getattr(torch, dtype),
        device=place,
        cuda=method_kernels(method, config, dtype, dim, group) if device == "cuda" else None,
        **fields,
    )


def keys_of_slots(lengths: Sequence[int], dim: int, dtype: str) -> list[Tensor]:
    """Keys [G, n, D] of slots of these lengths: of unequal norms around a common direction, as after RoPE; on the CPU."""
    center = torch.randn(KV_HEADS, 1, dim)
    return [
        ((torch.randn(KV_HEADS, n, dim) + center) * (0.5 + torch.rand(KV_HEADS, n, 1))).to(getattr(torch, dtype))
        for n in lengths
    ]


def check_shared_extents(
    method: str, config: Any, shape: tuple[str, int, int], make: Callable[[IndexContext], Index]
) -> None:
    """Of two extents that a second slot shares, and of keys of its own behind them."""
    dtype, dim, group = shape
    torch.manual_seed(dim + group)
    table, lengths = ExtentTable(9, 3, 8, PLACE), [3000, 2600, 2048, *[0] * 6]
    index = make(
        context_of(
            config,
            dim,
            group,
            table,
            lengths,
            codebooks=get_method(method).traits(config).codebooks(dim),
            dtype=getattr(torch, dtype),
            device=PLACE,
            cuda=method_kernels(method, config, dtype, dim, group),
            shares_extents=True,
        )
    )
    assert index.context.scratch_extents == 8 * 3
    keys, others = (part.to(PLACE) for part in keys_of_slots([3000, 552], dim, dtype))
    table.reserve(0, 3000)
    index.build(0, keys, keys)
    for slot, own in ((1, others), (2, others[:, :0])):  # the last slot has nothing but what it shares
        table.reserve(slot, lengths[slot], table.of_slot(0)[:2])
        index.adopt(slot, 2048)
        index.append(slot, 2048, own)
        index.publish(slot, 2048, own.shape[1])
    slots = [0, 1, 2, 0, 0, 1, 0, 2]  # some are scanned together, as far as their keys are the same
    queries = torch.randn(len(slots), KV_HEADS * group, dim, device=PLACE).to(getattr(torch, dtype))
    together = select_rows(index, queries, slots).rows
    for request, slot in enumerate(slots):
        alone = select_rows(index, queries[[request]], [slot]).rows
        assert torch.equal(together[request], alone[0])
    own = select_rows(index, queries[[1, 1]], [0, 1]).rows
    assert not torch.equal(own[0], own[1]), "the slots have different keys"
