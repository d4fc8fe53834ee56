"""Causal attention over a prompt by the compiled CPU kernel, kernels/cpu/attention/causal_attention.cpp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.errors import KernelError
from kvseek.kernels.structs import c_struct

CausalAttentionArguments = c_struct("kernels/cpu/attention/causal_attention.cpp", "CausalAttentionArguments")


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, library: CpuLibrary) -> Tensor:
    """Attend from the last q tokens of a sequence to the whole sequence, causally, as attention.causal_attention does.

    Sums are float32. To the bit, the result of a query does not depend on the other queries of the call, on keys and values
    of later blocks, or on the number of threads.

    Parameters
    ----------
    queries : Tensor [H, q, D]
        float32 or bfloat16, on the CPU; D is even. Only the last dimension need be contiguous, here and below.
    keys, values : Tensor [G, n, D], n >= q >= 1, H a multiple of G
        dtype and device of the queries.
    scaling : float
        Factor of the scores, > 0.

    Returns
    -------
    Tensor [q, H, D], contiguous

    Raises
    ------
    KernelError
        On a shape, dtype, device or stride that the kernel does not support.
    """
    heads, q, dim = queries.shape
    kv_heads, n = keys.shape[:2]
    _check(queries, keys, values, scaling)
    out = queries.new_empty(q, heads, dim)
    arguments = CausalAttentionArguments(
        queries=queries.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        out=out.data_ptr(),
        query_head_stride=queries.stride(0),
        query_stride=queries.stride(1),
        key_head_stride=keys.stride(0),
        key_stride=keys.stride(1),
        value_head_stride=values.stride(0),
        value_stride=values.stride(1),
        kv_heads=kv_heads,
        group=heads // kv_heads,
        q=q,
        n=n,
        dim=dim,
        bfloat16=queries.dtype is torch.bfloat16,
        threads=torch.get_num_threads(),
        scaling=scaling,
    )
    library.function("kvseek_causal_attention", CausalAttentionArguments)(arguments)
    return out


def _check(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
    heads, q, dim = queries.shape
    kv_heads, n = keys.shape[:2]
    if queries.dtype not in (torch.float32, torch.bfloat16):
        _refuse("dtype", queries.dtype, "float32 or bfloat16")
    if dim % 2:
        _refuse("head_dim", dim, "even")
    if heads % kv_heads:
        _refuse("num_heads", heads, f"a multiple of num_kv_heads = {kv_heads}")
    if not 1 <= q <= n:
        _refuse("queries", q, f"1 to {n}, the number of keys")
    if not scaling > 0:
        _refuse("scaling", scaling, "> 0")
    for name, part in (("keys", keys), ("values", values)):
        if (part.shape, part.dtype) != ((kv_heads, n, dim), queries.dtype):
            _refuse(name, (tuple(part.shape), part.dtype), f"{(kv_heads, n, dim)}, {queries.dtype}")
    for name, part in (("queries", queries), ("keys", keys), ("values", values)):
        if not part.is_cpu or part.stride(2) != 1:
            _refuse(f"{name}' device and strides", (part.device, part.stride()), "the CPU, and 1 in the last dimension")


def _refuse(name: str, value: Any, limit: str) -> None:
    raise KernelError(
        f"native causal attention: {name} = {value}: must be {limit}; build the engine with --kernels reference"
    )
