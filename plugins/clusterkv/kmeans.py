"""K-means of keys on the GPU, batched over KV heads: launches the kernels of kmeans.cu (ClusterKV paper, section III-B).

The rounds are those of `clustering.cluster_keys`. Unit keys and directions, less a mean direction, are float16 for every
dtype of keys, and are multiplied on tensor cores with float32 sums. So cosines are off by less than 2^-11 of the differences
between keys and directions, and a key that is equally near to two clusters may join either. Sums of unit keys are integers,
in steps of 2^-21, and so do not depend on the order of addition; lengths and means are float32, added in an order that
depends only on the keys. A spread is the root of mean square less square of the mean, in float32: where keys have so much in
common that their mean is 1,000 times as long as they differ, it is off by up to a tenth.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.cuda import CudaKernels
from kvseek.core.errors import KernelError
from kvseek.core.index_context import IndexContext
from kvseek.kernels.structs import c_struct

from .clustering import initial_keys
from .config import Config

# As in kmeans.cuh, kmeans_assign.cuh, kmeans_turn.cuh, kmeans_mean.cuh.
THREADS, WARPS = 256, 8
CHUNK = 64  # list entries that a warp sums
LABELS = 8  # labels of one load
BIAS_HALVES = 8  # float16 numbers that follow a stored direction
MOST_CLUSTERS = 65_520  # labels have 16 bits; the last block's clusters must not reach the label of "no cluster"
MOST_TOKENS = 2**29  # tokens of one clustering: list entries hold a key and its cluster in 32 bits
ALIGNMENT = 16  # bytes of the widest load of a key, to which keys must be aligned

SMALL_TOKENS = 1024  # up to so many, one launch with a block per head: it starts quickly but is slow for long prompts
SEED_BLOCKS = 16  # blocks per head

KMeansArguments = c_struct("plugins/clusterkv/cuda/kmeans.cuh", "KMeansArguments")


@dataclass(frozen=True)
class ClusterArrays:
    """The arrays that a clustering is written to: those of ReferenceIndex, on the GPU, contiguous.

    Attributes
    ----------
    centroids : Tensor [extents, G, clusters_per_extent, D], dtype of the cache
    sizes, starts : Tensor, int32 [extents, G, clusters_per_extent]
    places : Tensor, int32 [extents, G, 1024]
    spreads : Tensor, float32 [extents, G, clusters_per_extent]
        Not written with spread_weight 0.
    """

    centroids: Tensor
    sizes: Tensor
    starts: Tensor
    places: Tensor
    spreads: Tensor


class DeviceKMeans:
    """Clusters keys of one layer on the current stream, which may be a side stream; the host never waits.

    Work space is allocated on the current stream: 14 bytes per token and KV head, and 10 D + 28 bytes per cluster and KV head.

    Parameters
    ----------
    context : IndexContext
        Context of the layer; seeds depend on the layer.
    kernels : CudaKernels
        Kernels of the method.
    """

    def __init__(self, context: IndexContext, config: Config, kernels: CudaKernels) -> None:
        self._context, self._config, self._kernels = context, config, kernels
        wide = context.head_dim > 128
        self.block_keys, self.block_clusters = (128, 4) if wide else (256, 8)  # BLOCK_KEYS and OWN

    def cluster(
        self,
        slot: int,
        keys: Tensor,
        first_place: int,
        first_cluster: int,
        clusters: int,
        arrays: ClusterArrays,
        table: Tensor | None = None,
    ) -> Tensor:
        """Cluster keys by themselves. Queries see the new clusters only after the slot's cluster count has been raised.

        Writes to `arrays.places`, from entry first_place on, the places of the keys, sorted by cluster and ascending inside a
        cluster; and mean, size and start of the clusters from number first_cluster on, and with a spread_weight their spread. A
        cluster without keys has size 0 and a mean of zeros.

        Parameters
        ----------
        keys : Tensor [G, n, D], dtype of the cache, on the GPU
            Keys of places first_place .. first_place + n - 1, n >= 1. Each key is contiguous and aligned to 16 bytes; heads and
            tokens may be strided. The keys must not change until the current stream has run this work.
        clusters : int
            Number of clusters, 1 <= clusters <= n.
        table : Tensor, int32 [max_extents], on the GPU, or None
            Copy of the slot's row of the extent table, kept as long as the keys, if the slot may be closed before the
            current stream has run this work; None: the row itself is read.

        Returns
        -------
        Tensor, int32 [iterations + 1, G], on the GPU
            Number of keys that each round moved to another cluster: zeros from the round on that ended the search.

        Raises
        ------
        KernelError
            If the keys are not as described above, or the slot's extents have no room.
        ConfigError
            If there are fewer keys than clusters.
        """
        self._check(slot, keys, first_place, first_cluster, clusters)
        heads, tokens, _ = keys.shape
        stride, rounds = -(-tokens // LABELS) * LABELS, self._config.iterations + 1
        work = self._work_space(keys, stride, rounds, clusters)
        table = self._context.extents.device_table[slot] if table is None else table
        self._launch_all(
            KMeansArguments(
                **{name: array.data_ptr() for name, array in (work | vars(arrays)).items()},
                keys=keys.data_ptr(),
                table=table.data_ptr(),
                head_stride=keys.stride(0),
                token_stride=keys.stride(1),
                kv_heads=heads,
                tokens=tokens,
                clusters=clusters,
                rounds=rounds,
                label_stride=stride,
                first_place=first_place,
                first_cluster=first_cluster,
                clusters_per_extent=self._config.clusters_per_extent,
            )
        )
        return work["changed"]

    def _work_space(self, keys: Tensor, stride: int, rounds: int, clusters: int) -> dict[str, Tensor]:
        heads, tokens, dim = keys.shape
        chosen = initial_keys(self._config.seed, self._context.layer, tokens, clusters)

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=keys.device)

        return {
            # Pinned, so that the host does not wait for the stream.
            "seeds": chosen.int().pin_memory().to(keys.device, non_blocking=True),
            "labels": empty(torch.int16, heads, stride),
            "directions": empty(torch.float16, heads, clusters, dim + BIAS_HALVES),
            "origins": empty(torch.float32, heads, dim),
            "scales": empty(torch.float32, heads, stride),
            "changed": empty(torch.int32, rounds, heads),
            "counts": empty(torch.int32, heads, clusters),
            "cursors": empty(torch.int32, heads, clusters),
            "list": empty(torch.int32, heads, stride, 2),
            "sums": empty(torch.int64, heads, clusters, dim),
            "summed": empty(torch.int32, heads, clusters),
            "arrivals": empty(torch.int32, heads),
        }

    def _launch_all(self, arguments: ctypes.Structure) -> None:
        if arguments.tokens <= SMALL_TOKENS:
            self._launch("cluster", 1, arguments)
            return
        key_blocks = -(-arguments.tokens // self.block_keys)
        cluster_blocks = -(-arguments.clusters // self.block_clusters)
        self._launch("seed", SEED_BLOCKS, arguments)
        for number in range(arguments.rounds):
            arguments.round = number  # may be changed between launches, because each launch copies the arguments
            self._launch("assign", key_blocks, arguments)
            if number + 1 < arguments.rounds:
                self._launch("place", -(-arguments.tokens // THREADS), arguments)
                self._launch("turn", -(-arguments.tokens // (WARPS * CHUNK)), arguments)
        self._launch("mean", cluster_blocks, arguments)
        self._launch("order", cluster_blocks, arguments)

    def _launch(self, kernel: str, blocks: int, arguments: ctypes.Structure) -> None:
        self._kernels.launch(f"kvseek_clusterkv_{kernel}", (blocks, arguments.kv_heads, 1), THREADS, arguments)

    def _check(self, slot: int, keys: Tensor, first_place: int, first_cluster: int, clusters: int) -> None:
        context = self._context
        check_keys(keys, context.num_kv_heads, context.head_dim, context.dtype)
        if clusters > MOST_CLUSTERS:
            raise KernelError(
                f"clusters = {clusters}: must be at most {MOST_CLUSTERS}, as labels are 16 bits; raise tokens_per_cluster"
            )
        room = context.extents.room(slot)
        cluster_room = room // EXTENT_TOKENS * self._config.clusters_per_extent
        if first_place + keys.shape[1] > room or first_cluster + clusters > cluster_room:
            raise KernelError(
                f"slot {slot} has room for {room} places and {cluster_room} clusters: too few for {keys.shape[1]} keys from "
                f"place {first_place} on in {clusters} clusters from {first_cluster} on; reserve extents first"
            )


def check_keys(keys: Tensor, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Raise KernelError unless `keys` are as DeviceKMeans.cluster describes them."""
    if keys.dim() != 3 or keys.shape[0] != kv_heads or keys.shape[2] != head_dim:
        raise KernelError(f"keys: shape {tuple(keys.shape)}: must be [{kv_heads}, n, {head_dim}]")
    if not 1 <= keys.shape[1] <= MOST_TOKENS:
        raise KernelError(f"keys: {keys.shape[1]} per head: must be between 1 and {MOST_TOKENS}; cluster them in parts")
    if keys.dtype is not dtype or not keys.is_cuda or keys.stride(2) != 1:
        limit = f"{dtype} on the GPU with neighbouring numbers in memory"
        raise KernelError(f"keys: {keys.dtype} on {keys.device}, strides {keys.stride()}: must be {limit}")
    strides = [keys.stride(i) for i in range(2) if keys.shape[i] > 1]
    if any(number % ALIGNMENT for number in (keys.data_ptr(), *(stride * keys.itemsize for stride in strides))):
        raise KernelError(
            f"keys: address {keys.data_ptr()}, strides {keys.stride()} of {keys.itemsize} bytes: rows must begin at multiples "
            f"of {ALIGNMENT} bytes; pass a copy"
        )
