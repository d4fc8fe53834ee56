"""ClusterKV's clustering on the GPU against the PyTorch reference, and the order that makes it reproducible."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvseek.bench.methods import method_kernels
from kvseek.core.cuda import CudaKernels
from kvseek.core.errors import KernelError
from kvseek.core.extents import ExtentTable
from kvseek.core.index_context import IndexContext
from kvseek.core.streams import SideStream
from kvseek.plugins.clusterkv import kmeans
from kvseek.plugins.clusterkv.clustering import (
    Clustering,
    cluster_keys,
    cluster_means,
    cluster_sums,
    initial_keys,
    nearest,
)
from kvseek.plugins.clusterkv.config import Config
from kvseek.plugins.clusterkv.kmeans import DeviceKMeans

pytestmark = pytest.mark.gpu

KV_HEADS = 2
LAYER = 3
GROUP = 4
UNWRITTEN = -7
SHAPES = [("bfloat16", 128), ("float16", 64), ("float32", 96), ("bfloat16", 256), ("float32", 128), ("bfloat16", 160)]
# Keys and clusters: less and more than a warp, a block, a tile of directions, the small kernel.
SIZES = [(1, 1), (7, 7), (7, 2), (80, 3), (320, 4), (1000, 64), (1024, 12), (1025, 40), (2049, 70), (33_000, 412)]


@cache
def load_kernels(dtype: str, dim: int, spread_weight: float = 0.0) -> CudaKernels:
    return method_kernels("clusterkv", Config(spread_weight=spread_weight), dtype, dim, GROUP)


@dataclass
class Found:
    """What a clustering wrote, on the CPU, places and starts counted from its own first place, and its return value."""

    centroids: Tensor
    sizes: Tensor
    starts: Tensor
    places: Tensor
    changed: Tensor
    spreads: Tensor | None = None

    @property
    def labels(self) -> Tensor:
        """Cluster of each key, [G, n]."""
        labels = torch.full(self.places.shape, -1)
        for head in range(len(labels)):
            numbers = torch.arange(self.sizes.shape[1]).repeat_interleave(self.sizes[head].long())
            labels[head, self.places[head].long()] = numbers
        return labels


def cluster(
    keys: Tensor,
    clusters: int,
    config: Config | None = None,
    slot: int = 0,
    first_place: int = 0,
    first_cluster: int = 0,
) -> Found:
    """Cluster keys [G, n, D] on the GPU into poisoned arrays, and check what is outside of the clustering."""
    config, dtype = config or Config(), str(keys.dtype).removeprefix("torch.")
    tokens, dim = keys.shape[1:]
    needed = max(first_place + tokens, -(-(first_cluster + clusters) // config.clusters_per_extent) * 1024)
    table = ExtentTable(3, 80, 100, keys.device)
    table.reserve(1 - slot, 2000)  # so that places and extents are not the same numbers
    table.reserve(slot, needed)
    context = IndexContext(
        LAYER, KV_HEADS * GROUP, KV_HEADS, dim, 1.0, config, {}, table, [0, 0, 0], keys.dtype, keys.device, None
    )
    shape = (100, KV_HEADS, config.clusters_per_extent)
    integers = {"dtype": torch.int32, "device": keys.device}
    arrays = kmeans.ClusterArrays(
        torch.full((*shape, dim), float("nan"), dtype=keys.dtype, device=keys.device),
        torch.full(shape, UNWRITTEN, **integers),
        torch.full(shape, UNWRITTEN, **integers),
        torch.full((100, KV_HEADS, 1024), UNWRITTEN, **integers),
        torch.full(shape if config.spread_weight else (0,), float("nan"), device=keys.device),
    )
    means = DeviceKMeans(context, config, load_kernels(dtype, dim, config.spread_weight))
    changed = means.cluster(slot, keys, first_place, first_cluster, clusters, arrays)
    for name, entries in (("sizes", clusters), ("starts", clusters), ("places", tokens)):
        written = (getattr(arrays, name) != UNWRITTEN).sum().item()
        assert written == KV_HEADS * entries, f"{name}: {written} entries written"
    numbers = torch.arange(first_cluster, first_cluster + clusters)
    extents = table.table[slot, numbers // config.clusters_per_extent].long().to(keys.device)
    inside = (numbers % config.clusters_per_extent).to(keys.device)
    mine = [
        array[extents, :, inside].transpose(0, 1).cpu() for array in (arrays.centroids, arrays.sizes, arrays.starts)
    ]
    places = table.read(arrays.places, slot, first_place + tokens)[:, first_place:].cpu()
    spreads = arrays.spreads[extents, :, inside].transpose(0, 1).cpu() if config.spread_weight else None
    found = Found(mine[0], mine[1], mine[2] - first_place, places - first_place, changed.cpu(), spreads)
    check_lists(found, tokens)
    return found


def check_lists(found: Found, tokens: int) -> None:
    """Every key occurs once, in its cluster's part of the list, and ascends there."""
    everyone = torch.arange(tokens, dtype=torch.int32).expand(KV_HEADS, -1)
    assert torch.equal(found.places.sort(dim=1).values, everyone)
    assert torch.equal(found.starts, (found.sizes.cumsum(dim=1) - found.sizes).int())
    falls = found.places.diff(dim=1) < 0
    for head in range(KV_HEADS):
        assert set((falls[head].nonzero()[:, 0] + 1).tolist()) <= set(found.starts[head].tolist())


