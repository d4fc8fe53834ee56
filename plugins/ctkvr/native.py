"""CTkvr on the CPU with compiled kernels: the reference's centroids, listed and searched in C++ (build.py and reference.py say
what is correct). In engines on a GPU host cores run the same search (host_cores.py).
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from kvseek.core.batch import Batch, Selection
from kvseek.core.cpu_library import CpuLibrary, pointer
from kvseek.core.index_context import IndexContext
from kvseek.kernels.arguments import require_fit
from kvseek.kernels.cpu.attention.attend import AttendArguments
from kvseek.kernels.cpu.codes.store import NativeCodeStore
from kvseek.kernels.cpu.selection import NativeSelection, require_native
from kvseek.kernels.reference.codes.key_codes import STEPS
from kvseek.kernels.structs import c_struct

from .reference import ReferenceIndex

HostLists = c_struct("plugins/ctkvr/cpu/lists.cpp", "HostLists")
SelectArguments = c_struct("plugins/ctkvr/cpu/select.cpp", "CtkvrSelectArguments")
HostStep = c_struct("plugins/ctkvr/cpu/select.cpp", "CtkvrHostStep", SelectArguments, AttendArguments)


def write_lists(library: CpuLibrary, queries: Tensor, keys: Tensor, lists: Tensor, scaling: float) -> None:
    """Write the lists that `build_lists` defines, on PyTorch's number of threads.

    A list holds the places that the definition's does, except where values of keys differ only by rounding: products are
    float32 sums, of exact products for bfloat16.

    Parameters
    ----------
    library : CpuLibrary
    queries : Tensor [H, C, D]
        Centroid queries, on the CPU; float32 or bfloat16. H is at most 16 times G, D even.
    keys : Tensor [G, n, D]
        Retrieval keys by place, of the queries' dtype.
    lists : Tensor, int32 [G, C, rho]
        Written: places in ascending order; -1 fills up when n < rho. The lists of a KV head are contiguous.
    scaling : float
        Softmax scale, positive.
    """
    queries, keys = (rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (queries, keys))
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
    library.function("kvseek_ctkvr_host_lists", HostLists)(arguments)


def selection_sizes(index: ReferenceIndex) -> dict[str, Any]:
    """Return the sizes of an index and its layer, as fields of SelectArguments."""
    context = index.context
    return {
        "kv_heads": context.num_kv_heads,
        "group": context.group_size,
        "dim": context.head_dim,
        "top_k": index.config.top_k,
        "width": index.width,
        "capacity": index.capacity,
        "bfloat16": context.dtype is torch.bfloat16,
        "scaling": context.scaling,
    }


class NativeIndex(ReferenceIndex):
    """The reference's centroids, whose lists are made, recalled and reranked by compiled kernels.

    Rows and lists equal the reference's, except where values of keys differ only by rounding. Lists hold their places in
    ascending order, not best first.
    """

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        require_native("CTkvr's kernels", context)
        assert context.library is not None, "create() makes a NativeIndex only for a compiled library"
        self._library = context.library
        fields: dict[str, Any] = selection_sizes(self)
        if isinstance(self.codes, NativeCodeStore):
            fields |= self.codes.arguments | {"step": STEPS[self.codes.bits]}
        arguments: ctypes.Structure = SelectArguments(
            **fields,
            lists=pointer(self.lists),
            listed=self.listed.buffer_info()[0],
            ring=self.ring,
            probes=self.config.probes,
            recent=self.config.recent,
        )
        self._selection = NativeSelection("kvseek_ctkvr_select", arguments, context)

    def make_lists(self, queries: Tensor, keys: Tensor, lists: Tensor) -> None:
        for name, tensor in (("queries", queries), ("keys", keys)):
            require_fit(name, tensor, self.context)
        write_lists(self._library, queries, keys, lists, self.context.scaling)

    def select(self, queries: Tensor, batch: Batch) -> Selection:
        rows, shape = self.context.rows, (batch.size, self.context.num_kv_heads)
        assert rows is not None, "the rows are placed before anything is built"
        retrieving = [n > self.config.top_k for n in batch.lengths]
        probed = torch.full((*shape, self.config.probes), -1, dtype=torch.int32)
        for request, slot in enumerate(batch.slots):
            if retrieving[request]:
                found = self.probe(queries[request], slot)
                probed[request, :, : found.shape[1]] = found
        best = torch.empty((*shape, self.width), dtype=torch.int32)
        selection = self._selection(
            queries,
            batch,
            best=pointer(best),
            probed=pointer(probed),
            pool=rows.pool.data_ptr(),
            extent_stride=rows.extent_stride,
        )
        for request, slot in enumerate(batch.slots):
            if retrieving[request]:
                self.remember(slot, queries[request], best[request])
        return selection
