"""CTkvr's decode step on the GPU against the PyTorch reference: recall, rerank, centroid update, host cores, graphs.

Scores are sums in another order than the reference's, so places may change seats where the logarithms of their weights
agree to TOLERANCE: what is compared are the values of the places, exactly where they differ by more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpu.random_cache import RandomCache
from kvseek.builder.compile_cuda import Specialisation, cached_cubin
from kvseek.engine.cuda import CudaKernels
from kvseek.engine.kernels import CpuLibrary
from kvseek.plugins.base import DeviceSelection, IndexContext, LayerRows
from kvseek.plugins.batch import DeviceBatch, RequestState
from kvseek.plugins.common.device_attend import DeviceAttention
from kvseek.plugins.ctkvr.build import attention_values
from kvseek.plugins.ctkvr.config import Config
from kvseek.plugins.ctkvr.device import CudaIndex
from kvseek.plugins.ctkvr.reference import ReferenceIndex, normalised

pytestmark = pytest.mark.gpu

KV_HEADS = 2
TOLERANCE = 1e-4  # of log-weights: scores are below 40, their float32 sums good to 1e-6 of that
CUDA = torch.device("cuda")
SMALL = Config(top_k=48, centroids=24, recent=64, execution="uva")
# dtype, head_dim, group size
SHAPES = [
    ("bfloat16", 128, 4),
    ("float16", 64, 3),
    ("float32", 128, 1),
    ("bfloat16", 64, 8),
    ("float32", 96, 16),
    ("float16", 256, 9),
]


def make_cache(shape: tuple[str, int, int], lengths: Sequence[int], host_rows: bool = False) -> RandomCache:
    dtype, dim, _ = shape
    return RandomCache(
        lengths, kv_heads=KV_HEADS, dim=dim, dtype=getattr(torch, dtype), device=CUDA, host_rows=host_rows
    )


def make_index(
    shape: tuple[str, int, int], config: Config, cache: RandomCache, library: CpuLibrary | None = None
) -> CudaIndex:
    """An index over a cache's rows, whose work space and arrays start poisoned."""
    dtype, dim, group = shape
    major, minor = torch.cuda.get_device_capability()
    kernels = CudaKernels(cached_cubin(Specialisation(dtype, dim, group, "ctkvr"), 10 * major + minor))
    context = IndexContext(
        layer=0,
        num_heads=KV_HEADS * group,
        num_kv_heads=KV_HEADS,
        head_dim=dim,
        scaling=dim**-0.5,
        config=config,
        codebooks={},
        extents=cache.extents,
        lengths=[*cache.lengths, 0],
        dtype=getattr(torch, dtype),
        device=CUDA,
        library=library,
        cuda=kernels,
    )
    index = CudaIndex(context)
    index.bind(LayerRows(cache.rows, cache.rows.data_ptr(), cache.pool.stride(0)))
    for array in (
        index.reference.centroids,
        index.workspace.cosines,
        index.workspace.scores,
        index.workspace.statistics,
    ):
        array.fill_(float("nan"))
    index.reference.lists.fill_(1 << 30)
    index.workspace.recalled.fill_(-7)
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
    context = index.context
    return torch.randn(count, context.num_heads, context.head_dim, device=CUDA).to(context.dtype)


class Twin:
    """A reference that takes over an index's arrays before each step, so that one difference is counted once."""

    def __init__(self, index: CudaIndex, cache: RandomCache) -> None:
        self.index, self.cache = index, cache
        self.reference = ReferenceIndex(replace(index.context, cuda=None))  # shares extents and lengths
        assert index.rows is not None
        self.reference.bind(index.rows)

    def step(self, queries: Tensor, slots: Sequence[int]) -> Tensor:
        """Select for queries [batch, H, D] and compare rows, lists and centroids; returns the rows."""
        index, reference = self.index, self.reference
        reference.centroids.copy_(index.reference.centroids)
        reference.lists.copy_(index.reference.lists)
        reference.written[:] = index.written[:, 0].tolist()
        reference.listed[:] = index.listed.tolist()
        written = index.written.clone()
        selection = index.select(queries, slots)
        assert selection.counts == tuple(min(index.config.top_k, index.context.lengths[slot]) for slot in slots)
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
        keys = keys_of(self.cache, slot, index.context.lengths[slot])
        grouped = query.view(KV_HEADS, -1, 1, query.shape[-1])
        place = self.reference.written[slot] % index.ring
        for head in range(KV_HEADS):
            places = recalled[head][recalled[head] >= 0]
            values = attention_values(grouped[head], keys[head, places.long()], index.context.scaling)[0]
            check_best(values, places, rows[head], config.top_k)
            if config.update:
                check_best(values, places, index.reference.lists[slot, head, place], index.width)
        if config.update:
            centroid, want = index.reference.centroids[slot, :, place].float(), normalised(query)
            error = torch.finfo(index.context.dtype).eps
            assert (centroid - want).abs().max() <= max(error, 1e-6)