def expected(keys: Tensor, clusters: int, config: Config | None = None) -> Clustering:
    config = config or Config()
    chosen = initial_keys(config.seed, LAYER, keys.shape[1], clusters)
    return cluster_keys(keys.cpu(), chosen, config.iterations)


def labels_of(clustering: Clustering) -> Tensor:
    return Found(clustering.centroids, clustering.sizes, clustering.starts, clustering.order, torch.empty(0)).labels


def objective(keys: Tensor, labels: Tensor, clusters: int) -> float:
    """Mean cosine between a key and the direction of its cluster."""
    units = F.normalize(keys.cpu().float(), dim=-1)
    directions = F.normalize(cluster_sums(units, labels, clusters), dim=-1)
    return (units * directions.gather(1, labels[..., None].expand_as(units))).sum(dim=-1).mean().item()


def random_keys(tokens: int, dim: int, dtype: str, seed: int = 0) -> Tensor:
    """Keys of unequal lengths around a common vector, as keys after RoPE are; on the GPU."""
    generator = torch.Generator().manual_seed(seed)
    common = 2 * torch.randn(KV_HEADS, 1, dim, generator=generator)
    keys = torch.randn(KV_HEADS, tokens, dim, generator=generator) + common
    return (keys * (0.5 + torch.rand(KV_HEADS, tokens, 1, generator=generator))).to("cuda", getattr(torch, dtype))


def separated_keys(tokens: int, clusters: int, dim: int, dtype: str) -> tuple[Tensor, Tensor]:
    """Keys near one of `clusters` vectors, one of which each first centroid is near, and which; on the GPU."""
    generator = torch.Generator().manual_seed(tokens)
    chosen = initial_keys(Config().seed, LAYER, tokens, clusters)
    labels = (torch.searchsorted(chosen, torch.arange(tokens), right=True) - 1).clamp(min=0)
    centers = torch.randn(KV_HEADS, clusters, dim, generator=generator)
    keys = centers[:, labels] + 0.1 * torch.randn(KV_HEADS, tokens, dim, generator=generator)
    keys *= 0.5 + torch.rand(KV_HEADS, tokens, 1, generator=generator)
    return keys.to("cuda", getattr(torch, dtype)), labels.expand(KV_HEADS, -1)


def assert_same(first: Found, second: Found) -> None:
    for name in ("centroids", "sizes", "starts", "places", "changed"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("dtype", "dim"), SHAPES)
def test_separated_keys_are_clustered_exactly(dtype: str, dim: int, size: tuple[int, int]) -> None:
    tokens, clusters = size
    keys, labels = separated_keys(tokens, clusters, dim, dtype)
    found, wanted = cluster(keys, clusters), expected(keys, clusters)
    assert torch.equal(found.labels, labels)
    for name, other in (("sizes", "sizes"), ("starts", "starts"), ("places", "order")):
        assert torch.equal(getattr(found, name), getattr(wanted, other)), name
    tolerance = {"bfloat16": 4e-3, "float16": 5e-4, "float32": 1e-6}[dtype]
    torch.testing.assert_close(found.centroids.float(), wanted.centroids, rtol=tolerance, atol=tolerance)
    assert (found.changed[0] == tokens).all(), "the first round takes every key"
    assert (found.changed[1:] == 0).all(), "there was nothing more to do"


