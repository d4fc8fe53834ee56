"""CTkvr on host cores: rerank and attention in C++, for CUDA graphs and for the engine on the CPU; and there the construction of
the query-centroid inverted file (build.py says what is correct).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import c_int32, c_void_p
from typing import Any

import torch
from torch import Tensor

from kvseek.core.batch import Batch, Selection
from kvseek.core.cpu_library import CpuLibrary, pointer
from kvseek.core.errors import KernelError
from kvseek.core.index_context import IndexContext, LayerRows, ShapeLimits
from kvseek.kernels.arguments import pointers, require_fit
from kvseek.kernels.reference.codes.key_codes import STEPS
from kvseek.kernels.reference.codes.store import CodeStore
from kvseek.kernels.structs import c_struct
from kvseek.plugins.ctkvr.reference import ReferenceIndex

HostLists = c_struct("plugins/ctkvr/cpu/host_lists.cpp", "HostLists")

# MAX_HOST_DIM, MAX_HOST_GROUP and HOST_DIM_STEP of host_step.h
LIMITS = ShapeLimits(max_head_dim=256, max_group_size=16, head_dim_step=32)
MOST_THREADS = 1024  # most threads of a pool (host_pool.h)
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
DEFECT = "kvseek is at fault, or a request was dropped while its step ran: report it; execution 'codes' does without"
ERRORS = {
    1: f"a size that host kernels do not support: head_dim must be a multiple of {LIMITS.head_dim_step} up to "
    f"{LIMITS.max_head_dim}, at most {LIMITS.max_group_size} query heads may share a KV head; set execution to 'codes'",
    2: f"a number of recalled places that is negative or beyond the capacity; {DEFECT}",
    3: f"a slot that the extent table does not hold; {DEFECT}",
    4: f"a recalled place outside of its slot's extents; {DEFECT}",
    5: "no memory for intermediate results; lower the batch size or the recall (probes, recall_factor, recent)",
}
HostStep = c_struct("plugins/ctkvr/cpu/host_step.h", "HostStep")
HostRecall = c_struct("plugins/ctkvr/cpu/host_recall.cpp", "HostRecall")
HostPoolArguments = c_struct("plugins/ctkvr/cpu/host_pool.h", "HostPoolArguments")


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


class HostPool:
    """Threads for host steps. Until the pool is closed, they watch for work or sleep.

    Attributes
    ----------
    pointer : int
        Address of the pool, for `HostStep.pool`; 0 once the pool is closed.
    threads : int
        Number of threads that work on a step: the thread that calls it, and `threads - 1` of the pool's own.
    """

    def __init__(self, library: CpuLibrary, threads: int, *, pinned: bool) -> None:
        """Start threads.

        Parameters
        ----------
        threads : int
            From 1 to MOST_THREADS. Leave a core for the thread that waits for the GPU meanwhile.
        pinned : bool
            Bind each of the pool's own threads to one of the caller's cores, without the first, and each thread that calls a
            step to the first core, for good: meant for CUDA's host-function thread.

        Raises
        ------
        KernelError
            If a value is out of range, or the system refuses to start or to bind threads.
        """
        self.threads = threads
        self._destroy = library.function("kvseek_ctkvr_pool_destroy", c_void_p)
        arguments = HostPoolArguments(threads=threads, pinned=pinned)
        library.function("kvseek_ctkvr_pool_create", HostPoolArguments)(arguments)
        if arguments.error:
            reason = os.strerror(arguments.error)
            raise KernelError(
                f"host threads = {threads}: must be from 1 to {MOST_THREADS}, and what the system allows ({reason}); lower it; "
                "of an engine, set execution to 'codes' to do without"
            )
        self.pointer: int = arguments.pool

    def close(self) -> None:
        """End the threads. No step may be running on them then, or be started afterwards."""
        if self.pointer:
            self._destroy(self.pointer)
        self.pointer = 0


def host_step(library: CpuLibrary) -> ctypes._NamedFuncPointer:
    """Return kvseek_ctkvr_host_step of a library, which takes a HostStep and writes its results or its `error`."""
    return library.function("kvseek_ctkvr_host_step", HostStep)


def host_function(library: CpuLibrary) -> int:
    """Return the address of kvseek_ctkvr_host_step, which has the signature of a CUDA host function (CUhostFn)."""
    address = ctypes.cast(host_step(library), c_void_p).value
    assert address is not None, "a symbol that was found has an address"
    return address


def raise_error(code: int) -> None:
    """Raise KernelError for a HostStep's error code; 0 is none."""
    if code:
        raise KernelError(f"CTkvr on host cores: {ERRORS.get(code, f'unknown error {code}')}")