def check_best(values: Tensor, places: Tensor, chosen: Tensor, wanted: int) -> None:
    """`chosen` are the `wanted` places with the largest values, ascending, -1 behind them."""
    kept = min(wanted, places.shape[0])
    assert (chosen[kept:] == -1).all()
    assert (chosen[:kept].diff() > 0).all(), "ascending"
    found = torch.isin(places, chosen[:kept])
    assert found.sum() == kept, "all of them were recalled"
    if kept < places.shape[0]:
        assert values[~found].max() <= values[found].min() + TOLERANCE


@pytest.mark.parametrize("lengths", [[1, 47, 300], [48, 49], [5003, 1025, 1024], [70_001, 3]], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_selections_and_updates_are_the_references(shape: tuple[str, int, int], lengths: list[int]) -> None:
    torch.manual_seed(shape[1] + len(lengths))
    cache = make_cache(shape, lengths)
    index = make_index(shape, SMALL, cache)
    for slot, length in enumerate(lengths):
        build(index, cache, slot, length)
    twin = Twin(index, cache)
    for _ in range(3):
        twin.step(random_queries(index, len(lengths)), list(reversed(range(len(lengths)))))


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_twenty_steps_with_new_places_and_a_full_ring(shape: tuple[str, int, int]) -> None:
    torch.manual_seed(2)
    cache = make_cache(shape, [2100, 700])
    index = make_index(shape, replace(SMALL, centroids=7), cache)
    for slot, length in enumerate(cache.lengths):
        build(index, cache, slot, length, room=600)
    twin = Twin(index, cache)
    for _ in range(20):
        twin.step(random_queries(index, 2), [1, 0])
        for slot in range(2):
            index.context.lengths[slot] += 30
    assert index.written[:2].min() == 20 + 7, "the ring went round"


def test_long_regions_and_many_candidates() -> None:
    """Bits of 300,000 places; candidates that shared memory does not hold; all probes taken."""
    torch.manual_seed(3)
    shape = SHAPES[1]
    cache = make_cache(shape, [300_001])
    config = Config(top_k=512, centroids=2048, recent=24_000, probes=9, execution="uva")
    index = make_index(shape, config, cache)
    assert index.workspace.keys is not None
    build(index, cache, 0, 300_001, room=30_000)
    index.context.lengths[0] = 300_001
    Twin(index, cache).step(random_queries(index, 1), [0])
    everything = make_index(shape, replace(config, centroids=9), cache)
    build(everything, cache, 0, 300_001)
    Twin(everything, cache).step(random_queries(everything, 1), [0])


def test_rows_in_host_memory_are_read_where_they_lie() -> None:
    torch.manual_seed(4)
    shape = SHAPES[0]
    cache = make_cache(shape, [3000, 900], host_rows=True)
    index = make_index(shape, SMALL, cache)
    for slot, length in enumerate(cache.lengths):
        build(index, cache, slot, length)
    Twin(index, cache).step(random_queries(index, 2), [1, 0])


def test_equal_keys_are_taken_in_order() -> None:
    shape = SHAPES[0]
    cache = make_cache(shape, [4000])
    cache.rows.copy_(torch.randn(KV_HEADS, 1, 2, shape[1], device=CUDA))
    index = make_index(shape, SMALL, cache)
    build(index, cache, 0, 4000, room=200)
    index.context.lengths[0] = 4000
    rows = index.select(random_queries(index, 1), [0]).rows[0]
    assert torch.equal(rows, index.workspace.recalled[0, :, :48])


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_company_changes_nothing(shape: tuple[str, int, int]) -> None:
    torch.manual_seed(5)
    lengths = [3000, 900, 20, 12_000, 5000]
    cache = make_cache(shape, lengths)
    index = make_index(shape, replace(SMALL, update=False), cache)
    for slot, length in enumerate(lengths):
        build(index, cache, slot, length)
    queries = random_queries(index, 5)
    together = index.select(queries, list(range(5))).rows
    order = [3, 0, 4, 1, 2]
    assert torch.equal(index.select(queries[order], order).rows, together[order])
    for slot in range(5):
        assert torch.equal(index.select(queries[slot, None], [slot]).rows[0], together[slot])


def test_a_captured_selection_follows_requests_and_skips_dense_ones() -> None:
    torch.manual_seed(6)
    shape, lengths = SHAPES[0], [3000, 40_000, 12_000]
    cache = make_cache(shape, lengths)
    index = make_index(shape, SMALL, cache)
    for slot, length in enumerate(lengths):
        build(index, cache, slot, length)
    queries = random_queries(index, 4)
    states = [RequestState(0, slot, 0, 0, 0, 0, 0, n, False) for slot, n in enumerate(lengths)]
    batch = cache.batch([*states, cache.padding()])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = index.launch_select(queries, batch).rows
    twin = Twin(index, cache)
    for order in ([0, 1, 2], [2, 0, 1]):
        batch.requests.copy_(cache.batch([*(states[slot] for slot in order), cache.padding()]).requests)
        queries.copy_(random_queries(index, 4))
        saved = [array.clone() for array in (index.reference.centroids, index.reference.lists, index.written)]
        expected = twin.step(queries[:3].clone(), order)
        for array, old in zip((index.reference.centroids, index.reference.lists, index.written), saved, strict=True):
            array.copy_(old)
        rows.fill_(-9)
        graph.replay()
        assert torch.equal(rows[:3], expected)
        assert (rows[3] == -9).all(), "nothing is selected for a dense request"
    dense = [replace(state, dense=True) for state in states]
    before = index.written.clone()
    batch.requests.copy_(cache.batch([*dense, cache.padding()]).requests)
    graph.replay()
    assert torch.equal(index.written, before), "its query becomes no centroid"


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES[:4], SHAPES[5]], ids=str)
def test_host_cores_attend_as_the_gpu_does(shape: tuple[str, int, int], captured: bool, library: CpuLibrary) -> None:
    torch.manual_seed(7)
    lengths = [3000, 1000, 700, 5001]
    cache = make_cache(shape, lengths, host_rows=True)
    on_gpu = make_index(shape, SMALL, cache)
    on_host = make_index(shape, replace(SMALL, execution="cpu"), cache, library)
    for slot, length in enumerate(lengths):
        build(on_gpu, cache, slot, length)
    for name in ("centroids", "lists"):
        getattr(on_host.reference, name).copy_(getattr(on_gpu.reference, name))
    on_host.written.copy_(on_gpu.written)
    on_host.listed.copy_(on_gpu.listed)
    states = [cache.request(slot, 16, 30, 50, 0, dense=slot == 2) for slot in (1, 3, 2, 0)]
    batch = cache.batch([*states, cache.padding()])
    queries = random_queries(on_gpu, 5)
    attentions = [make_attention(index, cache, queries, batch) for index in (on_gpu, on_host)]
    written = on_host.written[2].clone()

    def run() -> Tensor:
        selection = on_host.launch_select(queries, batch)
        return on_host.launch_attend(queries, batch, cache.window, selection, attentions[1])

    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            found = run()
    for _ in range(4):
        queries.copy_(random_queries(on_gpu, 5))
        selection = on_gpu.launch_select(queries, batch)
        expected = on_gpu.launch_attend(queries, batch, cache.window, selection, attentions[0])
        if captured:
            graph.replay()
        else:
            found = run()
        torch.cuda.synchronize()
        on_host.refresh([0, 1, 3])
        limit = 1e-4 if shape[0] == "float32" else 2e-2
        assert (found.float() - expected.float()).abs().max() <= limit
        assert torch.equal(on_host.written, on_gpu.written)
        first, second = (index.reference.lists[[0, 1, 3]] for index in (on_host, on_gpu))
        common = (first[..., None] == second[..., None, :]).any(dim=-1)
        assert common.float().mean() >= 0.999, "only places whose values agree to rounding differ"
    assert torch.equal(on_host.written[2], written), "the query of a dense request becomes no centroid"


def make_attention(index: CudaIndex, cache: RandomCache, queries: Tensor, batch: DeviceBatch) -> DeviceAttention:
    """What the engine makes of an index's first, dense launch."""
    context = index.context
    padding = cache.batch([cache.padding()])
    selection = index.launch_select(queries[:1], padding)
    assert isinstance(selection, DeviceSelection)
    return DeviceAttention(
        index._kernels,
        num_heads=context.num_heads,
        kv_heads=KV_HEADS,
        head_dim=context.head_dim,
        dtype=context.dtype,
        window_rows=cache.window.shape[2],
        sink=cache.sink,
        slots=cache.window.shape[0],
        entries=selection.rows.shape[2],
        max_batch=batch.size,
        scaling=context.scaling,
        device=CUDA,
        hot_rows=False,
    )