@pytest.mark.parametrize("size", SIZES[3:], ids=str)
@pytest.mark.parametrize(("dtype", "dim"), SHAPES)
def test_one_round_is_the_references(dtype: str, dim: int, size: tuple[int, int]) -> None:
    tokens, clusters = size
    config, keys = Config(iterations=1), random_keys(tokens, dim, dtype)
    found = cluster(keys, clusters, config)
    labels, wanted = found.labels, labels_of(expected(keys, clusters, config))
    differ = (labels != wanted).sum().item()
    # Keys without structure are about as near to several of 412 clusters, and one key that goes elsewhere turns two
    # directions: an H200 gave 1.2 %. What is lost by it the objective says.
    assert differ <= max(4, 0.02 * labels.numel()), f"{differ} of {labels.numel()} labels differ"
    assert abs(objective(keys, labels, clusters) - objective(keys, wanted, clusters)) < 1e-3
    means = cluster_sums(keys.cpu().float(), labels, clusters) / found.sizes.clamp(min=1)[..., None]
    torch.testing.assert_close(found.centroids, means.to(keys.dtype), rtol=8e-3, atol=2e-3)


@pytest.mark.parametrize("size", SIZES[4:], ids=str)
@pytest.mark.parametrize(("dtype", "dim"), SHAPES[:3])
def test_all_rounds_reach_the_references_objective(dtype: str, dim: int, size: tuple[int, int]) -> None:
    tokens, clusters = size
    keys = random_keys(tokens, dim, dtype, seed=1)
    found = cluster(keys, clusters)
    wanted = objective(keys, labels_of(expected(keys, clusters)), clusters)
    assert abs(objective(keys, found.labels, clusters) - wanted) < 1e-3
    assert found.changed.shape == (Config().iterations + 1, KV_HEADS)
    moved = found.changed > 0
    assert (moved[1:] <= moved[:-1]).all(), "a head that has settled stays so"


@pytest.mark.parametrize("size", [(320, 4), (5000, 62), (33_000, 412)], ids=str)
def test_two_runs_and_two_slots_give_the_same_bits(size: tuple[int, int]) -> None:
    tokens, clusters = size
    keys = random_keys(tokens, 128, "bfloat16", seed=2)
    first = cluster(keys, clusters)
    assert_same(first, cluster(keys, clusters))
    assert_same(first, cluster(keys, clusters, slot=1, first_place=1500, first_cluster=27))
    filler = torch.zeros(64 << 20, device="cuda")  # other work beside it
    side = SideStream(keys.device)
    results: list[Found] = []
    work = side.run(lambda: results.append(cluster(keys, clusters)))
    for _ in range(20):
        filler += 1
    work.wait()
    assert_same(first, results[0])


@pytest.mark.parametrize("size", [(1, 1), (7, 7), (320, 4), (1024, 12), (1025, 40), (5000, 62)], ids=str)
@pytest.mark.parametrize(("dtype", "dim"), SHAPES)
def test_spreads_are_those_of_the_clusters_keys(dtype: str, dim: int, size: tuple[int, int]) -> None:
    """In the kernel for few keys and in the one for many; a cluster of one key or of none has no spread."""
    tokens, clusters = size
    keys = random_keys(tokens, dim, dtype, seed=8)
    found = cluster(keys, clusters, Config(spread_weight=3.0, iterations=2))
    _, wanted = cluster_means(keys.cpu().float(), found.labels, found.sizes.long())
    assert found.spreads is not None
    torch.testing.assert_close(found.spreads, wanted, rtol=1e-3, atol=1e-3)
    assert (found.spreads[found.sizes <= 1] == 0).all()
    plain = cluster(keys, clusters, Config(spread_weight=0.0, iterations=2))
    for name in ("centroids", "sizes", "starts", "places"):
        assert torch.equal(getattr(found, name), getattr(plain, name)), f"{name} do not depend on it"


