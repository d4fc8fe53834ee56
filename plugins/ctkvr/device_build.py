"""Construction of the query-centroid inverted file on the GPU: matrix products by cuBLAS, lists by build.cu."""

from __future__ import annotations

import ctypes
import math
from ctypes import c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from kvseek.engine.cuda import CudaKernels
from kvseek.engine.errors import KernelError

LOGIT_BYTES = 256 << 20  # logits of a tile of centroids that are held at once
ROW_STEP = 64  # logits: rows of whole cache lines, which cuBLAS wants too
SLACK = 256  # ties that a cut of the buffer may leave in it (list_stream.cuh)
PIECE = 8  # logits of a thread's load (list_stream.cuh)
HELD_ENTRIES = 10  # of a thread while heads are merged (MOST_HELD of build.cu)
STATIC_BYTES = 9 << 10  # shared memory that the kernel declares itself, rounded up


class ListArguments(ctypes.Structure):
    """Arguments of kvseek_ctkvr_list, as in build.cu."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "factors", "lists")),
        ("row_stride", c_int64),
        *((name, c_int32) for name in ("centroids", "tokens", "rho", "capacity", "slack", "slots")),
    )


class DeviceBuilder:
    """Builds lists on the current stream; nothing waits for the GPU.

    Logits are float16: queries and keys are scaled by powers of two, one a head, that keep products below 2 D, multiplied
    with float32 sums and rounded once. So a list is exact but for keys whose attention weight is within 2^-11 of the
    logit of the last key that it holds.

    Parameters
    ----------
    group_size : int
        Query heads of a KV head, as the kernels were compiled for.
    rho : int
        Width of a list.
    scaling : float
        Softmax scale, > 0.

    Raises
    ------
    KernelError
        If the GPU's shared memory does not hold `rho` places.
    """

    def __init__(self, kernels: CudaKernels, group_size: int, rho: int, scaling: float) -> None:
        self._kernels, self._group, self._rho, self._scaling = kernels, group_size, rho, scaling
        properties = torch.cuda.get_device_properties(kernels.device)
        limit = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # the stubs lag behind
        # Two blocks of 512 threads fill a processor of the large GPUs; the others have no room for so large a buffer.
        fitting = [threads for threads in (512, 256) if self._shared_bytes(threads) + STATIC_BYTES <= limit]
        fitting = [threads for threads in fitting if rho <= HELD_ENTRIES * threads]
        if not fitting:
            raise KernelError(
                f"rho = ceil(recall_factor * top_k) = {rho}: lists of at most {self._most(limit)} places are built with "
                f"{limit} bytes of shared memory; lower top_k or recall_factor"
            )
        self._threads = fitting[0]

    def build(self, queries: Tensor, keys: Tensor, lists: Tensor) -> None:
        """List the best `rho` keys of each centroid, as build.py's `build_lists` defines them, in any order.

        Parameters
        ----------
        queries : Tensor [H, C, D]
            Centroid queries as attention saw them, not normalised; H = G x group_size.
        keys : Tensor [G, n, D]
            Retrieval keys by place.
        lists : Tensor, int32 [G, at least C, rho]
            Receives the lists of centroids 0 .. C - 1; a KV head's lists are contiguous. -1 fills up when n < rho.
        """
        self._check(queries, keys, lists)
        (kv_heads, n, _), centroids = keys.shape, queries.shape[1]
        if centroids == 0:
            return
        if n <= self._rho:  # everything is in every list
            places = torch.arange(self._rho, dtype=torch.int32, device=keys.device)
            lists[:, :centroids] = torch.where(places < n, places, -1)
            return
        queries, query_exponents = _to_half(queries)
        for head in range(kv_heads):
            heads = slice(head * self._group, (head + 1) * self._group)
            head_keys, key_exponent = _to_half(keys[head : head + 1], padded=-(-n // ROW_STEP) * ROW_STEP)
            exponents = query_exponents[heads] + key_exponent
            factors = torch.ldexp(
                torch.full_like(exponents, self._scaling * math.log2(math.e), dtype=torch.float32), exponents
            )
            self._build_head(queries[heads], head_keys[0], factors, n, lists[head])

    def tile(self, tokens: int, centroids: int) -> int:
        """Centroids whose logits over `tokens` keys are held at once: at most LOGIT_BYTES, in equal tiles."""
        padded = -(-tokens // ROW_STEP) * ROW_STEP
        most = max(1, LOGIT_BYTES // (2 * self._group * padded))
        return -(-centroids // -(-centroids // most))

    def _build_head(self, queries: Tensor, keys: Tensor, factors: Tensor, n: int, lists: Tensor) -> None:
        # queries float16 [g, C, D], keys float16 [padded, D], lists int32 [at least C, rho]
        centroids, padded = queries.shape[1], keys.shape[0]
        tile = self.tile(n, centroids)
        logits = torch.empty((self._group * tile, padded), dtype=torch.float16, device=keys.device)
        for start in range(0, centroids, tile):
            part = queries[:, start : start + tile].reshape(-1, queries.shape[2])
            torch.mm(part, keys.T, out=logits[: part.shape[0]])
            count = part.shape[0] // self._group
            arguments = ListArguments(
                logits=logits.data_ptr(),
                factors=factors.data_ptr(),
                lists=lists[start : start + count].data_ptr(),
                row_stride=padded,
                centroids=count,
                tokens=n,
                rho=self._rho,
                capacity=self._capacity(self._threads),
                slack=SLACK,
                slots=self._slots,
            )
            shared_bytes = self._shared_bytes(self._threads)
            self._kernels.launch("kvseek_ctkvr_list", (count, 1, 1), self._threads, arguments, shared_bytes)

    def _capacity(self, threads: int) -> int:
        return self._rho + SLACK + PIECE * threads

    @property
    def _slots(self) -> int:
        """Of the table that merges two heads' entries, four fifths full at most; one head merges nothing."""
        return -(-5 * self._rho // 2) if self._group > 1 else 0

    def _shared_bytes(self, threads: int) -> int:
        return 8 * (self._capacity(threads) + self._slots)

    def _most(self, limit: int) -> int:
        """Most places of a list that some number of threads has room for."""
        share = 2 / 7 if self._group > 1 else 1.0  # of the entries; the table takes the others
        entries = {threads: (limit - STATIC_BYTES) // 8 - SLACK - PIECE * threads for threads in (512, 256)}
        return max(min(int(share * room), HELD_ENTRIES * threads) for threads, room in entries.items())

    def _check(self, queries: Tensor, keys: Tensor, lists: Tensor) -> None:
        heads, kv_heads, centroids = queries.shape[0], keys.shape[0], queries.shape[1]
        for name, tensor in (("queries", queries), ("keys", keys), ("lists", lists)):
            if tensor.device != self._kernels.device:
                raise KernelError(
                    f"{name}: on {tensor.device}: must be on {self._kernels.device}, where the kernels are"
                )
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


def _to_half(tensor: Tensor, padded: int | None = None) -> tuple[Tensor, Tensor]:
    """Scale [heads, n, D] by a power of two a head, to float16 with magnitudes below 1.

    Returns
    -------
    Tensor, float16 [heads, padded or n, D]
        Of 16-bit numbers exact to 2^-25 of the head's largest magnitude, of float32 to 11 bits; padded with 0.
    Tensor, int32 [heads]
        Exponents: tensor = 2^exponent x scaled.
    """
    heads, n, dim = tensor.shape
    largest = torch.linalg.vector_norm(tensor, math.inf, dim=(1, 2))
    exponents = torch.frexp(largest.float()).exponent
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), -exponents)
    scaled = torch.empty((heads, padded or n, dim), dtype=torch.float16, device=tensor.device)
    torch.mul(tensor, scales[:, None, None], out=scaled[:, :n])  # in float32, rounded once
    scaled[:, n:] = 0
    return scaled, exponents
