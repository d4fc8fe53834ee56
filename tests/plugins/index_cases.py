"""Keys, queries and indexes of one layer on the CPU, for tests of what an index stores and selects."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from kvseek.core.batch import Batch, RequestState, Selection
from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.extents import ExtentTable
from kvseek.core.index_context import IndexContext
from kvseek.plugins.contract import Index
from kvseek.plugins.flat import method as flat_method
from kvseek.plugins.flat.method import FlatIndex
from kvseek.plugins.pariskv import codebook
from kvseek.plugins.pariskv.config import Config
from kvseek.plugins.pariskv.reference import ReferenceIndex

KV_HEADS = 2
# Channels and query heads a KV head, and dtype.
SHAPES = [
    (8, 2, torch.float32),
    (16, 2, torch.bfloat16),
    (20, 2, torch.bfloat16),
    (64, 3, torch.float32),
    (96, 7, torch.bfloat16),
    (128, 1, torch.float32),
    (256, 16, torch.float32),
]


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


class NativePair:
    """A method's two indexes for the CPU over the same keys [G, n, D] of slots: its reference, and its compiled kernels.

    The kernels search the reference's entries where their own may differ by rounding, and poison where nothing was written.
    tests/plugins/test_native_indexes.py takes every method's pair through what holds for all of them.
    """

    method: ClassVar[Any]  # the module
    kinds: ClassVar[tuple[type, type]]  # the reference, the compiled index
    configs: ClassVar[tuple[Any, ...]]  # with which some of a few hundred keys are selected
    few: ClassVar[int] = 1  # so many of the first of them are run at every instruction level
    steps: ClassVar[int] = 1  # queries after which an index has done everything that it does
    ascending: ClassVar[bool] = True  # the rows selected

    def __init__(self, library: CpuLibrary, config: Any, group: int, dim: int, keys: Sequence[Tensor]) -> None:
        lengths, dtype = [part.shape[1] for part in keys], keys[0].dtype
        self.expected = self.kinds[0](self.context(None, config, group, dim, lengths, dtype))
        self.found = self.kinds[1](self.context(library, config, group, dim, lengths, dtype))
        self.fill(keys)

    @classmethod
    def context(
        cls,
        library: CpuLibrary | None,
        config: Any,
        group: int,
        dim: int,
        lengths: Sequence[int],
        dtype: torch.dtype = torch.float32,
    ) -> IndexContext:
        """Slots of up to four extents, in a layer that selects, for compiled kernels or, without a library, their reference."""
        table = ExtentTable(len(lengths), 4, 4 * len(lengths))
        for slot in reversed(range(len(lengths))):
            table.reserve(slot, lengths[slot])
        books, layer = cls.method.traits(config).codebooks(dim), getattr(config, "dense_layers", 0)
        given = {"layer": layer, "library": library, "dtype": dtype, "codebooks": books}
        return context_of(config, dim, group, table, list(lengths), **given)

    def fill(self, keys: Sequence[Tensor]) -> None:
        """Poison the compiled index and give both the keys, and the same entries."""
        raise NotImplementedError

    def check_request(self, ours: Tensor, theirs: Tensor, queries: Tensor, slot: int) -> None:
        """Rows [G, k] that the two selected for queries [H, D] of a slot are the same up to rounding."""
        if self.expected.context.lengths[slot] <= self.expected.config.top_k:
            assert torch.equal(ours.sort().values, theirs.sort().values)
        else:
            self.check_choice(ours, theirs, queries, slot)

    def check_choice(self, ours: Tensor, theirs: Tensor, queries: Tensor, slot: int) -> None:
        """The same of a slot with more rows than are selected."""
        raise NotImplementedError

    def check(self, queries: Tensor, slots: Sequence[int]) -> None:
        """For queries [batch, H, D] of these slots the same rows are selected, up to rounding."""
        theirs, ours = (select_rows(index, queries, slots).rows for index in (self.expected, self.found))
        assert (ours.dtype, ours.shape) == (torch.int32, theirs.shape)
        for request, slot in enumerate(slots):
            self.check_request(ours[request], theirs[request], queries[request], slot)


def check_near(ours: list[int], theirs: list[int], value_of: Mapping[int, float]) -> None:
    """The same rows, each once, but for those whose values differ from the last one taken by rounding."""
    assert len(set(ours)) == len(ours) == len(theirs)
    last = min(value_of[row] for row in theirs)
    for row in set(ours) ^ set(theirs):  # KeyError: not a candidate
        assert value_of[row] == pytest.approx(last, rel=1e-5, abs=1e-5 * max(value_of.values()))


def check_definition(index: Any, by_hand: Callable[[Any, Tensor, int], list[int]], head_dim: int, group: int) -> None:
    """Two steps of slot 0 select the rows that `by_hand` lists for an index, the queries [g, D] of a KV head, and its number."""
    queries = random_queries(2, KV_HEADS * group, head_dim)
    rows = select_rows(index, queries, [0, 0]).rows
    assert rows.dtype == torch.int32
    for request, grouped in enumerate(queries.unflatten(1, (KV_HEADS, group))):
        assert rows[request].tolist() == [by_hand(index, query, head) for head, query in enumerate(grouped)]


def shared_with_exact(index: Callable[[Tensor], Index]) -> float:
    """Rows of the exact best 100 of 4,000 that an index of 100 rows has too, a KV head; `index` makes it over keys."""
    keys, queries = random_keys(4000, 64), random_queries(4, KV_HEADS * 2, 64)
    found, exact = (
        select_rows(one, queries, [0] * 4).rows.flatten(0, 1) for one in (index(keys), make_flat(100, keys, 2))
    )
    return sum(len(set(a) & set(b)) for a, b in zip(found.tolist(), exact.tolist(), strict=True)) / len(found)


def batch_of(index: Index, slots: Sequence[int], dense: Collection[int] = ()) -> Batch:
    """Requests of slots, some of them dense, with the index's budgets for their lengths."""
    context, states = index.context, []
    for slot in slots:
        length = context.lengths[slot]
        fields = index.budget(length).method_fields if length else ()
        states.append(RequestState(slot=slot, length=length, method_fields=fields, dense=slot in dense))
    return Batch.of(states, context.extents.device_table)


def select(index: Index, queries: Tensor, slots: Sequence[int]) -> Selection | None:
    """What an index selects for queries [batch, H, D] of these slots, none of them dense."""
    return index.select(queries, batch_of(index, slots))


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
    config = flat_method.Config(top_k=top_k)
    index = FlatIndex(make_context(config, keys.shape[2], group, [keys.shape[1]]))
    index.build(0, keys, torch.empty(0))
    return index