@pytest.mark.parametrize("size", [(320, 4), (5000, 62)], ids=str)
def test_heads_do_not_depend_on_each_other(size: tuple[int, int]) -> None:
    keys = random_keys(size[0], 64, "float16", seed=3)
    first, swapped = cluster(keys, size[1]), cluster(keys.flip(0), size[1])
    for name in ("centroids", "sizes", "places"):
        assert torch.equal(getattr(first, name), getattr(swapped, name).flip(0)), name


@pytest.mark.parametrize("size", [(320, 4), (5000, 62)], ids=str)
def test_strided_keys(size: tuple[int, int]) -> None:
    keys = random_keys(size[0], 128, "bfloat16", seed=4)
    by_token = keys.transpose(0, 1).contiguous().transpose(0, 1)
    among_others = torch.full((size[0], 3 * KV_HEADS, 128), float("nan"), dtype=keys.dtype, device="cuda")
    among_others[:, 1 : 1 + KV_HEADS] = by_token.transpose(0, 1)
    wanted = cluster(keys, size[1])
    assert_same(wanted, cluster(by_token, size[1]))
    assert_same(wanted, cluster(among_others[:, 1 : 1 + KV_HEADS].transpose(0, 1), size[1]))


@pytest.mark.parametrize("tokens", [600, 6000])
def test_zeros_and_repeated_keys(tokens: int) -> None:
    clusters = tokens // 30
    nothing = cluster(torch.zeros(KV_HEADS, tokens, 64, dtype=torch.bfloat16, device="cuda"), clusters)
    assert (nothing.labels == 0).all(), "equal scores: the lowest number"
    assert (nothing.centroids == 0).all()
    keys = random_keys(tokens, 64, "bfloat16", seed=5)
    keys[:, tokens // 6 : tokens // 3] = 0
    keys[:, tokens // 3 : tokens * 5 // 6] = keys[:, :1]
    found = cluster(keys, clusters)
    for part in (slice(tokens // 6, tokens // 3), slice(tokens // 3, tokens * 5 // 6)):
        assert (found.labels[:, part] == found.labels[:, part][:, :1]).all(), "equal keys share a cluster"
    assert found.centroids.isfinite().all()
    empty = found.sizes == 0
    assert empty.any()
    assert (found.centroids[empty] == 0).all()
    same = cluster(keys[:, :1].expand(-1, tokens, -1), clusters)
    assert (same.labels == same.labels[:, :1]).all()
    for head in range(KV_HEADS):
        assert torch.equal(same.centroids[head, same.labels[head, 0]], keys[head, 0].cpu())


@pytest.mark.parametrize("tokens", [320, 9000])
def test_keys_that_differ_little_from_what_they_share(tokens: int) -> None:
    """The spread is 1/100 of the common part: without the origin float16 would find under a tenth of the labels.

    Float32 cosines, which the reference compares, get 12 % of the labels of float64 wrong here, the kernels 5 %.
    """
    generator = torch.Generator().manual_seed(6)
    keys = 1 + 0.01 * torch.randn(KV_HEADS, tokens, 128, generator=generator)
    clusters, units = tokens // 80, F.normalize(keys.double(), dim=-1)
    first = nearest(units, units[:, initial_keys(Config().seed, LAYER, tokens, clusters)])
    wanted = nearest(units, F.normalize(cluster_sums(units, first, clusters), dim=-1))
    labels = cluster(keys.cuda(), clusters, Config(iterations=1)).labels
    assert (labels == wanted).float().mean() > 0.9
    assert torch.equal(labels.unique(), wanted.unique())


def test_the_small_kernel_does_what_the_large_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, _ = separated_keys(1000, 25, 128, "bfloat16")
    small = cluster(keys, 25)
    monkeypatch.setattr(kmeans, "SMALL_TOKENS", 0)
    large = cluster(keys, 25)
    assert torch.equal(small.labels, large.labels)
    assert torch.equal(small.changed, large.changed)
    torch.testing.assert_close(small.centroids, large.centroids)


def test_rows_that_kernels_cannot_load_are_refused() -> None:
    storage = torch.zeros(KV_HEADS * 100 * 64 + 8, dtype=torch.bfloat16, device="cuda")
    keys = storage[4:-4].view(KV_HEADS, 100, 64)
    with pytest.raises(KernelError, match="rows must begin at multiples of 16 bytes"):
        cluster(keys, 2)
