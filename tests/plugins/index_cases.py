"""Keys, queries and indexes of one layer on the CPU, for tests of what an index stores and selects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvseek.core.batch import Batch, RequestState
from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.extents import ExtentTable
from kvseek.core.index_context import IndexContext
from kvseek.core.selection import Selection
from kvseek.plugins.contract import Index, Traits
from kvseek.plugins.flat import config as flat_config
from kvseek.plugins.flat.method import FlatIndex
from kvseek.plugins.pariskv import codebook
from kvseek.plugins.pariskv.config import Config
from kvseek.plugins.pariskv.reference import ReferenceIndex

KV_HEADS = 2


def context_of(
    config: object, head_dim: int, group: int, extents: ExtentTable, lengths: list[int], **fields: Any
) -> IndexContext:
    """KV_HEADS KV heads of `group` query heads; float32 on the CPU, layer 0, no codebooks, unless `fields` say otherwise."""
    usual = {"layer": 0, "codebooks": {}, "dtype": torch.float32, "device": torch.device("cpu")}
    return IndexContext(
        num_heads=KV_HEADS * group,
        num_kv_heads=KV_HEADS,
        head_dim=head_dim,
        scaling=head_dim**-0.5,
        config=config,
        extents=extents,
        lengths=lengths,
        **{**usual, **fields},
    )


def make_context(config: object, head_dim: int, group: int, lengths: list[int], extents: int = 8) -> IndexContext:
    table = ExtentTable(len(lengths), extents, extents)
    for slot in range(len(lengths)):
        table.reserve(slot, lengths[slot])
    books = codebook.build_codebooks(config, head_dim) if isinstance(config, Config) else {}
    return context_of(config, head_dim, group, table, lengths, codebooks=books)


def native_context(
    traits: Callable[[Any], Traits],
    library: CpuLibrary | None,
    config: object,
    group: int,
    dim: int,
    lengths: Sequence[int],
    dtype: torch.dtype,
) -> IndexContext:
    """Slots of up to four extents, for compiled kernels or, without a library, for their reference; `traits` are the method's."""
    table = ExtentTable(len(lengths), 4, 4 * len(lengths))
    for slot in reversed(range(len(lengths))):
        table.reserve(slot, lengths[slot])
    books = traits(config).codebooks(dim)
    return context_of(config, dim, group, table, list(lengths), library=library, dtype=dtype, codebooks=books)


def check_batch_order_and_threads(index: Index) -> None:
    """Three slots, for 3 query heads of 64 channels a KV head, select the same in any order, alone, and by any threads."""
    queries, threads = torch.randn(3, 3 * KV_HEADS, 64), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = select_rows(index, queries, [0, 1, 2]).rows
        assert torch.equal(select_rows(index, queries[[2, 0, 1]], [2, 0, 1]).rows, together[[2, 0, 1]])
        torch.set_num_threads(1)
        for slot in range(3):
            assert torch.equal(select_rows(index, queries[slot : slot + 1], [slot]).rows[0], together[slot])
    finally:
        torch.set_num_threads(threads)


def select(index: Index, queries: Tensor, slots: Sequence[int]) -> Selection | None:
    """What an index selects for queries [batch, H, D] of these slots, none of them dense."""
    context = index.context
    states = []
    for slot in slots:
        length = context.lengths[slot]
        states.append(RequestState(slot=slot, length=length, numbers=index.effort(length).numbers if length else ()))
    return index.select(queries, Batch.of(states, context.extents.device_table))


def select_rows(index: Index, queries: Tensor, slots: Sequence[int]) -> Selection:
    """The same of an index that does not attend densely."""
    selection = select(index, queries, slots)
    assert selection is not None, "this index selects"
    return selection


def extend(index: Index, slot: int, keys: Tensor) -> None:
    """Keys [G, u, D] that left the window, as the engine hands them over; `lengths` does not count them yet."""
    start, count = index.context.lengths[slot], keys.shape[1]
    index.append(slot, start, keys)
    index.context.lengths[slot] += count
    index.publish(slot, start, count)


def random_keys(n: int, head_dim: int, seed: int = 0) -> Tensor:
    """Keys with a common offset and a few loud channels, as real ones have."""
    generator = torch.Generator().manual_seed(seed)
    scale = 1 + 5 * (torch.rand(KV_HEADS, 1, head_dim, generator=generator) > 0.9)
    return (torch.randn(KV_HEADS, n, head_dim, generator=generator) + 0.5) * scale


def keys_of_slots(lengths: Sequence[int], dim: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Keys [G, n, D] of slots of these lengths: of unequal norms around a common direction, as keys after RoPE are."""
    center = torch.randn(KV_HEADS, 1, dim)
    return [
        (torch.randn(KV_HEADS, n, dim) * (0.1 + 3 * torch.rand(KV_HEADS, n, 1)) + center).to(dtype) for n in lengths
    ]


def random_queries(batch: int, heads: int, head_dim: int, seed: int = 1) -> Tensor:
    return torch.randn(batch, heads, head_dim, generator=torch.Generator().manual_seed(seed))


def make_index(config: Config, head_dim: int, group: int, keys: Tensor) -> ReferenceIndex:
    index = ReferenceIndex(make_context(config, head_dim, group, [keys.shape[1]]))
    index.build(0, keys, torch.empty(0))
    return index


def make_flat(top_k: int, keys: Tensor, group: int) -> FlatIndex:
    config = flat_config.Config(top_k=top_k)
    index = FlatIndex(make_context(config, keys.shape[2], group, [keys.shape[1]]))
    index.build(0, keys, torch.empty(0))
    return index
