"""Construction of the query-centroid inverted file on the GPU: launches build.cu and list.cu, and allocates work space."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvseek.core.cuda import CudaKernels
from kvseek.core.errors import KernelError
from kvseek.kernels.structs import c_struct

WORK_BYTES = 288 << 20  # most bytes of candidates held at once, those of a band of centroids
SAMPLES = 4096  # most keys of a sample
DEVIATIONS = 5  # standard deviations of a count that a bound allows for
PRODUCT_THREADS, LIST_THREADS = 128, 256  # threads of a block (list_products.cuh, list_search.cuh)
SLACK = 256  # entries that a search collects between two cuts, beside those of a block's threads (list_search.cuh)
TILE_KEYS = 64  # keys of a tile in shared memory (list_products.cuh)
RESIDENT = 3  # blocks that a multiprocessor holds (build.cu)
MOST_PARTS, PART_TILES = 16, 8  # most blocks that share a centroid's keys; fewest tiles of each of these blocks

ListArguments = c_struct("plugins/ctkvr/cuda/list_products.cuh", "ListArguments")


@dataclass(frozen=True)
class Sampling:
    """Sizes of the sample of keys from which a list's bound is chosen: keys that reach the bound are the list's candidates.

    About `rho / stride` of the best `rho` keys are sampled, with at most the deviation of a Poisson variable. The bound
    is a sampled entry of so much lower rank that hardly ever fewer than `rho` keys, or more than `capacity`, reach it. Lists
    for which that happens are searched another way (list_search.cuh), which costs only time.

    Attributes
    ----------
    stride : int
        One in `stride` keys is sampled.
    samples : int
        Number of keys in the sample.
    rank : int
        Rank in the sample, from 1, of the entry that is the bound; at most `samples`.
    capacity : int
        Most candidates that are kept.
    """

    stride: int
    samples: int
    rank: int
    capacity: int

    @classmethod
    def of(cls, tokens: int, rho: int) -> Sampling:
        """Choose the sampling of a region; tokens > rho >= 1."""
        stride = -(-tokens // SAMPLES)
        samples = tokens // stride
        expected = rho / stride
        rank = math.ceil(expected + DEVIATIONS * (math.sqrt(expected) + 1))
        if stride == 1 or rank > samples:  # every key is a candidate
            return cls(1, tokens, tokens, max(tokens, rho + SLACK + LIST_THREADS))
        most = stride * math.ceil(rank + DEVIATIONS * (math.sqrt(rank) + 1))
        return cls(stride, samples, rank, max(samples, min(most, tokens), rho + SLACK + LIST_THREADS))


class DeviceBuilder:
    """Builds lists on the current stream; nothing waits for the GPU.

    Scores are products of 16-bit numbers with float32 sums. Float32 queries and keys are first scaled by a power of two per
    head and rounded to float16; their lists are exact except for keys whose logits agree to about 2^-11.

    Parameters
    ----------
    group_size : int
        Query heads of a KV head, the number that the kernels were compiled for.
    rho : int
        Width of a list.
    scaling : float
        Softmax scale, > 0.
    """

    def __init__(self, kernels: CudaKernels, group_size: int, rho: int, scaling: float) -> None:
        self._kernels, self._group, self._rho, self._scaling = kernels, group_size, rho, scaling

    def build(self, queries: Tensor, keys: Tensor, lists: Tensor) -> None:
        """List the best `rho` keys of each centroid, as build.py's `build_lists` defines them, in any order.

        Parameters
        ----------
        queries : Tensor [H, C, D]
            Centroid queries as attention saw them, not normalised; H = G x group_size. Queries and keys have the dtype and D
            that the kernels were compiled for.
        keys : Tensor [G, n, D]
            Retrieval keys by place.
        lists : Tensor, int32 [G, at least C, rho]
            Receives the lists of centroids 0 .. C - 1; a KV head's lists are contiguous. -1 fills up when n < rho.

        Raises
        ------
        KernelError
            If the tensors do not fit each other or the kernels, or the driver refuses a launch.
        """
        self._check(queries, keys, lists)
        n, centroids = keys.shape[1], queries.shape[1]
        if centroids == 0:
            return
        if n <= self._rho:  # every list holds all keys
            places = torch.arange(self._rho, dtype=torch.int32, device=keys.device)
            lists[:, :centroids] = torch.where(places < n, places, -1)
            return
        queries, keys, factors = self._operands(queries, keys)
        sampling = Sampling.of(n, self._rho)
        band = self.band(sampling.capacity, keys.shape[0], keys.shape[2], centroids)
        for start in range(0, centroids, band):
            end = min(centroids, start + band)
            self._build_band(queries[:, start:end], keys, factors, sampling, lists[:, start:end])

    def band(self, capacity: int, kv_heads: int, dim: int, centroids: int) -> int:
        """Return the number of centroids built at once: whole tiles, as many as WORK_BYTES have room for the candidates of."""
        tile = self._tile_centroids(dim)
        tiles, most = -(-centroids // tile), max(1, WORK_BYTES // (8 * capacity * kv_heads * tile))
        return tile * -(-tiles // -(-tiles // most))

    def _build_band(self, queries: Tensor, keys: Tensor, factors: Tensor, sampling: Sampling, lists: Tensor) -> None:
        # 16-bit queries [H, c, D] and keys [G, n, D], rows contiguous; factors float32 [H]; lists int32 [G, c, rho]
        (heads, centroids, dim), (kv_heads, n, _) = queries.shape, keys.shape
        device = keys.device
        tiles = -(-centroids // self._tile_centroids(dim))
        parts = self._parts(tiles * kv_heads, n)
        sums = torch.empty((parts, heads, centroids, 2), dtype=torch.float32, device=device)
        candidates = torch.empty((kv_heads, centroids, sampling.capacity), dtype=torch.int64, device=device)
        counts = torch.zeros((kv_heads, centroids), dtype=torch.int32, device=device)
        bounds = torch.zeros((kv_heads, centroids), dtype=torch.int64, device=device)
        tensors = {"queries": queries, "keys": keys, "factors": factors, "sums": sums, "candidates": candidates}
        tensors |= {"counts": counts, "bounds": bounds, "lists": lists}
        arguments = ListArguments(
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
            query_stride=queries.stride(0),
            head_stride=keys.stride(0),
            key_stride=keys.stride(1),
            list_stride=lists.stride(0),
            centroids=centroids,
            tokens=n,
            rho=self._rho,
            capacity=sampling.capacity,
            stride=1,
            samples=n,
            rank=sampling.rank,
            parts=parts,
        )
        shared_bytes = self._stage_bytes(dim)
        self._launch("sum", (tiles, kv_heads, parts), PRODUCT_THREADS, arguments, shared_bytes)
        arguments.stride, arguments.samples = sampling.stride, sampling.samples
        sample_parts = self._parts(tiles * kv_heads, sampling.samples)
        self._launch("gather", (tiles, kv_heads, sample_parts), PRODUCT_THREADS, arguments, shared_bytes)
        if sampling.stride > 1:  # otherwise every key is sampled, and a candidate
            self._launch("bound", (centroids, kv_heads, 1), LIST_THREADS, arguments)
            arguments.stride, arguments.samples = 1, n
            self._launch("gather", (tiles, kv_heads, parts), PRODUCT_THREADS, arguments, shared_bytes)
        self._launch("list", (centroids, kv_heads, 1), LIST_THREADS, arguments)

    def _launch(
        self, name: str, grid: tuple[int, int, int], threads: int, arguments: ctypes.Structure, shared_bytes: int = 0
    ) -> None:
        self._kernels.launch(f"kvseek_ctkvr_{name}", grid, threads, arguments, shared_bytes)

    def _tile_centroids(self, dim: int) -> int:
        """Return the centroids of a block that multiplies: it holds 128 queries, or 64 if D > 128 (list_products.cuh)."""
        padded = 1 << (self._group - 1).bit_length()
        return (128 if dim <= 128 else 64) // padded

    @staticmethod
    def _stage_bytes(dim: int) -> int:
        """Return the bytes of shared memory for the tiles of keys (list_products.cuh)."""
        return (3 if dim <= 128 else 2) * TILE_KEYS * (dim + 8) * 2

    def _parts(self, blocks: int, samples: int) -> int:
        """Choose how many blocks share a tile's keys, so that the last wave of blocks leaves few multiprocessors idle."""
        most = max(1, min(MOST_PARTS, -(-samples // TILE_KEYS) // PART_TILES))
        resident = RESIDENT * self._kernels.multiprocessors
        return min(range(1, most + 1), key=lambda parts: -(-blocks * parts // resident) / parts)

    def _operands(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convert to 16-bit rows that kernels can read; also returns factors float32 [H] from products to log2 of weights."""
        factors = torch.full((queries.shape[0],), self._scaling * math.log2(math.e), device=keys.device)
        if keys.dtype is torch.float32:
            queries, query_exponents = _to_half(queries)
            keys, key_exponents = _to_half(keys)
            factors = torch.ldexp(factors, query_exponents + key_exponents.repeat_interleave(self._group))
        if not _readable(keys):
            keys = keys.contiguous()
        return queries.contiguous(), keys, factors

    def _check(self, queries: Tensor, keys: Tensor, lists: Tensor) -> None:
        heads, kv_heads, centroids = queries.shape[0], keys.shape[0], queries.shape[1]
        for name, tensor in (("queries", queries), ("keys", keys), ("lists", lists)):
            if tensor.device != self._kernels.device:
                raise KernelError(
                    f"{name}: on {tensor.device}: must be on {self._kernels.device}, where the kernels are"
                )
        if queries.dtype is not keys.dtype:
            raise KernelError(f"queries: {queries.dtype}: must be {keys.dtype}, as the keys; convert them")
        if heads != kv_heads * self._group or queries.shape[2] != keys.shape[2]:
            raise KernelError(
                f"queries {list(queries.shape)}, keys {list(keys.shape)}: must be [G x {self._group}, C, D] and [G, n, D]"
            )
        fits = lists.shape[0] == kv_heads and lists.shape[1] >= centroids and lists.shape[2] == self._rho
        if not fits or lists.dtype is not torch.int32 or lists.stride()[1:] != (self._rho, 1):
            raise KernelError(
                f"lists: {lists.dtype} {list(lists.shape)}, strides {lists.stride()}: must be int32 [{kv_heads}, at least "
                f"{centroids}, {self._rho}] with contiguous heads"
            )


def _readable(keys: Tensor) -> bool:
    """Whether rows of 16-bit numbers begin at multiples of 16 bytes and are contiguous."""
    return keys.stride(2) == 1 and keys.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in keys.stride()[:2])


def _to_half(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Scale [heads, n, D] by a power of two a head, to float16 with magnitudes below 1.

    Returns
    -------
    Tensor, float16 [heads, n, D]
        Rounded to 11 bits, or to 2^-25 of the head's largest magnitude.
    Tensor, int32 [heads]
        Exponents: tensor = 2^exponent x scaled.
    """
    largest = torch.linalg.vector_norm(tensor, math.inf, dim=(1, 2))
    exponents = torch.frexp(largest.float()).exponent
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), -exponents)
    scaled = torch.empty(tensor.shape, dtype=torch.float16, device=tensor.device)
    torch.mul(tensor, scales[:, None, None], out=scaled)  # in float32, rounded once; a head at a time needs no copy
    return scaled, exponents
