"""ClusterKV's selection on the GPU against the reference with the same clusters: rows, cached rows, evictions, graphs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvseek.builder.compile_cuda import Specialisation, cached_cubin
from kvseek.engine.cuda import CudaKernels
from kvseek.engine.memory import ExtentTable
from kvseek.plugins.base import DeviceSelection, IndexContext, LayerRows
from kvseek.plugins.batch import DeviceBatch, RequestState, pack
from kvseek.plugins.clusterkv.config import Config
from kvseek.plugins.clusterkv.device import NEVER, CudaIndex, cuda_defines
from kvseek.plugins.clusterkv.reference import ReferenceIndex, expand, rows_taken
from kvseek.plugins.common.group import query_lanes

pytestmark = pytest.mark.gpu

KV_HEADS = 2
LAYER = 4
# dtype, head_dim, group size, group_reduce
SHAPES = [
    ("bfloat16", 128, 4, "softmax_mean"),
    ("float16", 64, 3, "softmax_mean"),
    ("float32", 96, 1, "max"),
    ("bfloat16", 256, 8, "max"),
    ("float32", 128, 16, "softmax_mean"),
    ("float16", 32, 16, "softmax_mean"),
    ("float16", 128, 7, "mean"),
    ("bfloat16", 64, 2, "mean"),
]


def load_kernels(dtype: str, dim: int, group: int, config: Config) -> CudaKernels:
    major, minor = torch.cuda.get_device_capability()
    defines = tuple(sorted(cuda_defines(config, dim, group).items()))
    return CudaKernels(cached_cubin(Specialisation(dtype, dim, group, "clusterkv", defines), 10 * major + minor))


def make_context(
    config: Config,
    dtype: str,
    dim: int,
    group: int,
    lengths: Sequence[int],
    device: str,
    room: int = 0,
    layer: int = LAYER,
) -> IndexContext:
    """Slots in reverse order take extents from both ends of the pool, so tables are anything but the identity."""
    extents = [-(-(length + room) // 1024) for length in lengths]
    table = ExtentTable(len(lengths), max(1, *extents), sum(extents) + 3, torch.device(device))
    for slot in reversed(range(len(lengths))):
        table.reserve(slot, lengths[slot] + room)
    return IndexContext(
        layer=layer,
        num_heads=KV_HEADS * group,
        num_kv_heads=KV_HEADS,
        head_dim=dim,
        scaling=dim**-0.5,
        config=config,
        codebooks={},
        extents=table,
        lengths=list(lengths),
        dtype=getattr(torch, dtype),
        device=torch.device(device),
        library=None,
        cuda=load_kernels(dtype, dim, group, config) if device == "cuda" else None,
    )


def random_keys(n: int, dim: int, dtype: str) -> Tensor:
    """Keys of unequal norms around a common direction, as keys after RoPE are; on the CPU."""
    center = torch.randn(KV_HEADS, 1, dim)
    keys = (torch.randn(KV_HEADS, n, dim) + center) * (0.5 + torch.rand(KV_HEADS, n, 1))
    return keys.to(getattr(torch, dtype))


def copy_clusters(found: CudaIndex, expected: ReferenceIndex) -> None:
    """Give the index on the GPU the reference's clusters; both have the same extents."""
    for name in ("centroids", "sizes", "starts", "places", "clusters"):
        getattr(found.reference, name).copy_(getattr(expected, name))
    found.reference.counts[:] = expected.counts
    found.reference.prompt_tokens[:] = expected.prompt_tokens


def poison(index: CudaIndex | ReferenceIndex) -> None:
    arrays = index.reference if isinstance(index, CudaIndex) else index
    arrays.centroids.fill_(float("nan"))
    for array in (arrays.sizes, arrays.starts, arrays.places):
        array.fill_(-7)
    if isinstance(index, CudaIndex):
        index.workspace.scores.fill_(float("nan"))
        index.workspace.statistics.fill_(float("nan"))


def make_pair(
    config: Config, dtype: str, dim: int, group: int, lengths: Sequence[int]
) -> tuple[ReferenceIndex, CudaIndex]:
    """The same clusters, found by the reference, in it on the CPU and in the index on the GPU; all else is poisoned."""
    expected = ReferenceIndex(make_context(config, dtype, dim, group, lengths, "cpu"))
    found = CudaIndex(make_context(config, dtype, dim, group, lengths, "cuda"))
    poison(expected)
    poison(found)
    for slot, length in enumerate(lengths):
        keys = random_keys(length, dim, dtype)
        expected.build(slot, keys, keys)
    copy_clusters(found, expected)
    return expected, found


