"""What the observation window attends to, by the compiled CPU kernel, cpu/observe.cpp."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from functools import lru_cache

import torch
from torch import Tensor

from kvseek.core.cpu_library import CpuLibrary, pointer
from kvseek.core.errors import KernelError


class PrkvObserveArguments(ctypes.Structure):
    """Arguments of kvseek_prkv_observe, as in observe.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("queries", "keys", "valid", "scores")),
        *((name, c_int64) for name in ("kv_heads", "rows", "n", "dim", "head_stride", "key_stride")),
        *((name, c_int64) for name in ("bfloat16", "threads")),
        ("scaling", c_double),
    )


@lru_cache(maxsize=8)
def kernel(library: CpuLibrary) -> ctypes._NamedFuncPointer:
    """Return kvseek_prkv_observe of a library, declared once."""
    return library.function("kvseek_prkv_observe", c_void_p)


def observe(library: CpuLibrary, queries: Tensor, keys: Tensor, scaling: float, valid: Tensor | None = None) -> Tensor:
    """Compute static.observation_scores: queries [H, w, D] and keys [G, n, D] to float32 [G, n].

    To the bit, the result does not depend on the number of threads. Raises KernelError for dtypes other than float32 and
    bfloat16, or if queries and keys differ in it.
    """
    if queries.dtype is not keys.dtype or keys.dtype not in (torch.float32, torch.bfloat16):
        raise KernelError(
            f"native observation: queries {queries.dtype}, keys {keys.dtype}: must both be float32 or bfloat16; build the "
            "engine with --kernels reference"
        )
    kv_heads, n, dim = keys.shape
    queries, scores = queries.contiguous(), torch.empty((kv_heads, n), dtype=torch.float32)
    keys, valid = keys if keys.stride(2) == 1 else keys.contiguous(), None if valid is None else valid.contiguous()
    arguments = PrkvObserveArguments(
        queries=pointer(queries),
        keys=keys.data_ptr(),
        valid=None if valid is None else pointer(valid),
        scores=pointer(scores),
        kv_heads=kv_heads,
        rows=queries.shape[0] // kv_heads * queries.shape[1],
        n=n,
        dim=dim,
        head_stride=keys.stride(0),
        key_stride=keys.stride(1),
        bfloat16=keys.dtype is torch.bfloat16,
        threads=torch.get_num_threads(),
        scaling=scaling,
    )
    kernel(library)(ctypes.byref(arguments))
    return scores
