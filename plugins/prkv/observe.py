"""Attention of the observation window to keys, by CUDA kernels: static.observation_scores on the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.core.cuda import CudaKernels
from kvseek.core.errors import KernelError
from kvseek.kernels.structs import c_struct

THREADS = 256
BLOCKS_OF_MULTIPROCESSOR = 2  # blocks that a multiprocessor holds at once
ALIGNMENT = 16  # bytes that the kernels load at once, to which rows must be aligned

ObserveArguments = c_struct("plugins/prkv/cuda/observe.cu", "ObserveArguments")


def observe(kernels: CudaKernels, queries: Tensor, keys: Tensor, scaling: float, valid: Tensor | None = None) -> Tensor:
    """Compute the softmax attention of the observation window to each key, averaged over the window and a group's heads.

    Makes two launches on the current stream, and writes nothing as large as the products of queries and keys. Results differ
    from those of static.observation_scores by rounding.

    Parameters
    ----------
    queries : Tensor [H, w, D]
    keys : Tensor [G, n, D], n >= 1
        Queries and keys have the kernels' dtype and are on the GPU; each row is contiguous and aligned to 16 bytes.
    valid : Tensor, int32 [G], or None
        Number of first keys of each KV head that count; the keys after them score -1.

    Returns
    -------
    Tensor, float32 [G, n]
    """
    require_rows("keys", keys, keys.dtype)
    require_rows("queries", queries, keys.dtype)
    (heads, count), (all_heads, window) = keys.shape[:2], queries.shape[:2]
    chunks = max(1, BLOCKS_OF_MULTIPROCESSOR * kernels.multiprocessors // heads)
    scores = torch.empty((heads, count), dtype=torch.float32, device=keys.device)
    shape = (heads, chunks, all_heads // heads * window, 2)
    parts = torch.empty(shape, dtype=torch.float32, device=keys.device)
    arguments = ObserveArguments(
        keys=keys.data_ptr(),
        queries=queries.data_ptr(),
        valid=None if valid is None else valid.data_ptr(),
        parts=parts.data_ptr(),
        scores=scores.data_ptr(),
        key_head_stride=keys.stride(0),
        key_stride=keys.stride(1),
        query_head_stride=queries.stride(0),
        query_stride=queries.stride(1),
        count=count,
        window=window,
        scaling=scaling,
    )
    for name in ("kvseek_prkv_normalise", "kvseek_prkv_observe"):
        kernels.launch(name, (chunks, heads, 1), THREADS, arguments)
    return scores


def require_rows(name: str, rows: Tensor, dtype: torch.dtype) -> None:
    """Raise KernelError unless the kernels can read rows [heads, n, D] of `dtype` without a copy."""
    strides = [stride * dtype.itemsize for stride in rows.stride()[:2]]
    aligned = all(number % ALIGNMENT == 0 for number in (rows.data_ptr(), *strides))
    if rows.dtype is not dtype or not rows.is_cuda or rows.stride(-1) != 1 or not aligned:
        limit = f"{dtype} on the GPU, rows of neighbouring numbers from multiples of {ALIGNMENT} bytes on"
        raise KernelError(f"{name}: {rows.dtype} on {rows.device}, strides {rows.stride()}: must be {limit}")