def device_values(expected: ReferenceIndex, found: CudaIndex, slot: int) -> tuple[Tensor, Tensor]:
    """Scores that the first kernel left, float32 [G, lanes, C], and the values of the clusters that they give, [G, C]."""
    count = expected.counts[slot]
    scores = found.workspace.scores[slot].flatten(1, 2)[:, :count].transpose(1, 2).cpu()
    if expected.config.group_reduce == "mean":
        return scores, scores[:, 0]
    weights = (scores.double() * torch.log(torch.tensor(2.0, dtype=torch.float64))).softmax(dim=-1)
    return scores, weights.amax(dim=1) if expected.config.group_reduce == "max" else weights.mean(dim=1)


def check_request(expected: ReferenceIndex, found: CudaIndex, queries: Tensor, slot: int, rows: Tensor) -> None:
    """Scores agree with the reference; given the scores, clusters are taken whole by value, and the last is cut."""
    config, n = expected.config, expected.context.lengths[slot]
    lanes = query_lanes(queries.view(KV_HEADS, -1, queries.shape[-1]), config.group_reduce)
    sizes, starts = (expected.read_clusters(array, slot) for array in (expected.sizes, expected.starts))
    exact = lanes @ expected.read_clusters(expected.centroids, slot).float().transpose(1, 2)
    scale = 1.0 if config.group_reduce == "mean" else expected.context.scaling * 1.4426950408889634
    scores, values = device_values(expected, found, slot)
    held = (sizes > 0)[:, None].expand_as(exact)
    torch.testing.assert_close(scores[held], (exact * scale)[held], rtol=1e-4, atol=1e-4)
    assert (scores[~held] == -torch.inf).all()
    kept = min(n, config.top_k)
    assert (rows[:, kept:] == -1).all()
    listed = expected.context.extents.read(expected.places, slot, n)
    for head in range(KV_HEADS):
        own = rows[head, :kept].long()
        assert len(set(own.tolist())) == kept, "no row twice"
        # Rows by cluster, from where they stand in the sorted list.
        place_of = torch.empty(n, dtype=torch.long)
        place_of[listed[head].long()] = torch.arange(n)
        cluster = torch.searchsorted((starts + sizes)[head].long().contiguous(), place_of[own], right=True)
        taken = torch.zeros(len(sizes[head]), dtype=torch.long).index_add_(0, cluster, torch.ones_like(cluster))
        assert (taken <= sizes[head]).all()
        cut = ((taken > 0) & (taken < sizes[head])).nonzero()[:, 0]
        assert len(cut) <= 1, "only the last cluster is cut"
        again = expand(starts[head, None], taken[None], config.top_k)[0, :kept]
        assert torch.equal(listed[head, again], rows[head, :kept]), "clusters ascend, and begin with their first rows"
        last = values[head][taken > 0].min()
        left = values[head][(taken == 0) & (sizes[head] > 0)]
        assert len(left) == 0 or left.max() <= last + 1e-4 * last.abs() + 1e-30, "no better cluster was left"
        if len(cut):
            assert values[head][cut[0]] <= last + 1e-4 * last.abs(), "the cut one is the last"


@pytest.mark.parametrize("lengths", [[101, 1], [5000, 1024, 1025], [33_000, 3]], ids=str)
@pytest.mark.parametrize(("dtype", "dim", "group", "reduce"), SHAPES)
def test_selection(dtype: str, dim: int, group: int, reduce: str, lengths: list[int]) -> None:
    torch.manual_seed(dim + group + len(lengths))
    config = Config(group_reduce=reduce, top_k=300, tokens_per_cluster=40, iterations=3)
    expected, found = make_pair(config, dtype, dim, group, lengths)
    queries = torch.randn(len(lengths), KV_HEADS * group, dim).to(getattr(torch, dtype))
    slots = list(reversed(range(len(lengths))))
    selection = found.select(queries.cuda(), slots)
    assert selection.counts == tuple(min(300, lengths[slot]) for slot in slots)
    for request, slot in enumerate(slots):
        check_request(expected, found, queries[request], slot, selection.rows[request].cpu())


def test_rows_are_the_references_where_scores_are_far_apart() -> None:
    torch.manual_seed(1)
    config = Config(group_reduce="max", top_k=1000)
    expected, found = make_pair(config, "float32", 128, 4, [20_000, 4000])
    queries = torch.randn(2, KV_HEADS * 4, 128)
    assert torch.equal(found.select(queries.cuda(), [0, 1]).rows.cpu(), expected.select(queries, [0, 1]).rows)