class NativeIndex(ReferenceIndex):
    """The reference's centroids, whose lists are made, recalled and reranked by compiled kernels.

    Rows and lists equal the reference's, except where values of keys differ only by rounding. Lists hold their places in
    ascending order, not best first.
    """

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        assert context.library is not None, "create() makes a NativeIndex only for a compiled library"
        check_supported(context)
        host_lists(context.library)  # so that the library of an older engine is refused before there is a request
        self._library = context.library

    def make_lists(self, queries: Tensor, keys: Tensor, lists: Tensor) -> None:
        for name, tensor in (("queries", queries), ("keys", keys)):
            require_fit(name, tensor, self.context)
        write_lists(self._library, queries, keys, lists, self.context.scaling)

    def select(self, queries: Tensor, batch: Batch) -> Selection:
        require_fit("queries", queries, self.context)
        slots, lengths, top_k = batch.slots, batch.lengths, self.config.top_k
        chosen = [slot if n > top_k else -1 for slot, n in zip(slots, lengths, strict=True)]
        recalled, counts = self._recall_all(queries, slots, chosen)
        rows, best = self._rerank_all(queries.contiguous(), slots, recalled, counts)
        for request, (slot, n) in enumerate(zip(slots, lengths, strict=True)):
            if n > top_k:
                self.remember(slot, queries[request], best[request])
            else:
                rows[request, :, :n] = torch.arange(n, dtype=torch.int32)
        return Selection(rows)

    def _recall_all(self, queries: Tensor, slots: Sequence[int], chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Recall candidates int32 [batch, G, capacity], ascending, and their number int32 [batch, G]; 0 if `chosen` is -1."""
        shape = (len(slots), self.context.num_kv_heads)
        probed = torch.full((*shape, self.config.probes), -1, dtype=torch.int32)
        for request, slot in enumerate(chosen):
            if slot >= 0:
                found = self.probe(queries[request], slot)
                probed[request, :, : found.shape[1]] = found
        lengths = [self.context.lengths[slot] if slot >= 0 else 0 for slot in chosen]
        recalled = torch.empty((*shape, self.capacity), dtype=torch.int32)
        counts = torch.empty(shape, dtype=torch.int32)
        array = c_int32 * len(slots)
        arrays = (array(*slots), array(*(self.first_recent(slot) for slot in slots)), array(*lengths))
        places = [ctypes.addressof(values) for values in arrays]
        arguments = HostRecall(
            lists=pointer(self.lists),
            probed=pointer(probed),
            slots=places[0],
            first_recent=places[1],
            lengths=places[2],
            recalled=pointer(recalled),
            recalled_count=pointer(counts),
            batch=len(slots),
            kv_heads=shape[1],
            ring=self.ring,
            width=self.width,
            probes=self.config.probes,
            capacity=self.capacity,
            threads=torch.get_num_threads(),
        )
        self._library.function("kvseek_ctkvr_host_recall", HostRecall)(arguments)
        return recalled, counts

    def _rerank_all(
        self, queries: Tensor, slots: Sequence[int], recalled: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rank candidates: best rows int32 [batch, G, top_k], ascending, and lists int32 [batch, G, width]; -1 fills up."""
        layer_rows = self.context.rows
        assert layer_rows is not None, "the rows are placed before anything is built"
        rows = torch.empty((*counts.shape, self.config.top_k), dtype=torch.int32)
        best = torch.empty((*counts.shape, self.width), dtype=torch.int32)
        error, numbers = c_int32(0), (c_int32 * len(slots))(*slots)
        step = describe_step(
            self,
            layer_rows,
            len(slots),
            queries=pointer(queries),
            recalled=pointer(recalled),
            recalled_count=pointer(counts),
            slots=ctypes.addressof(numbers),
            selected=pointer(rows),
            best=pointer(best),
            error=ctypes.addressof(error),
            threads=torch.get_num_threads(),
            **({} if self.codes is None else describe_codes(self.codes)),
        )
        host_step(self._library)(step)
        raise_error(error.value)
        return rows, best


def describe_codes(codes: CodeStore) -> dict[str, Any]:
    """Describe codes that keys are ranked by, as fields of HostStep."""
    arrays = pointers(codes, "high", "low", "scales", "means", "mean_steps", "signs")
    return {
        **arrays,
        "block": codes.block,
        "padded_dim": codes.signs.shape[0],
        "step": STEPS[codes.bits],
    }


def describe_step(index: ReferenceIndex, rows: LayerRows, batch: int, **fields: Any) -> ctypes.Structure:
    """Describe a step of `batch` requests over an index's lists and a layer's rows; `fields` name its buffers and threads."""
    context, table = index.context, index.context.extents.table
    return HostStep(
        table=pointer(table),
        rows=rows.pool.data_ptr(),
        extent_stride=rows.extent_stride,
        batch=batch,
        heads=context.num_heads,
        kv_heads=context.num_kv_heads,
        head_dim=context.head_dim,
        capacity=index.capacity,
        top_k=index.config.top_k,
        rho=index.width,
        table_slots=table.shape[0],
        max_extents=table.shape[1],
        dtype=TYPES[context.dtype],
        scaling=context.scaling,
        **fields,
    )


def check_supported(context: IndexContext) -> None:
    """Raise KernelError unless the host kernels support the shapes and the dtype of an index, which may be on any device."""
    fault = LIMITS.fault(context.head_dim, context.group_size)
    if context.dtype not in TYPES:
        fault = f"dtype = {context.dtype}: must be float32, bfloat16 or float16"
    if fault:
        on_cpu = context.device.type == "cpu"
        remedy = "build the engine with --kernels reference" if on_cpu else "set execution to 'codes'"
        raise KernelError(f"CTkvr on host cores: {fault}; {remedy}")
