"""The parts of ClusterKV's k-means that need no GPU: first centroids, what is refused. The rest: tests/gpu/plugins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvseek.core.errors import ConfigError, KernelError
from kvseek.core.extents import ExtentTable
from kvseek.core.index_context import IndexContext
from kvseek.plugins.clusterkv import kmeans
from kvseek.plugins.clusterkv.clustering import initial_keys
from kvseek.plugins.clusterkv.config import Config
from kvseek.plugins.clusterkv.kmeans import ClusterArrays, DeviceKMeans, check_keys

KV_HEADS = 2


class Kernels:
    """Of a GPU; nothing may be launched."""

    shared_memory_per_block = 227 << 10


def make(config: Config, head_dim: int, tokens: int) -> tuple[DeviceKMeans, ClusterArrays]:
    """A DeviceKMeans whose slot 1 has room for `tokens` tokens, and where it would write."""
    table = ExtentTable(2, 40, 40)
    table.reserve(1, tokens)
    device = torch.device("cpu")
    context = IndexContext(
        5, 2 * KV_HEADS, KV_HEADS, head_dim, 1.0, config, {}, table, [0, tokens], torch.bfloat16, device, None
    )
    kernels: Any = Kernels()
    shape = (40, KV_HEADS, config.clusters_per_extent)
    sizes = torch.zeros(shape, dtype=torch.int32)
    arrays = ClusterArrays(
        torch.zeros(*shape, head_dim), sizes, sizes.clone(), torch.zeros(40, KV_HEADS, 1024), torch.zeros(0)
    )
    return DeviceKMeans(context, config, kernels), arrays


@pytest.fixture
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys on the CPU pass as keys on the GPU."""
    monkeypatch.setattr(kmeans, "check_keys", lambda *arguments: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


@pytest.mark.parametrize(("tokens", "clusters"), [(1, 1), (7, 7), (320, 4), (5000, 62)])
def test_first_centroids_are_different_keys(tokens: int, clusters: int) -> None:
    chosen = initial_keys(0, 3, tokens, clusters)
    assert chosen.shape == (clusters,)
    assert (chosen.diff() > 0).all(), "no key twice"
    assert 0 <= chosen[0] <= chosen[-1] < tokens


def test_first_centroids_depend_on_seed_layer_and_length_alone() -> None:
    first = initial_keys(1, 2, 5000, 60)
    torch.manual_seed(99)
    assert torch.equal(first, initial_keys(1, 2, 5000, 60)), "not on the global generator"
    for other in ((2, 2, 5000), (1, 3, 5000), (1, 2, 5001), (2**63 - 1, 2, 5000)):
        assert not torch.equal(first, initial_keys(*other, 60))


def test_first_centroids_are_spread_evenly() -> None:
    counts = torch.zeros(10)
    for layer in range(100):
        counts += torch.bincount(initial_keys(0, layer, 1000, 50) // 100, minlength=10)
    assert ((counts - 500).abs() < 100).all(), counts  # deviation about 21


@pytest.mark.parametrize("clusters", [0, 8])
def test_more_clusters_than_keys_are_refused(clusters: int) -> None:
    with pytest.raises(ConfigError, match=rf"clusters = {clusters}: must be between 1 and 7, the number of keys"):
        initial_keys(0, 0, 7, clusters)


@pytest.mark.usefixtures("_without_gpu")
@pytest.mark.parametrize(
    ("tokens", "first_place", "first_cluster", "clusters", "message"),
    [
        (1000, 1049, 0, 12, "slot 1 has room for 2048 places and 64 clusters: too few for 1000 keys from place 1049"),
        (1000, 0, 53, 12, "in 12 clusters from 53 on; reserve extents first"),
        (80_000, 0, 0, 70_000, "clusters = 70000: must be at most 65520"),
    ],
)
def test_what_has_no_room(tokens: int, first_place: int, first_cluster: int, clusters: int, message: str) -> None:
    means, arrays = make(Config(), 64, 2048)
    keys = torch.zeros(KV_HEADS, 1, 64, dtype=torch.bfloat16).expand(-1, tokens, -1)
    with pytest.raises(KernelError, match=message):
        means.cluster(1, keys, first_place, first_cluster, clusters, arrays)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((3, 10, 64), torch.bfloat16, r"keys: shape \(3, 10, 64\): must be \[2, n, 64\]"),
        ((2, 10, 32), torch.bfloat16, r"must be \[2, n, 64\]"),
        ((2, 0, 64), torch.bfloat16, "keys: 0 per head: must be between 1 and"),
        ((2, 10, 64), torch.float32, "keys: torch.float32 on cpu.*must be torch.bfloat16 on the GPU"),
    ],
)
def test_keys_that_kernels_cannot_read(shape: tuple[int, ...], dtype: torch.dtype, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        check_keys(torch.zeros(shape, dtype=dtype), KV_HEADS, 64, torch.bfloat16)
