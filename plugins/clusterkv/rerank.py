"""The rerank of ClusterKV by key codes on the GPU: launches the kernel of rerank.cu over the candidates that `choose` lists."""

from __future__ import annotations

import math

import torch

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.index_context import IndexContext
from kvseek.kernels.arguments import POWER_SUM_BYTES, pointers, require_numbered_rows
from kvseek.kernels.cuda.codes.store import CudaCodeStore
from kvseek.kernels.cuda.selection import SelectionWorkspace
from kvseek.kernels.structs import c_struct

THREADS = 512  # as in rerank.cu
MOST_BLOCKS = 16  # blocks of a task

RerankArguments = c_struct("plugins/clusterkv/cuda/rerank.cu", "RerankArguments")


class Reranker(SelectionWorkspace):
    """Work space of the rerank, and its launch.

    Attributes
    ----------
    listed : int
        Most candidates of a task: `rows_of_clusters`, or all rows of the longest region.
    candidates : Tensor, int32 [tasks, listed]
        Places of the best clusters of each request and KV head, from `choose`; -1 at the end.
    estimates : Tensor, float32 [tasks, listed, lanes]
    """

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        require_numbered_rows("ClusterKV's codes on the GPU", context)
        heads, lanes, config = context.num_kv_heads, context.group_size, context.config
        self.listed = min(config.rows_of_clusters, context.extents.max_extents * EXTENT_TOKENS)
        self.candidates = self.new(torch.int32, self.tasks, self.listed)
        self.estimates = self.new(torch.float32, self.tasks, self.listed, lanes)
        self.normalisers = self.new(torch.uint8, heads, self.blocks(self.most, MOST_BLOCKS), lanes, POWER_SUM_BYTES)
        self.finished = self.zeros(self.tasks)

    def launch(self, context: IndexContext, codes: CudaCodeStore, given: dict[str, int]) -> None:
        """Rank `candidates`, and write the best rows; `given` is that of SelectionWorkspace.begin."""
        assert context.cuda is not None, "an index of CUDA kernels launches"
        arguments = RerankArguments(
            **given,
            **codes.arguments("high", "low"),
            **pointers(self, "candidates", "estimates", "normalisers", "finished"),
            listed=self.listed,
            exponent=context.scaling * math.log2(math.e),
        )
        grid = (self.blocks(given["batch"], MOST_BLOCKS), context.num_kv_heads, 1)
        context.cuda.launch("kvseek_clusterkv_rerank", grid, THREADS, arguments, overlap=True)
