"""ParisKV on the GPU: the reference's arrays, filled and searched by CUDA kernels (ParisKV paper, section 4)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvseek.core.batch import Batch, Selection
from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.index_context import IndexContext
from kvseek.kernels.arguments import POWER_SUM_BYTES, pointers, require_keys, require_numbered_rows
from kvseek.kernels.cuda.selection import SelectionWorkspace, require_head_dim
from kvseek.kernels.structs import c_struct

from .config import Config
from .reference import CENTROIDS, ReferenceIndex

SCORES = 256  # bins of a histogram of votes
ENCODE_WARPS = 8
COUNT_THREADS, SCAN_THREADS, RERANK_THREADS, TOP_THREADS = 256, 1024, 256, 1024
CHUNKS_OF_SCAN = 4  # chunks of a region for one block of the scan; a block of the rerank takes one chunk
LARGE_TABLE, SMALL_TABLE = 128 << 10, 64 << 10  # bytes of shared memory that the scan fills with copies of the votes
MOST_TOP_BLOCKS = 16  # most blocks of a task's top-k (top.cu)
MOST_SCAN_BLOCKS = 256  # most blocks of a task's scan
COUNT_KEYS = 4096  # keys that one block of the counting kernel takes at least

EncodeArguments = c_struct("plugins/pariskv/cuda/encode.cu", "EncodeArguments")
SelectArguments = c_struct("plugins/pariskv/cuda/select.cuh", "SelectArguments")


class Workspace(SelectionWorkspace):
    """Intermediate results of a selection.

    Arrays that grow with a region lie in scratch extents: 9 + 4 x lanes bytes per token and KV head.
    """

    def __init__(self, context: IndexContext, lanes: int, dim: int) -> None:
        super().__init__(context)
        rows = (context.scratch_extents, context.num_kv_heads, EXTENT_TOKENS)
        top_k, blocks = context.config.top_k, dim // 8
        scan, top = self.grids(self.most)
        chunks, lists = (context.num_kv_heads, CHUNKS_OF_SCAN * scan), (context.num_kv_heads, top)
        self.scores, self.candidates = self.new(torch.uint8, *rows), self.new(torch.int32, *rows)
        self.estimates, self.keys = self.new(torch.float32, *rows, lanes), self.new(torch.int32, *rows)
        self.chunk_totals = self.new(torch.int32, *chunks, SCORES)
        self.normalisers = self.new(torch.uint8, *chunks, lanes, POWER_SUM_BYTES)
        self.best_keys, self.best_places = (self.new(torch.int32, *lists, top_k) for _ in range(2))
        # The last columns may belong to lanes that do not exist; they stay zero.
        self.columns = self.zeros(self.tasks, -(-lanes // 4), dim // 16, 32, 2)
        self.votes = self.new(torch.uint8, self.tasks, blocks // 4, CENTROIDS, 4, vote_bytes(lanes))
        self.totals = self.new(torch.int32, self.tasks, SCORES)
        self.finished = self.zeros(self.tasks)

    def grids(self, batch: int) -> tuple[int, int]:
        """Return the blocks of a KV head in the scan and in the top-k of a batch."""
        return self.blocks(batch, MOST_SCAN_BLOCKS), self.blocks(batch, MOST_TOP_BLOCKS)


class CudaIndex(ReferenceIndex):
    """The reference's arrays, filled and searched by kernels. Ids, counts, votes and candidates equal its own to the bit.

    Estimates differ from the reference's by the rounding of weighted codes to float16 (5e-4 of a term), so rows whose rank is
    near k may differ.
    """

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        assert context.cuda is not None, "create() makes a CudaIndex only for CUDA kernels"
        self._kernels = context.cuda
        require_numbered_rows("ParisKV on the GPU", context)
        self._lanes = lanes = self.config.lanes(context.group_size)
        self.workspace = context.share("pariskv", lambda: Workspace(context, lanes, self.padded_dim))
        major, _ = self._kernels.capability
        self._table_bytes = LARGE_TABLE if major in (9, 10) else SMALL_TABLE  # as scan.cu chooses it

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        require_keys(keys, self.context)
        if not keys.shape[1]:
            return
        arguments = self._encode_arguments(slot, start, keys.shape[1])
        arguments.keys = keys.data_ptr()
        arguments.head_stride, arguments.token_stride = keys.stride(0), keys.stride(1)
        blocks = min(-(-keys.shape[1] // ENCODE_WARPS), 16 * self._kernels.multiprocessors)
        self._kernels.launch(
            "kvseek_pariskv_encode", (blocks, self.context.num_kv_heads, 1), ENCODE_WARPS * 32, arguments
        )

    def publish(self, slot: int, start: int, count: int) -> None:
        if not count:
            return
        blocks = min(-(-count // COUNT_KEYS), 2 * self._kernels.multiprocessors)
        arguments = self._encode_arguments(slot, start, count)
        self._kernels.launch("kvseek_pariskv_count", (blocks, self.context.num_kv_heads, 1), COUNT_THREADS, arguments)

    def select(self, queries: Tensor, batch: Batch) -> Selection:
        """See ReferenceIndex.select. Launches four kernels."""
        work = self.workspace
        queries, rows, given = work.begin(self.context, queries, batch)
        scan, top = work.grids(batch.size)
        arguments = SelectArguments(
            **given,
            **pointers(self, "ids", "codes", "weights", "counts", "signs", "levels"),
            **pointers(work, "columns", "votes", "totals", "chunk_totals", "scores", "candidates", "estimates"),
            **pointers(work, "keys", "normalisers", "best_keys", "best_places", "finished"),
            scan_blocks=scan,
            scaling=self.context.scaling,
        )
        work.launch("pariskv_vote", self.blocks, 32 * self._lanes, arguments, requests=batch.size)
        work.launch("pariskv_scan", scan, SCAN_THREADS, arguments, shared_bytes=self._table_bytes)
        work.launch("pariskv_rerank", CHUNKS_OF_SCAN * scan, RERANK_THREADS, arguments)
        work.launch("pariskv_top", top, TOP_THREADS, arguments)
        return Selection(rows)

    def _encode_arguments(self, slot: int, start: int, tokens: int) -> ctypes.Structure:
        return EncodeArguments(
            **pointers(self, "ids", "codes", "weights", "signs", "levels", "thresholds"),
            counts=self.counts[slot].data_ptr(),
            table=self.context.extents.device_table[slot].data_ptr(),
            kv_heads=self.context.num_kv_heads,
            tokens=tokens,
            first=start,
        )


def vote_bytes(lanes: int) -> int:
    """Return the bytes of a vector with a byte of votes for each lane: 4, 8 or 16."""
    return 4 if lanes <= 4 else 8 if lanes <= 8 else 16


def cuda_macros(config: Config, head_dim: int, group_size: int) -> dict[str, int]:
    """Return the macros that layout.cuh expects; raises ConfigError on a head size that the kernels do not support."""
    require_head_dim(head_dim, "for ParisKV")
    return {
        "PARISKV_LANES": config.lanes(group_size),
        "PARISKV_MEAN": int(config.group_reduce == "mean"),
    }
