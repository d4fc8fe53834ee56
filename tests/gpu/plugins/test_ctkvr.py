"""CTkvr's decode step on the GPU against a reference that follows it: recall, rerank, centroid update, host cores, graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.gpu.kernels.attention.random_cache import RandomCache
from tests.kernels.reference.codes import stores
from tests.plugins.index_cases import KV_HEADS, context_of, select_rows
from torch import Tensor

from kvseek.bench.methods import method_kernels
from kvseek.core.batch import Batch, RequestState, Selection
from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.index_context import LayerRows
from kvseek.kernels.cuda.attention.attend import DeviceAttention, LayerAttention
from kvseek.kernels.reference.codes.key_codes import leading_bits
from kvseek.kernels.reference.codes.store import CodeStore
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


pytestmark = pytest.mark.gpu

SMALL = Config(top_k=48, centroids=24, recent=64, probes=8, recall_factor=2.5, execution="cpu")
CODED = replace(SMALL, execution="codes")
# dtype, head_dim, group size
SHAPES = [
    ("bfloat16", 128, 4),
    ("float16", 64, 3),
    ("float32", 128, 1),
    ("bfloat16", 64, 8),
    ("float32", 96, 16),
    ("float16", 256, 9),
]


@pytest.mark.parametrize("config", [SMALL, CODED], ids=["exact", "codes"])
@pytest.mark.parametrize("lengths", [[1, 47, 300], [48, 49], [5003, 1025, 1024], [70_001, 3]], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_selections_and_updates_are_the_references(
    shape: tuple[str, int, int], lengths: list[int], config: Config
) -> None:
    torch.manual_seed(shape[1] + len(lengths))
    cache = make_cache(shape, lengths)
    index = make_index(shape, config, cache)
    for slot, length in enumerate(lengths):
        build(index, cache, slot, length)
    twin = Twin(index)
    for _ in range(3):
        twin.step(random_queries(index, len(lengths)), list(reversed(range(len(lengths)))))


def check_prompt(index: CudaIndex, slot: int, queries: Tensor) -> None:
    """A slot's centroids and what belongs to them are those of the prompt's queries [H, w, D]."""
    count = int(index.written[slot, 0])
    assert (index.written[slot] == count).all()
    found, last = index.reference, queries[:, queries.shape[1] - count :].double()
    means = last.mean(dim=1) if count and index.config.centred else torch.zeros_like(last[:, 0])
    torch.testing.assert_close(found.means[slot].double(), means, rtol=1e-5, atol=1e-5)
    centroids = found.centroids[slot, :, :count].double()
    expected = torch.nn.functional.normalize(last - means[:, None], dim=-1)
    assert (centroids - expected).abs().max() <= max(torch.finfo(index.context.dtype).eps, 1e-5)
    offsets = (centroids * means[:, None]).sum(dim=-1)
    torch.testing.assert_close(found.offsets[slot, :, :count].double(), offsets, rtol=0, atol=1e-4)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_each_prompt_brings_its_own_mean(shape: tuple[str, int, int], centred: bool) -> None:
    """Centroids as built, steps after them, and the next request's prompt in the same slot."""
    torch.manual_seed(8)
    cache = make_cache(shape, [900, 5000])
    index = make_index(shape, replace(SMALL, centred=centred), cache)
    twin = Twin(index)
    for sign in (1, -2):
        for slot, length in enumerate(cache.lengths):
            index.context.lengths[slot] = length
            queries = (sign * random_queries(index, 400)).transpose(0, 1)
            index.build(slot, keys_of(cache, slot, length), queries)
            check_prompt(index, slot, queries)
        for _ in range(3):
            twin.step(sign * random_queries(index, 2), [1, 0])
    assert (index.reference.means[:2].abs().amax() > 1) == centred


