"""ParisKV on the GPU: the reference's arrays, filled and searched by CUDA kernels (ParisKV paper, section 4)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvseek.core.batch import Batch, most_requests
from kvseek.core.config import EXTENT_TOKENS, require
from kvseek.core.errors import KernelError
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
from kvseek.kernels.cuda.codes.store import MAX_DIM, MIN_DIM
from kvseek.kernels.structs import c_struct
from kvseek.plugins.contract import Effort, Index

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


class Workspace:
    """Intermediate results of a selection, for batches of up to `most` requests.

    Layers run one after another, and so do the graphs of batch sizes, so one workspace serves all of them. It is allocated when
    it is made, because captured graphs hold its addresses, and because it has to be counted when memory is divided. Arrays that
    grow with a region lie in scratch extents: 9 + 4 x lanes bytes per token and KV head.

    Attributes
    ----------
    most : int
        Requests of the largest batch that the slots allow, those that fill up a graph included (most_requests).
    """

    def __init__(self, context: IndexContext, lanes: int, dim: int, multiprocessors: int) -> None:
        self._kv_heads, self._multiprocessors = context.num_kv_heads, multiprocessors
        self.most = most_requests(context.extents.slots)
        rows = (context.scratch_extents, context.num_kv_heads, EXTENT_TOKENS)
        tasks, top_k, blocks = self.most * context.num_kv_heads, context.config.top_k, dim // 8
        scan, top = self.blocks(self.most)
        chunks, lists = (context.num_kv_heads, CHUNKS_OF_SCAN * scan), (context.num_kv_heads, top)

        def new(shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=context.device)

        self.scores, self.candidates = new(rows, torch.uint8), new(rows)
        self.estimates, self.keys = new((*rows, lanes), torch.float32), new(rows)
        self.chunk_totals = new((*chunks, SCORES))
        self.normalisers = new((*chunks, lanes, POWER_SUM_BYTES), torch.uint8)
        self.best_keys, self.best_places = new((*lists, top_k)), new((*lists, top_k))
        # The last columns may belong to lanes that do not exist; they stay zero.
        self.columns = new((tasks, -(-lanes // 4), dim // 16, 32, 2)).zero_()
        self.votes = new((tasks, blocks // 4, CENTROIDS, 4, vote_bytes(lanes)), torch.uint8)
        self.totals = new((tasks, SCORES))
        self.finished = new((tasks,)).zero_()  # each selection leaves zeros behind

    def blocks(self, batch: int) -> tuple[int, int]:
        """Return the blocks of a KV head in the scan and in the top-k of a batch."""
        scan = blocks_for(batch, self._kv_heads, self._multiprocessors, MOST_SCAN_BLOCKS)
        return scan, blocks_for(batch, self._kv_heads, self._multiprocessors, MOST_TOP_BLOCKS)


class CudaIndex(Index):
    """The index of one layer. Ids, codes, counts, votes and candidates are the reference's to the bit.

    Estimates differ from the reference's by the rounding of weighted codes to float16 (5e-4 of a term), so rows whose rank is
    near k may differ.
    """

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        self.reference = ReferenceIndex(context)  # owns the arrays
        self.config: Config = context.config
        assert context.cuda is not None, "create() makes a CudaIndex only for CUDA kernels"
        self._kernels = context.cuda
        dim = self.reference.padded_dim
        require_numbered_rows("ParisKV on the GPU", context)
        self._lanes = self.config.lanes(context.group_size)
        if "pariskv" not in context.shared:
            context.shared["pariskv"] = Workspace(context, self._lanes, dim, self._kernels.multiprocessors)
        self.workspace: Workspace = context.shared["pariskv"]
        major, _ = self._kernels.capability
        self._table_bytes = LARGE_TABLE if major in (9, 10) else SMALL_TABLE  # as scan.cu chooses it

    @property
    def bytes_per_token(self) -> float:
        """See ReferenceIndex.bytes_per_token."""
        return self.reference.bytes_per_token

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """See Index.build. Runs on the current stream; the queries are not used."""
        self.reference.counts[slot].zero_()
        self.append(slot, 0, keys)
        self.publish(slot, 0, keys.shape[1])

    def adopt(self, slot: int, length: int) -> None:
        """See ReferenceIndex.adopt."""
        self.reference.counts[slot].zero_()
        self.publish(slot, 0, length)

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """See ReferenceIndex.append."""
        require_fit("keys", keys, self.context)
        if keys.stride(-1) != 1:
            raise KernelError(f"keys: strides {keys.stride()}: the numbers of a key must be neighbours in memory")
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
        """See ReferenceIndex.publish."""
        if not count:
            return
        blocks = min(-(-count // COUNT_KEYS), 2 * self._kernels.multiprocessors)
        arguments = self._encode_arguments(slot, start, count)
        self._kernels.launch("kvseek_pariskv_count", (blocks, self.context.num_kv_heads, 1), COUNT_THREADS, arguments)

    def effort(self, length: int) -> Effort:
        """See ReferenceIndex.effort. The numbers are `budget` and `candidates` of select.cuh."""
        return self.reference.effort(length)

    def select(self, queries: Tensor, batch: Batch) -> Selection:
        """See Index.select. Launches four kernels. Rows ascend."""
        require_fit("queries", queries, self.context)
        queries, heads, top_k = queries.contiguous(), self.context.num_kv_heads, self.config.top_k
        require_room(batch.size, self.workspace.most)
        rows = torch.empty((batch.size, heads, top_k), dtype=torch.int32, device=queries.device)
        scan, top = self.workspace.blocks(batch.size)
        arguments = self._select_arguments(queries, batch, scan, rows)
        self._launch("vote", (self.reference.blocks, heads, batch.size), 32 * self._lanes, arguments)
        self._launch("scan", (scan, heads, 1), SCAN_THREADS, arguments, self._table_bytes)
        self._launch("rerank", (CHUNKS_OF_SCAN * scan, heads, 1), RERANK_THREADS, arguments)
        self._launch("top", (top, heads, 1), TOP_THREADS, arguments)
        return Selection(rows)

    def _launch(
        self, kernel: str, grid: tuple[int, int, int], threads: int, arguments: ctypes.Structure, shared_bytes: int = 0
    ) -> None:
        self._kernels.launch(f"kvseek_pariskv_{kernel}", grid, threads, arguments, shared_bytes, overlap=True)

    def _encode_arguments(self, slot: int, start: int, tokens: int) -> ctypes.Structure:
        index, extents = self.reference, self.context.extents
        return EncodeArguments(
            **pointers(index, "ids", "codes", "weights", "signs", "levels", "thresholds"),
            counts=index.counts[slot].data_ptr(),
            table=extents.device_table[slot].data_ptr(),
            kv_heads=self.context.num_kv_heads,
            tokens=tokens,
            first=start,
        )

    def _select_arguments(self, queries: Tensor, batch: Batch, scan_blocks: int, rows: Tensor) -> ctypes.Structure:
        return SelectArguments(
            **pointers(self.reference, "ids", "codes", "weights", "counts", "signs", "levels"),
            **pointers(
                self.workspace, "columns", "votes", "totals", "chunk_totals", "scores", "candidates", "estimates"
            ),
            **pointers(self.workspace, "keys", "normalisers", "best_keys", "best_places", "finished"),
            queries=queries.data_ptr(),
            requests=batch.requests.data_ptr(),
            table=batch.table.data_ptr(),
            rows=rows.data_ptr(),
            batch=batch.size,
            kv_heads=self.context.num_kv_heads,
            max_extents=batch.table.shape[1],
            top_k=self.config.top_k,
            scan_blocks=scan_blocks,
            scaling=self.context.scaling,
        )


def vote_bytes(lanes: int) -> int:
    """Return the bytes of a vector with a byte of votes for each lane: 4, 8 or 16."""
    return 4 if lanes <= 4 else 8 if lanes <= 8 else 16


def cuda_macros(config: Config, head_dim: int, group_size: int) -> dict[str, int]:
    """Return the macros that layout.cuh expects; raises ConfigError on a head size that the kernels do not support."""
    limit = f"a multiple of 32 from {MIN_DIM} to {MAX_DIM}"
    fits = head_dim % 32 == 0 and MIN_DIM <= head_dim <= MAX_DIM
    require(fits, "head_dim", head_dim, f"{limit} for ParisKV on the GPU", "build with --device cpu")
    return {
        "PARISKV_LANES": config.lanes(group_size),
        "PARISKV_MEAN": int(config.group_reduce == "mean"),
    }