@pytest.mark.parametrize("per_cluster", [1, 3])
@pytest.mark.parametrize("top_k", [1, 700, 5000])
def test_tiny_clusters_take_as_many_as_the_budget_needs(per_cluster: int, top_k: int) -> None:
    """Up to 5,000 clusters are taken, in several rounds of the block; clusters without keys are passed over."""
    torch.manual_seed(top_k)
    config = Config(tokens_per_cluster=per_cluster, top_k=top_k, iterations=2)
    expected, found = make_pair(config, "bfloat16", 64, 2, [6000, 2000])
    queries = torch.randn(2, KV_HEADS * 2, 64).bfloat16()
    rows = found.select(queries.cuda(), [0, 1]).rows.cpu()
    for slot in range(2):
        check_request(expected, found, queries[slot], slot, rows[slot])


@pytest.mark.parametrize("reduce", ["mean", "softmax_mean"])
def test_equal_scores_are_cut_by_number(reduce: str) -> None:
    """All centroids are the same, more than one block compares at once: the digits of their numbers decide."""
    config = Config(tokens_per_cluster=8, top_k=777, group_reduce=reduce)
    expected, found = make_pair(config, "bfloat16", 64, 2, [16_000])
    expected.centroids.fill_(0.5)
    copy_clusters(found, expected)
    queries = torch.randn(1, KV_HEADS * 2, 64).bfloat16()
    sizes, starts = (expected.read_clusters(array, 0) for array in (expected.sizes, expected.starts))
    entries = expand(starts, rows_taken(torch.zeros(sizes.shape), sizes, 777), 777)
    listed = expected.context.extents.read(expected.places, 0, 16_000)
    assert torch.equal(found.select(queries.cuda(), [0]).rows[0].cpu(), listed.gather(1, entries))


@pytest.mark.parametrize("tokens_per_cluster", [80, 500])
def test_one_cluster_larger_than_the_budget(tokens_per_cluster: int) -> None:
    torch.manual_seed(4)
    config = Config(tokens_per_cluster=tokens_per_cluster, top_k=60, iterations=2)
    expected, found = make_pair(config, "bfloat16", 128, 4, [70_000 if tokens_per_cluster == 500 else 79])
    queries = torch.randn(1, KV_HEADS * 4, 128).bfloat16()
    check_request(expected, found, queries[0], 0, found.select(queries.cuda(), [0]).rows[0].cpu())


