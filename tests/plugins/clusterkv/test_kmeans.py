"""The parts of ClusterKV's k-means that need no GPU: first centroids, launches, what is refused."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import pytest
import torch

from kvseek.core.errors import ConfigError, KernelError
from kvseek.core.extents import ExtentTable
from kvseek.plugins.clusterkv import kmeans
from kvseek.plugins.clusterkv.config import Config
from kvseek.plugins.clusterkv.device import CudaIndex
from kvseek.plugins.clusterkv.kmeans import ClusterArrays, DeviceKMeans, KMeansArguments, check_keys
from kvseek.plugins.clusterkv.seeding import initial_keys
from kvseek.plugins.contract import IndexContext

KV_HEADS = 2


class RecordedKernels:
    """Stands in for CudaKernels: notes launches, with their arguments as they are at that moment."""

    shared_memory_per_block = 227 << 10

    def __init__(self) -> None:
        self.launches: list[tuple[str, int, KMeansArguments]] = []

    def launch(self, name: str, grid: tuple[int, int, int], threads: int, arguments: KMeansArguments) -> None:
        assert threads == 256
        assert grid[1:] == (KV_HEADS, 1)
        copy = KMeansArguments()
        ctypes.pointer(copy)[0] = arguments
        self.launches.append((name.removeprefix("kvseek_clusterkv_"), grid[0], copy))

    def names(self) -> list[str]:
        return [name for name, _, _ in self.launches]


def make(config: Config, head_dim: int, tokens: int) -> tuple[DeviceKMeans, RecordedKernels, ClusterArrays]:
    """A DeviceKMeans whose slot 1 has room for `tokens` tokens, and where it writes."""
    table = ExtentTable(2, 40, 40)
    table.reserve(1, tokens)
    device = torch.device("cpu")
    context = IndexContext(
        5, 2 * KV_HEADS, KV_HEADS, head_dim, 1.0, config, {}, table, [0, tokens], torch.bfloat16, device, None
    )
    kernels: Any = RecordedKernels()
    shape = (40, KV_HEADS, config.clusters_per_extent)
    sizes = torch.zeros(shape, dtype=torch.int32)
    arrays = ClusterArrays(torch.zeros(*shape, head_dim), sizes, sizes.clone(), torch.zeros(40, KV_HEADS, 1024))
    return DeviceKMeans(context, config, kernels), kernels, arrays


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
def test_launches_of_a_long_prompt() -> None:
    config = Config(iterations=3)
    means, kernels, arrays = make(config, 128, 9000)
    keys = torch.zeros(KV_HEADS, 9000, 128, dtype=torch.bfloat16)
    changed = means.cluster(1, keys, 0, 0, 112, arrays)
    assert changed.shape == (4, KV_HEADS)
    rounds = ["assign", "place", "turn"] * 3 + ["assign"]  # directions are turned for the round that follows
    assert kernels.names() == ["seed", *rounds, "mean", "order"]
    grids = {name: blocks for name, blocks, _ in kernels.launches}
    assert (grids["assign"], grids["mean"], grids["order"]) == (36, 14, 14)  # 256 keys, 8 clusters a block
    assert (grids["place"], grids["turn"]) == (36, 18)  # 256 keys, 512 list entries
    for kernel, last in (("assign", 4), ("place", 3), ("turn", 3)):
        numbers = [arguments.round for name, _, arguments in kernels.launches if name == kernel]
        assert numbers == list(range(last))


@pytest.mark.usefixtures("_without_gpu")
def test_work_space_has_room_for_what_kernels_write(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    empty = torch.empty

    def noted(*arguments: Any, **options: Any) -> torch.Tensor:
        made.append(empty(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(torch, "empty", noted)
    means, kernels, arrays = make(Config(iterations=3), 128, 9000)
    means.cluster(1, torch.zeros(KV_HEADS, 9000, 128, dtype=torch.bfloat16), 0, 0, 112, arrays)
    sizes = {array.data_ptr(): array.numel() * array.itemsize for array in made}
    arguments = kernels.launches[0][2]
    keys, clusters = KV_HEADS * 9000, KV_HEADS * 112
    wanted = {"labels": 2 * keys, "scales": 4 * keys, "list": 8 * keys, "counts": 4 * clusters, "cursors": 4 * clusters}
    wanted |= {"sums": 8 * 128 * clusters, "summed": 4 * clusters, "directions": 2 * (128 + 8) * clusters}
    wanted |= {"changed": 4 * 4 * KV_HEADS, "origins": 4 * 128 * KV_HEADS, "arrivals": 4 * KV_HEADS}
    assert {name: sizes[getattr(arguments, name)] for name in wanted} == wanted


@pytest.mark.usefixtures("_without_gpu")
def test_few_keys_take_one_launch() -> None:
    means, kernels, arrays = make(Config(), 256, 3000)
    keys = torch.zeros(320, KV_HEADS, 256, dtype=torch.bfloat16).transpose(0, 1)
    means.cluster(1, keys, 2500, 31, 4, arrays)
    ((name, blocks, arguments),) = kernels.launches
    assert (name, blocks) == ("cluster", 1)
    wanted = {
        "tokens": 320,
        "clusters": 4,
        "rounds": Config().iterations + 1,
        "label_stride": 320,
        "first_place": 2500,
        "first_cluster": 31,
    }
    wanted |= {"head_stride": 256, "token_stride": 256 * KV_HEADS, "clusters_per_extent": 32, "kv_heads": KV_HEADS}
    assert {field: getattr(arguments, field) for field in wanted} == wanted
    assert arguments.keys == keys.data_ptr()
    assert arguments.places == arrays.places.data_ptr()


@pytest.mark.usefixtures("_without_gpu")
def test_wide_heads_have_smaller_blocks() -> None:
    means, kernels, arrays = make(Config(iterations=1), 160, 3000)
    means.cluster(1, torch.zeros(KV_HEADS, 3000, 160, dtype=torch.bfloat16), 0, 0, 37, arrays)
    grids = {name: blocks for name, blocks, _ in kernels.launches}
    assert (grids["assign"], grids["mean"]) == (24, 10)


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
    means, kernels, arrays = make(Config(), 64, 2048)
    keys = torch.zeros(KV_HEADS, 1, 64, dtype=torch.bfloat16).expand(-1, tokens, -1)
    with pytest.raises(KernelError, match=message):
        means.cluster(1, keys, first_place, first_cluster, clusters, arrays)
    assert not kernels.launches


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


@pytest.mark.usefixtures("_without_gpu")
@pytest.mark.parametrize("tokens", [700, 3000])
def test_a_slot_may_be_closed_while_its_prompt_is_clustered(tokens: int) -> None:
    """Kernels that run later read the extents that the slot had, and not the table's row, which is cleared."""
    means, kernels, _ = make(Config(cache_steps=0), 64, tokens)
    context = dataclasses.replace(means._context, cuda=kernels)  # type: ignore[arg-type]
    index, extents = CudaIndex(context), context.extents
    owned = extents.table[1].tolist()
    keys = torch.zeros(KV_HEADS, tokens, 64, dtype=torch.bfloat16)
    built = index.build(1, keys, keys)
    extents.release(1)
    assert extents.table[1].max() == -1
    assert built.ticket is not None, "the engine keeps it, and it keeps what the kernels read"
    assert kernels.launches
    for _, _, arguments in kernels.launches:
        read = (ctypes.c_int32 * len(owned)).from_address(arguments.table)
        assert list(read) == owned
