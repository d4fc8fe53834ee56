"""CTkvr indexes over random caches on the GPU, and a reference that follows each of their steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from tests.gpu.kernels.attention.random_cache import RandomCache
from tests.kernels.reference.codes import stores
from tests.plugins.index_cases import KV_HEADS, context_of, select_rows
from torch import Tensor

from kvseek.bench.methods import method_kernels
from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.index_context import LayerRows
from kvseek.plugins.ctkvr.config import Config
from kvseek.plugins.ctkvr.device import CudaIndex
from kvseek.plugins.ctkvr.reference import ReferenceIndex
from kvseek.plugins.registry import get_method

TOLERANCE = 1e-4  # of log-weights: scores are below 40, their float32 sums good to 1e-6 of that
CUDA = torch.device("cuda")
COMMON = 3.0  # of the largest head: size of the part that its queries share, in their deviations
CENTROID_ARRAYS = ("centroids", "means", "offsets", "lists")  # of a ReferenceIndex


def make_cache(shape: tuple[str, int, int], lengths: Sequence[int], host_rows: bool = False) -> RandomCache:
    dtype, dim, _ = shape
    return RandomCache(
        lengths, kv_heads=KV_HEADS, dim=dim, dtype=getattr(torch, dtype), device=CUDA, host_rows=host_rows
    )


def make_index(
    shape: tuple[str, int, int],
    config: Config,
    cache: RandomCache,
    library: CpuLibrary | None = None,
    rows: Tensor | None = None,
) -> CudaIndex:
    """An index over a cache's rows, or a copy of them, whose work space and arrays start poisoned."""
    dtype, dim, group = shape
    rows = cache.rows if rows is None else rows
    context = context_of(
        config,
        dim,
        group,
        cache.extents,
        [*cache.lengths, 0],
        dtype=getattr(torch, dtype),
        device=CUDA,
        codebooks=get_method("ctkvr").traits(config).codebooks(dim),
        library=library,
        cuda=method_kernels("ctkvr", config, dtype, dim, group),
        rows=LayerRows(rows, rows.data_ptr(), rows.stride(0)),
    )
    index = CudaIndex(context)
    for array in (
        index.reference.centroids,
        index.reference.means,
        index.reference.offsets,
        index.workspace.cosines,
        index.workspace.scores,
        index.workspace.statistics,
    ):
        array.fill_(float("nan"))
    index.reference.lists.fill_(1 << 30)
    index.workspace.recalled.fill_(-7)
    if index.codes is not None:
        stores.poison(index.codes)
    return index


def keys_of(cache: RandomCache, slot: int, length: int) -> Tensor:
    """Keys [G, length, D] of a slot, on the GPU."""
    return cache.extents.read(cache.rows, slot, length)[:, :, 0].cuda().contiguous()


def build(index: CudaIndex, cache: RandomCache, slot: int, length: int, room: int = 0) -> None:
    """Index the first length - room tokens of a slot; the region can grow by `room`."""
    index.context.lengths[slot] = length - room
    queries = random_queries(index, min(length, 2048)).transpose(0, 1)
    index.build(slot, keys_of(cache, slot, length - room), queries)


def random_queries(index: CudaIndex, count: int) -> Tensor:
    """Queries [count, H, D] with a part that all of a head share, per head of another size: always the same part."""
    heads, dim = index.context.num_heads, index.context.head_dim
    fixed = torch.randn(heads, dim, generator=torch.Generator().manual_seed(heads)).to(CUDA)
    common = fixed * torch.linspace(0.5, COMMON, heads, device=CUDA)[:, None]
    return (torch.randn(count, heads, dim, device=CUDA) + common).to(index.context.dtype)


class Twin:
    """A reference that takes over an index's arrays before each step, so that one difference is counted once."""

    def __init__(self, index: CudaIndex) -> None:
        self.index = index
        self.reference = ReferenceIndex(replace(index.context, cuda=None))  # shares extents, lengths and rows
        self.reference.codes = index.codes

    def step(self, queries: Tensor, slots: Sequence[int]) -> Tensor:
        """Select for queries [batch, H, D] and compare rows, lists and centroids; returns the rows."""
        index, reference = self.index, self.reference
        copy_centroids(index.reference, reference)
        reference.written[:] = index.written[:, 0].tolist()
        reference.prompted[:] = index.prompted.tolist()
        for slot, tokens in enumerate(index.listed.tolist()):
            reference.listed[slot] = tokens
        written = index.written.clone()
        selection = select_rows(index, queries, slots)
        for request, slot in enumerate(slots):
            chosen = index.context.lengths[slot] > index.config.top_k
            written[slot] += chosen and index.config.update
            if chosen:
                self._check(queries[request], slot, selection.rows[request])
            else:
                places = torch.arange(index.context.lengths[slot], device=CUDA)
                assert (selection.rows[request][:, : len(places)] == places).all(), "all of a small region"
                assert (selection.rows[request][:, len(places) :] == -1).all()
        assert torch.equal(index.written, written)
        return selection.rows

    def _check(self, query: Tensor, slot: int, rows: Tensor) -> None:
        index, config = self.index, self.index.config
        recalled = self.reference.recall(query, slot)
        oldest = self.reference.written[slot] % index.ring
        for head, values in enumerate(self.reference.values(query, slot, recalled)):
            places = recalled[head][recalled[head] >= 0]
            check_best(values, places, rows[head], config.top_k)
            if config.update:
                check_best(values, places, index.reference.lists[slot, head, oldest], index.width)
        if config.update:
            self._check_centroid(query, slot, oldest)

    def _check_centroid(self, query: Tensor, slot: int, number: int) -> None:
        """The query's centroid, and its offset as the centroid was stored; the mean has not changed."""
        found, means = self.index.reference, self.reference.means[slot]
        want = torch.nn.functional.normalize(query.float() - means, dim=-1)
        centroid = found.centroids[slot, :, number].float()
        error = torch.finfo(self.index.context.dtype).eps
        assert (centroid - want).abs().max() <= max(error, 1e-6)
        offsets = (centroid * means).sum(dim=-1)
        torch.testing.assert_close(found.offsets[slot, :, number], offsets, rtol=0, atol=1e-4)
        assert torch.equal(found.means[slot], means)


def copy_centroids(source: ReferenceIndex, target: ReferenceIndex) -> None:
    """Give an index the centroids of another, and all that belongs to them."""
    for name in CENTROID_ARRAYS:
        getattr(target, name).copy_(getattr(source, name))


def check_best(values: Tensor, places: Tensor, chosen: Tensor, wanted: int) -> None:
    """`chosen` are the `wanted` places with the largest values, ascending, -1 behind them."""
    kept = min(wanted, places.shape[0])
    assert (chosen[kept:] == -1).all()
    assert (chosen[:kept].diff() > 0).all(), "ascending"
    found = torch.isin(places, chosen[:kept])
    assert found.sum() == kept, "all of them were recalled"
    if kept < places.shape[0]:
        assert values[~found].max() <= values[found].min() + TOLERANCE