def test_a_request_does_not_depend_on_its_batch() -> None:
    torch.manual_seed(6)
    lengths = [9000, 300, 40_000, 81]
    _, found = make_pair(Config(iterations=2), "bfloat16", 128, 4, lengths)
    queries = torch.randn(4, KV_HEADS * 4, 128, device="cuda").bfloat16()
    together = found.select(queries, [0, 1, 2, 3]).rows
    scores = found.workspace.scores.clone()
    for slot in range(4):
        alone = found.select(queries[slot, None], [slot]).rows
        assert torch.equal(alone[0], together[slot])
        used = -(-found.reference.counts[slot] // 32)
        assert torch.equal(found.workspace.scores[slot, :, :used], scores[slot, :, :used])


def bind(index: CudaIndex, on_host: bool) -> Tensor:
    """A pool of random rows for the index; NaN where no token is."""
    context = index.context
    shape = (context.extents.capacity, KV_HEADS, 1024, 2, context.head_dim)
    pool = torch.full(shape, float("nan"), dtype=context.dtype, pin_memory=on_host)
    for slot, length in enumerate(context.lengths):
        context.extents.write(pool, slot, 0, torch.randn(KV_HEADS, length, 2, context.head_dim).to(context.dtype))
    index.bind(LayerRows(pool if on_host else pool.cuda(), pool.data_ptr(), pool.stride(0)))
    return pool


def batch_of(
    index: CudaIndex, positions: Sequence[int], slots: Sequence[int], dense: Sequence[int] = ()
) -> DeviceBatch:
    lengths = index.context.lengths
    states = [
        RequestState(0, slot, position, 0, 0, 0, 0, lengths[slot], slot in dense)
        for slot, position in zip(slots, positions, strict=True)
    ]
    return DeviceBatch(pack(states).cuda(), index.context.extents.device_table)


def move_rows(index: CudaIndex, pool: Tensor, selection: DeviceSelection, slots: Sequence[int]) -> tuple[int, int]:
    """What the attention kernel does with a selection: read cached rows and check them, keep all. Returns found and read."""
    assert selection.store is not None
    assert selection.cached is not None
    assert selection.keep is not None
    found = read = 0
    rows, cached, keep = (array.cpu() for array in (selection.rows, selection.cached, selection.keep))
    store = selection.store
    for request, slot in enumerate(slots):
        held = index.context.extents.read(pool, slot, index.context.lengths[slot]).cuda()
        for head in range(KV_HEADS):
            own = rows[request, head]
            used = own >= 0
            assert ((keep[request, head] >= 0) == used).all()
            there = cached[request, head] >= 0
            assert not (there & ~used).any()
            assert not set(cached[request, head][there].tolist()) & set(keep[request, head][used].tolist())
            wanted = held[head, own[there].long().cuda()]
            assert torch.equal(store[slot, head, cached[request, head][there].long().cuda()], wanted), (
                "poisoned or stale"
            )
            found, read = found + int(there.sum()), read + int((used & ~there).sum())
            kept = keep[request, head][used].long()
            assert len(set(kept.tolist())) == len(kept)
            store[slot, head, kept.cuda()] = held[head, own[used].long().cuda()]
    return found, read


@pytest.mark.parametrize("steps", [1, 3])
def test_rows_of_the_last_steps_are_found(steps: int) -> None:
    """Queries drift for 30 steps. What is said to be in the store is there, and most rows are."""
    torch.manual_seed(steps)
    lengths = [6000, 2500]
    _, index = make_pair(Config(top_k=200, cache_steps=steps, iterations=3), "float32", 64, 2, lengths)
    pool = bind(index, on_host=True)
    recent = index.recent
    assert recent is not None
    recent.store.fill_(float("nan"))
    queries = torch.randn(2, KV_HEADS * 2, 64, device="cuda")
    found = read = 0
    for step in range(30):
        selection = index.launch_select(queries, batch_of(index, [7000 + step, 3000 + step], [0, 1]))
        assert selection is not None
        counts = move_rows(index, pool, selection, [0, 1])
        assert step > 0 or counts[0] == 0, "the first step finds nothing"
        found, read = found + counts[0], read + counts[1]
        stale = recent.store.view(2, KV_HEADS, steps + 1, 200, -1)
        for slot, position in enumerate((7001, 3001)):  # the next step's buffer: nobody may read it any more
            stale[slot, :, (position + step) % (steps + 1)] = float("nan")
        queries = 0.97 * queries + 0.24 * torch.randn_like(queries)
    assert index.hit_rate() == found / (found + read)
    assert found > 0.3 * (found + read)


def test_nothing_is_found_after_a_pause_longer_than_the_cache() -> None:
    torch.manual_seed(8)
    _, index = make_pair(Config(top_k=200, cache_steps=2, iterations=2), "float32", 64, 2, [6000])
    bind(index, on_host=True)
    queries = torch.randn(1, KV_HEADS * 2, 64, device="cuda")

    def found(position: int) -> int:
        selection = index.launch_select(queries, batch_of(index, [position], [0]))
        assert selection is not None
        assert selection.cached is not None
        return int((selection.cached >= 0).sum())

    everything = 200 * KV_HEADS
    assert [found(position) for position in (7000, 7001, 7001, 7003)] == [0, everything, 0, everything]
    assert found(7006) == 0, "three steps later another step has that buffer"
    index.select(queries, [0])
    assert found(7007) == 0, "a selection outside of a decode step fills no store"


def test_another_request_of_a_slot_finds_nothing() -> None:
    torch.manual_seed(9)
    config = Config(top_k=100, iterations=2)
    index = CudaIndex(make_context(config, "bfloat16", 64, 2, [3000], "cuda"))
    bind(index, on_host=True)
    keys = random_keys(3000, 64, "bfloat16").cuda()
    queries = torch.randn(1, KV_HEADS * 2, 64, device="cuda").bfloat16()
    for _ in range(2):
        index.forget(0)
        index.build(0, keys, keys)
        index.finish_build(0)
        selections = [index.launch_select(queries, batch_of(index, [position], [0])) for position in (3500, 3501)]
        cached = [selection.cached for selection in selections if selection is not None]
        assert [int((array >= 0).sum()) for array in cached if array is not None] == [0, 100 * KV_HEADS]


@pytest.mark.parametrize(("on_host", "steps"), [(False, 1), (True, 0)])
def test_no_store_where_it_is_of_no_use(on_host: bool, steps: int) -> None:
    config = Config(top_k=50, cache_steps=steps)
    _, index = make_pair(config, "float16", 64, 1, [2000])
    bind(index, on_host)
    queries = torch.randn(1, KV_HEADS, 64, device="cuda").half()
    selection = index.launch_select(queries, batch_of(index, [2100], [0]))
    assert selection is not None
    assert selection.store is None
    assert index.recent is None
    assert index.hit_rate() is None


def test_a_captured_selection_follows_lengths_and_skips_dense_requests() -> None:
    torch.manual_seed(3)
    lengths = [3000, 40_000, 12_000]
    _, index = make_pair(Config(iterations=2), "bfloat16", 128, 4, lengths)
    bind(index, on_host=True)
    queries = torch.randn(3, KV_HEADS * 4, 128, device="cuda").bfloat16()
    batch = batch_of(index, [50_000] * 3, [0, 1, 2])
    want = index.launch_select(queries, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = index.launch_select(queries, batch)
    assert want is not None
    assert found is not None
    assert found.cached is not None
    assert found.keep is not None
    found.rows.fill_(-9)
    graph.replay()
    assert torch.equal(found.rows, want.rows)
    assert (found.cached == -1).all(), "the same step again"
    batch.requests.copy_(batch_of(index, [50_001] * 3, [2, 0, 1], dense=[1]).requests)
    for array in (found.rows, found.cached, found.keep):
        array.fill_(-9)
    graph.replay()
    for array in (found.rows, found.cached, found.keep):
        assert (array[2] == -9).all(), "nothing is selected for a dense request"
    assert torch.equal(found.rows[:2], index.select(queries[:2], [2, 0]).rows)


def test_evicted_keys_become_visible_when_they_are_committed() -> None:
    """Growth by evictions on the GPU: clusters of their own, and some that join the last cluster."""
    torch.manual_seed(5)
    old, update, times = 1500, 40, 6
    keys = random_keys(old + update * times, 64, "bfloat16")
    config = Config(top_k=100)
    context = make_context(config, "bfloat16", 64, 2, [old], "cuda", room=update * times)
    index = CudaIndex(context)
    poison(index)
    index.build(0, keys[:, :old].cuda(), keys.cuda())
    index.finish_build(0)
    expected = ReferenceIndex(make_context(config, "bfloat16", 64, 2, [old], "cpu", room=update * times))
    queries = torch.randn(1, KV_HEADS * 2, 64).bfloat16()
    for number in range(times):
        start = old + number * update
        before = index.select(queries.cuda(), [0]).rows
        index.stage(0, start, keys[:, start : start + update].cuda())
        assert torch.equal(index.select(queries.cuda(), [0]).rows, before)
        index.commit(0, start, update)
        context.lengths[0] = expected.context.lengths[0] = start + update
        for name in ("centroids", "sizes", "starts", "places", "clusters"):
            getattr(expected, name).copy_(getattr(index.reference, name))
        expected.counts[:] = index.reference.counts
        check_request(expected, index, queries[0], 0, index.select(queries.cuda(), [0]).rows[0].cpu())
        sizes = expected.read_clusters(expected.sizes, 0)
        assert (sizes.sum(dim=1) == start + update).all()
    assert expected.counts == [1500 // 80 + 3]
    listed = expected.context.extents.read(expected.places, 0, old + update * times)
    assert torch.equal(listed.sort(dim=1).values, torch.arange(old + update * times).int().expand(KV_HEADS, -1))
    last, places = expected.read_clusters(expected.centroids, 0)[:, -1], listed[:, -2 * update :].long()
    means = torch.stack([keys[head, places[head]].float().mean(dim=0) for head in range(KV_HEADS)])
    assert int(expected.read_clusters(expected.sizes, 0)[0, -1]) == 2 * update
    torch.testing.assert_close(last.float(), means, rtol=0.02, atol=0.02)


def test_dense_layers_select_nothing_and_keep_nothing() -> None:
    index = CudaIndex(make_context(Config(), "bfloat16", 64, 2, [2000], "cuda", room=320, layer=1))
    keys = random_keys(2320, 64, "bfloat16").cuda()
    index.build(0, keys[:, :2000], keys)
    index.finish_build(0)
    index.extend(0, keys[:, 2000:])
    queries = torch.randn(1, KV_HEADS * 2, 64, device="cuda").bfloat16()
    assert index.launch_select(queries, batch_of(index, [2100], [0])) is None
    assert index.attended(2000) == 2000
    assert index.select(queries, [0]).counts == (2000,)
    assert index.recent is None


def test_memory_that_was_never_selected_from_is_never_found() -> None:
    index = CudaIndex(make_context(Config(top_k=64), "bfloat16", 64, 2, [500], "cuda"))
    recent = index.recent
    assert recent is not None
    assert (recent.clusters == NEVER).all()
    assert recent.store.shape == (1, KV_HEADS, 128, 2, 64)