def test_a_region_that_grew_from_nothing_has_no_mean() -> None:
    torch.manual_seed(9)
    shape = SHAPES[0]
    cache = make_cache(shape, [400])
    index = make_index(shape, SMALL, cache)
    build(index, cache, 0, 400)
    assert (index.reference.means[0] != 0).any()
    index.context.lengths[0] = 0  # another request
    index.build(0, keys_of(cache, 0, 0), random_queries(index, 5).transpose(0, 1))
    assert (index.reference.means[0] == 0).all()
    twin = Twin(index)
    for length in (60, 64, 100, 400):
        index.context.lengths[0] = length
        twin.step(random_queries(index, 1), [0])
    assert (index.reference.offsets[0, :, :4] == 0).all()


@pytest.mark.parametrize("config", [SMALL, CODED], ids=["exact", "codes"])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_twenty_steps_with_new_places_and_a_full_ring(shape: tuple[str, int, int], config: Config) -> None:
    torch.manual_seed(2)
    cache = make_cache(shape, [2100, 700])
    index = make_index(shape, replace(config, centroids=7, probes=4), cache)
    for slot, length in enumerate(cache.lengths):
        build(index, cache, slot, length, room=600)
    twin = Twin(index)
    for _ in range(20):
        twin.step(random_queries(index, 2), [1, 0])
        for slot in range(2):
            start = index.context.lengths[slot]
            index.append(slot, start, keys_of(cache, slot, start + 30)[:, start:])
            index.context.lengths[slot] += 30
    assert index.written[:2].min() == 20 + 7, "the ring went round"


@pytest.mark.parametrize("execution", ["cpu", "codes"])
def test_long_regions_and_many_candidates(execution: str) -> None:
    """Bits of 300,000 places; candidates that shared memory does not hold; all probes taken."""
    torch.manual_seed(3)
    shape = SHAPES[1]
    cache = make_cache(shape, [300_001])
    config = Config(top_k=512, centroids=2048, recent=24_000, probes=9, recall_factor=2.5, execution=execution)
    index = make_index(shape, config, cache)
    assert index.workspace.keys is not None
    build(index, cache, 0, 300_001, room=30_000)
    index.append(0, 270_001, keys_of(cache, 0, 300_001)[:, 270_001:])
    index.context.lengths[0] = 300_001
    Twin(index).step(random_queries(index, 1), [0])
    everything = make_index(shape, replace(config, centroids=9), cache)
    build(everything, cache, 0, 300_001)
    Twin(everything).step(random_queries(everything, 1), [0])


def test_codes_rank_rows_in_host_memory() -> None:
    torch.manual_seed(4)
    shape = SHAPES[0]
    cache = make_cache(shape, [3000, 900], host_rows=True)
    index = make_index(shape, CODED, cache)
    for slot, length in enumerate(cache.lengths):
        build(index, cache, slot, length)
    Twin(index).step(random_queries(index, 2), [1, 0])


@pytest.mark.parametrize("config", [SMALL, CODED], ids=["exact", "codes"])
def test_equal_keys_are_taken_in_order(config: Config) -> None:
    shape = SHAPES[0]
    cache = make_cache(shape, [4000])
    cache.rows.copy_(torch.randn(KV_HEADS, 1, 2, shape[1], device=CUDA))
    index = make_index(shape, config, cache)
    build(index, cache, 0, 4000, room=200)
    index.append(0, 3800, keys_of(cache, 0, 4000)[:, 3800:])
    index.context.lengths[0] = 4000
    rows = select_rows(index, random_queries(index, 1), [0]).rows[0]
    assert torch.equal(rows, index.workspace.recalled[0, :, :48])


def test_codes_are_those_of_the_reference() -> None:
    """Of the prompt and of keys that follow it; channels at the border of two cells may get the other cell's code."""
    torch.manual_seed(10)
    for shape in SHAPES:
        cache = make_cache(shape, [1500, 20])
        index = make_index(shape, CODED, cache)
        for slot, length in enumerate(cache.lengths):
            build(index, cache, slot, length, room=10)
            index.append(slot, length - 10, keys_of(cache, slot, length)[:, length - 10 :])
            assert index.codes is not None
            reference = CodeStore(replace(index.context, cuda=None), index.codes.signs)
            reference.append(slot, 0, keys_of(cache, slot, length - 10))
            reference.append(slot, length - 10, keys_of(cache, slot, length)[:, length - 10 :])
            want, found = (leading_bits(store.read(slot, length), 4).int() for store in (reference, index.codes))
            assert ((want - found).abs() > 0).float().mean() <= 1e-3
            assert (want - found).abs().max() <= 1


