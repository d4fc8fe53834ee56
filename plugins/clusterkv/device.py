"""ClusterKV on the GPU: the reference's arrays, filled by DeviceKMeans and searched by two kernels (select.cu).

With rerank_bits `choose` lists the rows of more clusters, and a third kernel ranks these rows by their codes (rerank.cu).

The paper's cache of recently selected clusters (section IV-D) is the engine's (kernels/cuda/attention/hot_rows.py).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvseek.core.batch import Batch, Selection
from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.errors import KernelError, require
from kvseek.core.index_context import IndexContext
from kvseek.core.streams import SideStream, SideWork
from kvseek.kernels.arguments import POWER_SUM_BYTES, pointers, require_numbered_rows
from kvseek.kernels.cuda.codes.store import MIN_DIM, CudaCodeStore
from kvseek.kernels.cuda.selection import SelectionWorkspace
from kvseek.kernels.structs import c_struct
from kvseek.plugins.clusterkv.config import Config
from kvseek.plugins.clusterkv.kmeans import ClusterArrays, DeviceKMeans
from kvseek.plugins.clusterkv.reference import ReferenceIndex

THREADS = 512  # as in rerank.cu
MOST_BLOCKS = 16  # blocks of a task

RerankArguments = c_struct("plugins/clusterkv/cuda/rerank.cu", "RerankArguments")

SCORE_THREADS, CHOOSE_THREADS = 256, 1024  # as in score.cuh and choose.cuh
UNIT = 32  # clusters that are scored together (select.cuh)
SCORE_BLOCKS = 4  # blocks per multiprocessor: as many as its registers hold at head_dim 128
CHOOSE_STATIC_BYTES = 12 << 10  # upper bound of ChooseMemory (choose.cuh)
SelectArguments = c_struct("plugins/clusterkv/cuda/select.cuh", "SelectArguments")


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

    def rerank(self, context: IndexContext, codes: CudaCodeStore, given: dict[str, int]) -> None:
        """Rank `candidates`, and write the best rows; `given` is that of SelectionWorkspace.begin."""
        arguments = RerankArguments(
            **given,
            **codes.arguments("high", "low"),
            **pointers(self, "candidates", "estimates", "normalisers", "finished"),
            listed=self.listed,
            exponent=context.scaling * math.log2(math.e),
        )
        self.launch("clusterkv_rerank", self.blocks(given["batch"], MOST_BLOCKS), THREADS, arguments)


class Workspace(SelectionWorkspace):
    """Work space for the scores of a selection.

    Attributes
    ----------
    units : int
        Units of clusters in the longest region.
    scores : Tensor, float32 [slots, G, units, 32, lanes]
        Score of each cluster, as an exponent of 2 ("mean": q·k); -inf if the cluster has no keys.
    statistics : Tensor, float32 [slots, G, units, lanes, 2]
        Largest score of a unit, and the sum of the powers of 2 relative to it.
    """

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        longest = context.extents.max_extents * EXTENT_TOKENS
        self.units = -(-context.config.most_clusters(longest) // UNIT)
        shape, lanes = (context.extents.slots, context.num_kv_heads, self.units), context.group_size
        self.scores = self.new(torch.float32, *shape, UNIT, lanes)
        self.statistics = self.new(torch.float32, *shape, lanes, 2)


class CudaIndex(ReferenceIndex):
    """The reference's arrays, filled and searched by kernels. From the same clusters it selects its rows, in its order.

    Scores differ from the reference's by rounding, so of two clusters with nearly equal scores either may be cut.
    """

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        assert context.cuda is not None, "create() makes a CudaIndex only for CUDA kernels"
        self._kernels = context.cuda
        self.workspace = context.share("clusterkv", lambda: Workspace(context))
        # Clusters prompts while the next layers compute.
        self._side = context.share("clusterkv.side", lambda: SideStream(context.device))
        self.reranker: Reranker | None = None
        if self.config.rerank_bits:
            self.reranker = context.share("clusterkv.rerank", lambda: Reranker(context))
        self._listed = self.config.top_k if self.reranker is None else self.reranker.listed
        self._choose_bytes = choose_bytes(self._listed, self.workspace.units, context.extents.max_extents)
        _check_shared_memory(
            context, self._listed, self._choose_bytes, self._kernels.shared_memory_per_block - CHOOSE_STATIC_BYTES
        )
        self._kmeans = DeviceKMeans(context, self.config, self._kernels)
        self._arrays = ClusterArrays(self.centroids, self.sizes, self.starts, self.places, self.spreads)

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> SideWork | None:
        """See Index.build. Clusters on a side stream, and encodes on the current one; the queries are not used."""
        self.begin(slot, keys.shape[1])
        if self.dense:
            return None
        if self.codes is not None:
            self.codes.append(slot, 0, keys)
        count = self.counts[slot]
        # A copy, because a cancelled request's row of the table is cleared without waiting for this work.
        table = self.context.extents.device_table[slot].clone()

        def work() -> None:
            if count:
                self._kmeans.cluster(slot, keys, 0, 0, count, self._arrays, table)
            self.show_clusters(slot)

        # Also without keys, because the extents may come from a request whose clustering is still under way.
        return self._side.run(work, read=(keys, table))

    def cluster(self, slot: int, keys: Tensor, first_place: int, first_cluster: int, clusters: int) -> None:
        self._kmeans.cluster(slot, keys, first_place, first_cluster, clusters, self._arrays)

    def select(self, queries: Tensor, batch: Batch) -> Selection | None:
        """See Index.select. Launches two kernels, three with codes, or none in a dense layer. Rows ascend inside a cluster.

        Raises KernelError for queries of another dtype or device than the cache's, and for a batch that the slots do not allow.
        """
        if self.dense:
            return None
        work, codes, reranker = self.workspace, self.codes, self.reranker
        queries, rows, given = work.begin(self.context, queries, batch)
        listed = rows if reranker is None else reranker.candidates
        arguments = SelectArguments(
            **(given | {"rows": listed.data_ptr(), "top_k": self._listed}),
            **pointers(self, "clusters", "centroids", "sizes", "starts", "places", "spreads"),
            **pointers(work, "scores", "statistics"),
            units=work.units,
            scale=self.context.scaling * math.log2(math.e),
            spread_weight=self.config.spread_weight,
        )
        blocks, given_bytes = work.blocks(batch.size, work.units, SCORE_BLOCKS), self._choose_bytes
        work.launch("clusterkv_score", blocks, SCORE_THREADS, arguments, even=True)
        work.launch("clusterkv_choose", 1, CHOOSE_THREADS, arguments, requests=batch.size, shared_bytes=given_bytes)
        if reranker is not None:
            assert isinstance(codes, CudaCodeStore), "code_store makes this kind for a GPU"
            reranker.rerank(self.context, codes, given)
        return Selection(rows)


def choose_bytes(rows: int, units: int, max_extents: int) -> int:
    """Return the bytes of ChooseArrays (choose.cuh) for a number of rows that clusters are taken for."""
    return 6 * units * UNIT + 4 * (3 * rows + max_extents)


def cuda_macros(config: Config, head_dim: int, group_size: int) -> dict[str, int]:
    """Return the macros that select.cuh expects; raises ConfigError on a head size that the kernels do not support."""
    fits = head_dim % 32 == 0 and 32 <= head_dim <= 256
    limit = "a multiple of 32 up to 256 for ClusterKV on the GPU"
    require(fits, "head_dim", head_dim, limit, "build with --device cpu")
    has_codes = config.rerank_bits > 0
    limit = f"at least {MIN_DIM} for rerank_bits = {config.rerank_bits} on the GPU"
    fits = not has_codes or head_dim >= MIN_DIM
    require(fits, "head_dim", head_dim, limit, "set rerank_bits to 0, or build with --device cpu")
    return {
        "CLUSTERKV_CLUSTERS_PER_EXTENT": config.clusters_per_extent,
        "CLUSTERKV_SPREAD": int(config.spread_weight > 0),
        "CLUSTERKV_RERANK_BITS": config.rerank_bits,
    }


def _check_shared_memory(context: IndexContext, rows: int, wanted: int, limit: int) -> None:
    """Raise KernelError if a block needs more bytes of shared memory than the `limit` of this GPU."""
    if wanted > limit:
        config, tokens = context.config, context.extents.max_extents * EXTENT_TOKENS
        source = "candidates x top_k" if config.rerank_bits else "top_k"
        raise KernelError(
            f"ClusterKV on the GPU: up to {config.most_clusters(tokens)} clusters of {tokens} tokens and {rows} rows of them "
            f"({source}) need {wanted} bytes of shared memory: must be at most {limit} on this GPU; raise tokens_per_cluster, "
            f"or lower {source} or max_seq_len"
        )
