"""The rerank of ClusterKV by key codes on the GPU: launches the kernel of rerank.cu over the candidates that `choose` lists."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvseek.core.batch import Batch, most_requests
from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.cuda import CudaKernels
from kvseek.core.index_context import IndexContext
from kvseek.kernels.arguments import POWER_SUM_BYTES, blocks_for, pointers, require_numbered_rows, require_room
from kvseek.kernels.cuda.codes.store import CudaCodeStore
from kvseek.kernels.structs import c_struct

from .config import Config

THREADS = 512  # as in rerank.cu
MOST_BLOCKS = 16  # blocks of a task

RerankArguments = c_struct("plugins/clusterkv/cuda/rerank.cu", "RerankArguments")


class Reranker:
    """Work space of the rerank, for batches of up to `most` requests, and its launch.

    Layers run one after another, and so do the graphs of batch sizes, so one work space serves all of them.

    Attributes
    ----------
    most : int
        Requests of the largest batch that the slots allow, those that fill up a graph included (most_requests).
    listed : int
        Most candidates of a task: `rows_of_clusters`, or all rows of the longest region.
    candidates : Tensor, int32 [tasks, listed]
        Places of the best clusters of each request and KV head, from `choose`; -1 at the end.
    estimates : Tensor, float32 [tasks, listed, lanes]
    """

    def __init__(self, context: IndexContext, lanes: int, kernels: CudaKernels) -> None:
        require_numbered_rows("ClusterKV's codes on the GPU", context)
        config: Config = context.config
        self._kernels, self._heads, self._top_k = kernels, context.num_kv_heads, config.top_k
        self._exponent = context.scaling * math.log2(math.e)
        self.most = most_requests(context.extents.slots)
        self.listed = min(config.rows_of_clusters, context.extents.max_extents * EXTENT_TOKENS)
        tasks = self.most * self._heads

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=context.device)

        self.candidates = empty(torch.int32, tasks, self.listed)
        self.estimates = empty(torch.float32, tasks, self.listed, lanes)
        self.normalisers = empty(torch.uint8, self._heads, self.blocks(self.most), lanes, POWER_SUM_BYTES)
        # Every selection leaves zeros behind, for tasks of any batch size.
        self.finished = torch.zeros(tasks, dtype=torch.int32, device=context.device)

    def check(self, batch: int) -> None:
        """Raise KernelError if a batch is larger than the work space."""
        require_room(batch, self.most)

    def blocks(self, batch: int) -> int:
        """Return the blocks of a KV head in a launch for a batch."""
        return blocks_for(batch, self._heads, self._kernels.multiprocessors, MOST_BLOCKS)

    def launch(self, codes: CudaCodeStore, queries: Tensor, batch: Batch, rows: Tensor) -> None:
        """Rank `candidates` for queries [batch, H, D], and write the best to rows int32 [batch, G, top_k]."""
        arguments = RerankArguments(
            **codes.arguments("high", "low"),
            **pointers(self, "candidates", "estimates", "normalisers", "finished"),
            **pointers(batch, "requests", "table"),
            queries=queries.data_ptr(),
            rows=rows.data_ptr(),
            batch=batch.size,
            kv_heads=self._heads,
            max_extents=batch.table.shape[1],
            listed=self.listed,
            top_k=self._top_k,
            exponent=self._exponent,
        )
        grid = (self.blocks(batch.size), self._heads, 1)
        self._kernels.launch("kvseek_clusterkv_rerank", grid, THREADS, arguments, overlap=True)