@pytest.mark.parametrize("config", [SMALL, CODED], ids=["exact", "codes"])
def test_the_query_of_a_dense_request_becomes_no_centroid(config: Config) -> None:
    """Graphs, and requests that skip the selection: tests/gpu/plugins/test_batches.py."""
    cache = make_cache(SHAPES[0], [3000])
    index = make_index(SHAPES[0], config, cache)
    build(index, cache, 0, 3000)
    before = index.written.clone()
    index.select(random_queries(index, 1), cache.batch([RequestState(slot=0, length=3000, dense=True)]))
    assert torch.equal(index.written, before)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES[:4], SHAPES[5]], ids=str)
def test_host_cores_attend_as_the_gpu_does(shape: tuple[str, int, int], captured: bool, library: CpuLibrary) -> None:
    torch.manual_seed(7)
    lengths = [3000, 1000, 700, 5001]
    cache = make_cache(shape, lengths, host_rows=True)
    on_gpu = make_index(shape, SMALL, cache, rows=cache.rows.cuda())
    on_host = make_index(shape, SMALL, cache, library)
    for slot, length in enumerate(lengths):
        build(on_gpu, cache, slot, length)
    copy_centroids(on_gpu.reference, on_host.reference)
    on_host.written.copy_(on_gpu.written)
    on_host.prompted.copy_(on_gpu.prompted)
    on_host.listed.copy_(on_gpu.listed)
    states = [cache.request(slot, 16, 30, 50, 0, dense=slot == 2) for slot in (1, 3, 2, 0)]
    batch = cache.batch([*states, cache.padding()])
    queries = random_queries(on_gpu, 5)
    attentions = [make_attention(index, cache, queries, batch) for index in (on_gpu, on_host)]
    written = on_host.written[2].clone()

    def run() -> Tensor:
        return on_host.attend(queries, batch, on_host.select(queries, batch), attentions[1])

    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            found = run()
    for _ in range(4):
        queries.copy_(random_queries(on_gpu, 5))
        expected = on_gpu.attend(queries, batch, on_gpu.select(queries, batch), attentions[0])
        if captured:
            graph.replay()
        else:
            found = run()
        torch.cuda.synchronize()
        limit = 1e-4 if shape[0] == "float32" else 2e-2
        torch.testing.assert_close(found.float(), expected.float(), rtol=limit, atol=limit)
        assert torch.equal(on_host.written, on_gpu.written)
        first, second = (index.reference.lists[[0, 1, 3]] for index in (on_host, on_gpu))
        common = (first[..., None] == second[..., None, :]).any(dim=-1)
        assert common.float().mean() >= 0.999, "only places whose values agree to rounding differ"
        for name in ("centroids", "offsets"):  # rings of 24 are full, so that nothing is poison
            first, second = (getattr(index.reference, name)[[0, 1, 3]].float() for index in (on_host, on_gpu))
            torch.testing.assert_close(first, second, rtol=0, atol=max(1e-4, torch.finfo(queries.dtype).eps))
    assert torch.equal(on_host.written[2], written), "the query of a dense request becomes no centroid"


def make_attention(index: CudaIndex, cache: RandomCache, queries: Tensor, batch: Batch) -> LayerAttention:
    """What the engine makes of an index's first, dense launch."""
    context = index.context
    padding = cache.batch([cache.padding()])
    selection = index.select(queries[:1], padding)
    assert isinstance(selection, Selection)
    assert context.rows is not None
    kernel = DeviceAttention(
        index._kernels,
        num_heads=context.num_heads,
        kv_heads=KV_HEADS,
        head_dim=context.head_dim,
        dtype=context.dtype,
        window_rows=cache.window.shape[2],
        sink=cache.sink,
        entries=selection.rows.shape[2],
        max_batch=batch.size,
        scaling=context.scaling,
        device=CUDA,
    )
    return LayerAttention(kernel, cache.window, context.rows)
