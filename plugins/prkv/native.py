"""PRKV with codes on the CPU, with compiled kernels: the reference's index, encoded and searched in C++."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvseek.core.batch import Batch, Selection
from kvseek.core.cpu_library import CpuLibrary, pointer
from kvseek.core.errors import KernelError
from kvseek.core.index_context import IndexContext
from kvseek.kernels.cpu.codes.store import NativeCodeStore
from kvseek.kernels.cpu.selection import NativeSelection
from kvseek.kernels.reference.codes.key_codes import STEPS
from kvseek.kernels.structs import c_struct

from .reference import ReferenceIndex
from .summaries import CODE_BITS, Codes

PrkvSelectArguments = c_struct("plugins/prkv/cpu/select.cpp", "PrkvSelectArguments")


class NativeIndex(ReferenceIndex):
    """The reference's arrays, filled and searched by compiled kernels.

    From equal codes, estimates equal the reference's to the bit; pages' scores and softmax weights differ by rounding, and so do
    the scores that a static set is chosen by.
    """

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        assert context.library is not None, "create() makes a NativeIndex only for a compiled library"
        assert isinstance(self.summaries, Codes), "create() makes a NativeIndex only for codes"
        assert isinstance(self.summaries.store, NativeCodeStore), "code_store makes this kind for a compiled library"
        self.observe = partial(observe, context.library)
        arguments = PrkvSelectArguments(
            **self.summaries.store.arguments,
            statics=pointer(self.static),
            static_rows=pointer(self.static_rows),
            picked=pointer(self.picked),
            recent=pointer(self.recent),
            received=self.received.buffer_info()[0],
            group=context.group_size,
            top_k=self.config.top_k,
            page=self.config.page,
            recent_queries=self.config.update_queries,
            most_static=self.config.most_static,
            scaling=context.scaling,
            step=STEPS[CODE_BITS],
        )
        self._selection = NativeSelection("kvseek_prkv_select", arguments, context)

    def select(self, queries: Tensor, batch: Batch) -> Selection:
        return self._selection(queries, batch)


PrkvObserveArguments = c_struct("plugins/prkv/cpu/observe.cpp", "PrkvObserveArguments")


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
    library.function("kvseek_prkv_observe", PrkvObserveArguments)(arguments)
    return scores
