"""Nested codes on the GPU: the reference's arrays, filled and searched by CUDA kernels (docs/nested_codes.md)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.core.batch import Batch, most_requests
from kvseek.core.config import EXTENT_TOKENS, require
from kvseek.core.index_context import IndexContext
from kvseek.core.selection import Selection
from kvseek.kernels.arguments import (
    POWER_SUM_BYTES,
    blocks_for,
    pointers,
    require_fit,
    require_numbered_rows,
    require_room,
)
from kvseek.kernels.cuda.codes.store import MAX_DIM, MIN_DIM, CudaCodeStore
from kvseek.kernels.structs import c_struct

from .reference import ReferenceIndex

BINS = 4096  # of a histogram of scores
SCAN_THREADS, CHOOSE_THREADS = 256, 512
SCAN_BLOCKS = 2  # blocks of the scan of a multiprocessor
MOST_BLOCKS_OF_SCAN = 1024  # of a task
MOST_BLOCKS = 16  # blocks of a task in the choice
HELD_CANDIDATES = 1600  # that the choice ranks without reading them again

SelectArguments = c_struct("plugins/nested/cuda/select.cuh", "SelectArguments")


class Workspace:
    """Intermediate results of a selection, for batches of up to `most` requests.

    Layers run one after another, and so do the graphs of batch sizes, so one workspace serves all of them. It is allocated when
    it is made, because captured graphs hold its addresses, and because it has to be counted when memory is divided. Scores lie in
    scratch extents: 2 bytes per token and KV head.

    Attributes
    ----------
    most : int
        Requests of the largest batch that the slots allow, those that fill up a graph included (most_requests).
    capacity : int
        Most candidates of a task. Keys whose score lies in the same bin as the last wanted one's are candidates as well, as far
        as there is room.
    scores : Tensor, int16 [scratch extents, G, 1024]
    """

    def __init__(self, context: IndexContext, candidates: int, multiprocessors: int) -> None:
        self._kv_heads, self._multiprocessors = context.num_kv_heads, multiprocessors
        self.most = most_requests(context.extents.slots)
        self.capacity = max(candidates, min(2 * candidates, HELD_CANDIDATES))
        tasks = self.most * context.num_kv_heads
        _, blocks = self.blocks(self.most)
        lists = (context.num_kv_heads, blocks)

        def new(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=context.device)

        self.scores = new((context.scratch_extents, context.num_kv_heads, EXTENT_TOKENS), torch.int16)
        self.places, self.keys = (new((*lists, self.capacity), torch.int32) for _ in range(2))
        self.estimates = new((*lists, self.capacity, context.group_size), torch.float32)
        self.counts = new(lists, torch.int32)
        self.normalisers = new((*lists, context.group_size, POWER_SUM_BYTES), torch.uint8)
        # Each selection leaves zeros behind.
        self.totals = torch.zeros((tasks, BINS), dtype=torch.int32, device=context.device)
        self.finished = torch.zeros(tasks, dtype=torch.int32, device=context.device)

    def blocks(self, batch: int) -> tuple[int, int]:
        """Return the blocks of a KV head in the scan and in the choice of a batch."""
        scan = blocks_for(batch, self._kv_heads, SCAN_BLOCKS * self._multiprocessors, MOST_BLOCKS_OF_SCAN)
        return scan, blocks_for(batch, self._kv_heads, self._multiprocessors, MOST_BLOCKS)


class CudaIndex(ReferenceIndex):
    """The reference's arrays, filled and searched by kernels.

    Codes equal the reference's but for channels that lie at the border of two levels up to rounding. At least as many keys are
    candidates as with the reference: those of the last bin of scores as far as there is room, the first by place.
    """

    store_type = CudaCodeStore
    codes: CudaCodeStore

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        assert context.cuda is not None, "create() makes a CudaIndex only for CUDA kernels"
        self._kernels = context.cuda
        require_numbered_rows("nested codes on the GPU", context)
        if "nested" not in context.shared:
            candidates = self.config.candidates * self.config.top_k
            context.shared["nested"] = Workspace(context, candidates, self._kernels.multiprocessors)
        self.workspace: Workspace = context.shared["nested"]

    def select(self, queries: Tensor, batch: Batch) -> Selection:
        """See ReferenceIndex.select. Launches two kernels."""
        require_fit("queries", queries, self.context)
        queries, heads = queries.contiguous(), self.context.num_kv_heads
        work = self.workspace
        require_room(batch.size, work.most)
        rows = torch.empty((batch.size, heads, self.config.top_k), dtype=torch.int32, device=queries.device)
        arguments = SelectArguments(
            **pointers(work, "scores", "totals", "places", "estimates", "keys", "counts", "normalisers", "finished"),
            **self.codes.arguments("high", "low"),
            queries=queries.data_ptr(),
            requests=batch.requests.data_ptr(),
            table=batch.table.data_ptr(),
            rows=rows.data_ptr(),
            batch=batch.size,
            kv_heads=heads,
            max_extents=batch.table.shape[1],
            top_k=self.config.top_k,
            capacity=work.capacity,
            scaling=self.context.scaling,
        )
        scan, choose = work.blocks(batch.size)
        for kernel, blocks, threads in (("scan", scan, SCAN_THREADS), ("choose", choose, CHOOSE_THREADS)):
            grid = (blocks, heads, 1)
            self._kernels.launch(f"kvseek_nested_{kernel}", grid, threads, arguments, overlap=True, even=True)
        return Selection(rows)


def cuda_macros(head_dim: int, group_size: int) -> dict[str, int]:
    """Return no macros: kernels need none of their own. Raises ConfigError on a head size that they do not support."""
    limit = f"a multiple of 32 from {MIN_DIM} to {MAX_DIM}"
    fits = head_dim % 32 == 0 and MIN_DIM <= head_dim <= MAX_DIM
    require(fits, "head_dim", head_dim, f"{limit} for nested codes on the GPU", "build with --device cpu")
    return {}
