"""Construction of the query-centroid inverted file on the CPU by compiled kernels; build.py says what is correct."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvseek.core.cpu_library import CpuLibrary
from kvseek.kernels.structs import c_struct

HostLists = c_struct("plugins/ctkvr/cpu/host_lists.cpp", "HostLists")


def host_lists(library: CpuLibrary) -> ctypes._NamedFuncPointer:
    """Return kvseek_ctkvr_host_lists of a library; raises KernelError if the library is older than it."""
    return library.function("kvseek_ctkvr_host_lists", HostLists)


def write_lists(library: CpuLibrary, queries: Tensor, keys: Tensor, lists: Tensor, scaling: float) -> None:
    """Write the lists that `build_lists` defines, on PyTorch's number of threads.

    A list holds the places that the definition's does, except where values of keys differ only by rounding: products are
    float32 sums, of exact products for bfloat16.

    Parameters
    ----------
    library : CpuLibrary
    queries : Tensor [H, C, D]
        Centroid queries, on the CPU; float32, bfloat16 or float16. H is at most 16 times G, D even.
    keys : Tensor [G, n, D]
        Retrieval keys by place, of the queries' dtype.
    lists : Tensor, int32 [G, C, rho]
        Written: places in ascending order; -1 fills up when n < rho. The lists of a KV head are contiguous.
    scaling : float
        Softmax scale, positive.
    """
    queries, keys = _operand(queries), _operand(keys)
    kv_heads, tokens, dim = keys.shape
    assert lists.stride()[1:] == (lists.shape[2], 1), "lists of a KV head are contiguous"
    arguments = HostLists(
        queries=queries.data_ptr(),
        keys=keys.data_ptr(),
        lists=lists.data_ptr(),
        query_head_stride=queries.stride(0),
        query_stride=queries.stride(1),
        key_head_stride=keys.stride(0),
        key_stride=keys.stride(1),
        list_head_stride=lists.stride(0),
        kv_heads=kv_heads,
        group=queries.shape[0] // kv_heads,
        centroids=queries.shape[1],
        tokens=tokens,
        dim=dim,
        width=lists.shape[2],
        bfloat16=keys.dtype is torch.bfloat16,
        threads=torch.get_num_threads(),
        scaling=scaling,
    )
    host_lists(library)(arguments)


def _operand(tensor: Tensor) -> Tensor:
    """Return a tensor whose rows the kernels can read: contiguous ones of float32 or bfloat16; float16 is widened."""
    readable = tensor.float() if tensor.dtype is torch.float16 else tensor
    return readable if readable.stride(-1) == 1 else readable.contiguous()
