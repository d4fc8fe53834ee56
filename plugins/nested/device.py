"""Nested codes on the GPU: the reference's arrays, filled and searched by CUDA kernels (docs/nested_codes.md)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.core.batch import Batch, Selection
from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.index_context import IndexContext
from kvseek.kernels.arguments import POWER_SUM_BYTES, pointers, require_numbered_rows
from kvseek.kernels.cuda.codes.store import CudaCodeStore
from kvseek.kernels.cuda.selection import SelectionWorkspace, require_head_dim
from kvseek.kernels.structs import c_struct

from .reference import ReferenceIndex

BINS = 4096  # of a histogram of scores
SCAN_THREADS, CHOOSE_THREADS = 256, 512
SCAN_BLOCKS, CHOICE_BLOCKS = 2, 2  # blocks of a multiprocessor: while one waits for a phase to end, the other works
MOST_BLOCKS_OF_SCAN = 1024  # of a task
MOST_BLOCKS = 16  # blocks of a task in the choice
HELD_CANDIDATES = 1600  # that the choice ranks without reading them again

SelectArguments = c_struct("plugins/nested/cuda/select.cuh", "SelectArguments")


class Workspace(SelectionWorkspace):
    """Intermediate results of a selection. Scores lie in scratch extents: 2 bytes per token and KV head.

    Attributes
    ----------
    capacity : int
        Most candidates of a task. Keys whose score lies in the same bin as the last wanted one's are candidates as well, as far
        as there is room.
    scores : Tensor, int16 [scratch extents, G, 1024]
    """

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        candidates = context.config.candidates * context.config.top_k
        self.capacity = max(candidates, min(2 * candidates, HELD_CANDIDATES))
        heads, lanes = context.num_kv_heads, context.group_size
        _, choose = self.grids(self.most)
        self.scores = self.new(torch.int16, context.scratch_extents, heads, EXTENT_TOKENS)
        self.places, self.keys = (self.new(torch.int32, heads, choose, self.capacity) for _ in range(2))
        self.estimates = self.new(torch.float32, heads, choose, self.capacity, lanes)
        self.counts = self.new(torch.int32, heads, choose)
        self.normalisers = self.new(torch.uint8, heads, choose, lanes, POWER_SUM_BYTES)
        self.totals, self.finished = self.zeros(self.tasks, BINS), self.zeros(self.tasks)

    def grids(self, batch: int) -> tuple[int, int]:
        """Return the blocks of a KV head in the scan and in the choice of a batch."""
        return self.blocks(batch, MOST_BLOCKS_OF_SCAN, SCAN_BLOCKS), self.blocks(batch, MOST_BLOCKS, CHOICE_BLOCKS)


class CudaIndex(ReferenceIndex):
    """The reference's arrays, filled and searched by kernels.

    Codes equal the reference's but for channels that lie at the border of two levels up to rounding. At least as many keys are
    candidates as with the reference: those of the last bin of scores as far as there is room, the first by place.
    """

    codes: CudaCodeStore

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        require_numbered_rows("nested codes on the GPU", context)
        self.workspace = context.share("nested", lambda: Workspace(context))

    def select(self, queries: Tensor, batch: Batch) -> Selection:
        """See ReferenceIndex.select. Launches two kernels."""
        work = self.workspace
        queries, rows, given = work.begin(self.context, queries, batch)
        arguments = SelectArguments(
            **given,
            **pointers(work, "scores", "totals", "places", "estimates", "keys", "counts", "normalisers", "finished"),
            **self.codes.arguments("high", "low"),
            capacity=work.capacity,
            scaling=self.context.scaling,
        )
        scan, choose = work.grids(batch.size)
        work.launch("nested_scan", scan, SCAN_THREADS, arguments, even=True)
        work.launch("nested_choose", choose, CHOOSE_THREADS, arguments, even=True)
        return Selection(rows)


def cuda_macros(head_dim: int, group_size: int) -> dict[str, int]:
    """Return no macros: kernels need none of their own. Raises ConfigError on a head size that they do not support."""
    require_head_dim(head_dim, "for nested codes")
    return {}
