"""ClusterKV on the GPU: the reference's arrays, filled by DeviceKMeans and searched by two kernels (select.cu).

With rerank_bits `choose` lists the rows of more clusters, and a third kernel ranks these rows by their codes (rerank.py).

The paper's cache of recently selected clusters (section IV-D) is the engine's (kernels/cuda/attention/hot_rows.py).
"""

from __future__ import annotations

import ctypes
import math
from functools import partial

import torch
from torch import Tensor

from kvseek.core.batch import Batch
from kvseek.core.config import EXTENT_TOKENS, require
from kvseek.core.errors import KernelError
from kvseek.core.index_context import IndexContext
from kvseek.core.selection import Selection
from kvseek.core.streams import SideStream, SideWork
from kvseek.kernels.arguments import blocks_for, pointers, require_fit
from kvseek.kernels.cuda.codes.store import MIN_DIM, CudaCodeStore
from kvseek.kernels.structs import c_struct
from kvseek.plugins.contract import Effort, Index

from .config import Config
from .kmeans import ClusterArrays, DeviceKMeans
from .reference import ReferenceIndex
from .rerank import Reranker

SCORE_THREADS, CHOOSE_THREADS = 256, 1024  # as in score.cuh and choose.cuh
UNIT = 32  # clusters that are scored together (select.cuh)
SCORE_BLOCKS = 4  # blocks per multiprocessor: as many as its registers hold at head_dim 128
CHOOSE_STATIC_BYTES = 12 << 10  # upper bound of ChooseMemory (choose.cuh)

SelectArguments = c_struct("plugins/clusterkv/cuda/select.cuh", "SelectArguments")


class Workspace:
    """Work space for the scores of a selection. Layers run one after another, so one work space serves all of them.

    Attributes
    ----------
    units : int
        Units of clusters in the longest region.
    scores : Tensor, float32 [slots, G, units, 32, lanes]
        Score of each cluster, as an exponent of 2 ("mean": q·k); -inf if the cluster has no keys.
    statistics : Tensor, float32 [slots, G, units, lanes, 2]
        Largest score of a unit, and the sum of the powers of 2 relative to it.
    """

    def __init__(self, context: IndexContext, lanes: int) -> None:
        longest = context.extents.max_extents * EXTENT_TOKENS
        self.units = -(-context.config.most_clusters(longest) // UNIT)
        shape = (context.extents.slots, context.num_kv_heads, self.units)
        self.scores = torch.empty((*shape, UNIT, lanes), dtype=torch.float32, device=context.device)
        self.statistics = torch.empty((*shape, lanes, 2), dtype=torch.float32, device=context.device)


class CudaIndex(Index):
    """The index of one layer. Given the same clusters it selects the reference's rows, in the reference's order.

    Scores differ from the reference's by rounding, so of two clusters with nearly equal scores either may be cut.

    Attributes
    ----------
    reference : ReferenceIndex
        Owns the arrays, and clusters the keys that leave the window, by means of the kernels.
    """

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        self.reference = arrays = ReferenceIndex(context, CudaCodeStore)
        self.config: Config = context.config
        assert context.cuda is not None, "create() makes a CudaIndex only for CUDA kernels"
        self._kernels = context.cuda
        lanes = context.group_size
        shared = context.shared
        if "clusterkv" not in shared:
            shared["clusterkv"], shared["clusterkv_side"] = Workspace(context, lanes), SideStream(context.device)
            reranks = self.config.rerank_bits > 0
            shared["clusterkv_rerank"] = Reranker(context, lanes, self._kernels) if reranks else None
        self.workspace: Workspace = shared["clusterkv"]
        self.reranker: Reranker | None = shared["clusterkv_rerank"]
        self._side: SideStream = shared["clusterkv_side"]  # clusters prompts while the next layers compute
        self._listed = self.config.top_k if self.reranker is None else self.reranker.listed
        self._choose_bytes = choose_bytes(self._listed, self.workspace.units, context.extents.max_extents)
        _check_shared_memory(
            context, self._listed, self._choose_bytes, self._kernels.shared_memory_per_block - CHOOSE_STATIC_BYTES
        )
        kmeans = DeviceKMeans(context, self.config, self._kernels)
        found = ClusterArrays(arrays.centroids, arrays.sizes, arrays.starts, arrays.places, arrays.spreads)
        self._cluster = arrays.clusterer = partial(kmeans.cluster, arrays=found)

    @property
    def bytes_per_token(self) -> float:
        """See ReferenceIndex.bytes_per_token."""
        return self.reference.bytes_per_token

    def effort(self, length: int) -> Effort:
        """See ReferenceIndex.effort."""
        return self.reference.effort(length)

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> SideWork | None:
        """See Index.build. Clusters on a side stream, and encodes on the current one; the queries are not used."""
        index = self.reference
        index.begin(slot, keys.shape[1])
        if index.dense:
            return None
        if index.codes is not None:
            index.codes.append(slot, 0, keys)
        count = index.counts[slot]
        # A copy, because a cancelled request's row of the table is cleared without waiting for this work.
        table = self.context.extents.device_table[slot].clone()

        def work() -> None:
            if count:
                self._cluster(slot, keys, 0, 0, count, table=table)
            index.show_clusters(slot)

        # Also without keys, because the extents may come from a request whose clustering is still under way.
        return self._side.run(work, read=(keys, table))

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """See ReferenceIndex.append."""
        self.reference.append(slot, start, keys)

    def publish(self, slot: int, start: int, count: int) -> None:
        """See ReferenceIndex.publish."""
        self.reference.publish(slot, start, count)

    def select(self, queries: Tensor, batch: Batch) -> Selection | None:
        """See Index.select. Launches two kernels, three with codes, or none in a dense layer. Rows ascend inside a cluster.

        Raises KernelError for queries of another dtype or device than the cache's, and for a batch that the slots do not allow.
        """
        if self.reference.dense:
            return None
        require_fit("queries", queries, self.context)
        queries = queries.contiguous()
        shape = (batch.size, self.context.num_kv_heads, self.config.top_k)
        rows = torch.empty(shape, dtype=torch.int32, device=self.context.device)
        codes, reranker = self.reference.codes, self.reranker
        if reranker is not None:
            reranker.check(batch.size)
        arguments = self._arguments(queries, batch, rows if reranker is None else reranker.candidates)
        heads, at_once = self.context.num_kv_heads, SCORE_BLOCKS * self._kernels.multiprocessors
        blocks = blocks_for(batch.size, heads, at_once, self.workspace.units)
        self._launch("score", (blocks, heads, 1), SCORE_THREADS, arguments, 0, even=True)
        self._launch("choose", (1, heads, batch.size), CHOOSE_THREADS, arguments, self._choose_bytes)
        if reranker is not None:
            assert isinstance(codes, CudaCodeStore), "the constructor gives the reference this kind of store"
            reranker.launch(codes, queries, batch, rows)
        return Selection(rows)

    def _launch(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        threads: int,
        arguments: ctypes.Structure,
        shared_bytes: int,
        even: bool = False,
    ) -> None:
        self._kernels.launch(
            f"kvseek_clusterkv_{kernel}", grid, threads, arguments, shared_bytes, overlap=True, even=even
        )

    def _arguments(self, queries: Tensor, batch: Batch, rows: Tensor) -> ctypes.Structure:
        work = self.workspace
        return SelectArguments(
            **pointers(self.reference, "clusters", "centroids", "sizes", "starts", "places", "spreads"),
            **pointers(work, "scores", "statistics"),
            **pointers(batch, "requests", "table"),
            queries=queries.data_ptr(),
            rows=rows.data_ptr(),
            batch=batch.size,
            kv_heads=self.context.num_kv_heads,
            max_extents=batch.table.shape[1],
            units=work.units,
            top_k=self._listed,
            scale=self.context.scaling * math.log2(math.e),
            spread_weight=self.config.spread_weight,
        )


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
