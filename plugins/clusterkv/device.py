"""ClusterKV on the GPU: the reference's arrays, filled by DeviceKMeans and searched by two kernels (select.cu).

If a layer's rows lie in host memory, copies of the rows that a slot's last steps selected stay on the device (paper, section
IV-D): the attention kernel copies every selected row to a store, and the selection knows which clusters the store holds.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_float, c_int32, c_void_p
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS, require
from kvseek.core.errors import KernelError
from kvseek.core.streams import SideStream
from kvseek.plugins.batch import Batch
from kvseek.plugins.contract import Built, Effort, Index, IndexContext
from kvseek.plugins.selection import Selection
from kvseek.plugins.shared.arguments import pointers, require_fit
from kvseek.plugins.shared.group import GROUP_REDUCTIONS

from .config import Config
from .kmeans import ClusterArrays, DeviceKMeans
from .reference import ReferenceIndex

SCORE_THREADS, CHOOSE_THREADS = 256, 1024  # as in score.cuh and choose.cuh
UNIT = 32  # clusters that are scored together (select.cuh)
SCORE_BLOCKS = 4  # blocks per multiprocessor: as many as its registers hold at head_dim 128
CHOOSE_STATIC_BYTES = 12 << 10  # upper bound of ChooseMemory (choose.cuh)
NEVER = -(2**30)  # position of a step that no real step is near


class SelectArguments(ctypes.Structure):
    """Arguments of the kernels of a selection, as in select.cuh."""

    _fields_ = (
        *((name, c_void_p) for name in ("queries", "requests", "table", "clusters", "centroids", "sizes", "starts")),
        *((name, c_void_p) for name in ("places", "scores", "statistics", "recent", "counters")),
        *((name, c_void_p) for name in ("rows", "cached", "keep")),
        *((name, c_int32) for name in ("kv_heads", "max_extents", "units", "top_k", "cache_steps")),
        ("scale", c_float),
    )


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


@dataclass(frozen=True)
class RecentRows:
    """Rows that the last R = cache_steps steps selected. The step at position p writes to buffer p mod (R + 1) of the store.

    Attributes
    ----------
    store : Tensor [slots, G, (R + 1) * top_k, 2, D]
        See Selection.store.
    clusters : Tensor, int32 [E, G, S, 4]
        For each cluster: position of the last step that selected it, its first row in the store, number of its rows there,
        unused.
    """

    store: Tensor
    clusters: Tensor

    @classmethod
    def empty(cls, context: IndexContext) -> RecentRows:
        """Allocate room for all slots, holding no rows."""
        config: Config = context.config
        slots, capacity, heads = context.extents.slots, context.extents.capacity, context.num_kv_heads
        store = (slots, heads, (config.cache_steps + 1) * config.top_k, 2, context.head_dim)
        clusters = (capacity, heads, config.clusters_per_extent, 4)
        with torch.inference_mode(False):  # the tensors are written to inside and outside of that mode
            return cls(
                torch.empty(store, dtype=context.dtype, device=context.device),
                torch.full(clusters, NEVER, dtype=torch.int32, device=context.device),
            )


class CudaIndex(Index):
    """The index of one layer. Given the same clusters it selects the reference's rows, in the reference's order.

    Scores differ from the reference's by rounding, so of two clusters with nearly equal scores either may be cut.

    Attributes
    ----------
    reference : ReferenceIndex
        Owns the arrays, and clusters the keys that leave the window, by means of the kernels.
    recent : RecentRows or None
        Rows of the last steps; None if the layer keeps none.
    """

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        self.reference = arrays = ReferenceIndex(context)
        self.config: Config = context.config
        assert context.cuda is not None, "create() makes a CudaIndex only for CUDA kernels"
        self._kernels = context.cuda
        lanes = 1 if self.config.group_reduce == "mean" else context.group_size
        shared = context.shared
        if "clusterkv" not in shared:
            shared["clusterkv"], shared["clusterkv_side"] = Workspace(context, lanes), SideStream(context.device)
        self.workspace: Workspace = shared["clusterkv"]
        self._side: SideStream = shared["clusterkv_side"]  # clusters prompts while the next layers compute
        self._choose_bytes = choose_bytes(self.config.top_k, self.workspace.units, context.extents.max_extents)
        _check_shared_memory(context, self._choose_bytes, self._kernels.shared_memory_per_block - CHOOSE_STATIC_BYTES)
        kmeans = DeviceKMeans(context, self.config, self._kernels)
        found = ClusterArrays(arrays.centroids, arrays.sizes, arrays.starts, arrays.places)
        self._cluster = arrays.clusterer = partial(kmeans.cluster, arrays=found)
        keeps = context.rows_on_host and self.config.cache_steps > 0 and not arrays.dense
        self.recent = RecentRows.empty(context) if keeps else None
        self._counters = torch.zeros(2, dtype=torch.int64, device=context.device)

    @property
    def bytes_per_token(self) -> float:
        """See ReferenceIndex.bytes_per_token; 16 bytes more per cluster if the rows lie in host memory."""
        recent = 0.0 if self.recent is None else self.recent.clusters[0].nbytes / EXTENT_TOKENS
        return self.reference.bytes_per_token + recent

    def hit_rate(self) -> float | None:
        """Return the share of the rows selected so far that the store held; None if there were none. Waits for the device."""
        found, read = self._counters.tolist()
        return found / (found + read) if found + read else None

    def effort(self, length: int) -> Effort:
        """See ReferenceIndex.effort."""
        return self.reference.effort(length)

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> Built:
        """See Index.build. Clusters on a side stream; the queries are not used."""
        index = self.reference
        index.begin(slot, keys.shape[1])
        if index.dense:
            return Built()
        self._forget_rows(slot)
        count = index.counts[slot]
        # A copy, because a cancelled request's row of the table is cleared without waiting for this work.
        table = self.context.extents.device_table[slot].clone()

        def work() -> None:
            if count:
                self._cluster(slot, keys, 0, 0, count, table=table)
            index.show_clusters(slot)

        # Also without keys, because the extents may come from a request whose clustering is still under way.
        return Built(ticket=self._side.run(work, read=(keys, table)))

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """See ReferenceIndex.append."""
        self.reference.append(slot, start, keys)

    def publish(self, slot: int, start: int, count: int) -> None:
        """See ReferenceIndex.publish."""
        self.reference.publish(slot, start, count)

    def select(self, queries: Tensor, batch: Batch) -> Selection | None:
        """See Index.select. Launches two kernels, or none in a dense layer. Rows ascend inside a cluster.

        Raises KernelError for queries of another dtype or device than the cache's.
        """
        if self.reference.dense:
            return None
        require_fit("queries", queries, self.context)
        queries = queries.contiguous()
        tasks, recent = batch.size * self.context.num_kv_heads, self.recent
        rows = self._entries(batch.size)
        selection = Selection(rows)
        if recent is not None:
            selection = Selection(rows, 1, recent.store, torch.empty_like(rows), torch.empty_like(rows))
        arguments = self._arguments(queries, batch, selection)
        chunks = min(self.workspace.units, max(1, SCORE_BLOCKS * self._kernels.multiprocessors // tasks))
        self._launch("score", (chunks, tasks, 1), SCORE_THREADS, arguments, 0)
        self._launch("choose", (tasks, 1, 1), CHOOSE_THREADS, arguments, self._choose_bytes)
        return selection

    def _forget_rows(self, slot: int) -> None:
        """Mark every cluster of the slot's extents as not held by the store, on the current stream.

        The extents and the slot's part of the store may come from another request, whose rows must not be found.
        """
        if self.recent is None:
            return
        owned = self.context.extents.room(slot) // EXTENT_TOKENS
        extents = self.context.extents.device_table[slot, :owned].long()  # on the device: the host does not wait
        self.recent.clusters.index_fill_(0, extents, NEVER)

    def _entries(self, batch: int) -> Tensor:
        shape = (batch, self.context.num_kv_heads, self.config.top_k)
        return torch.empty(shape, dtype=torch.int32, device=self.context.device)

    def _launch(
        self, kernel: str, grid: tuple[int, int, int], threads: int, arguments: SelectArguments, shared_bytes: int
    ) -> None:
        self._kernels.launch(f"kvseek_clusterkv_{kernel}", grid, threads, arguments, shared_bytes, overlap=True)

    def _arguments(self, queries: Tensor, batch: Batch, selection: Selection) -> SelectArguments:
        work, mean = self.workspace, self.config.group_reduce == "mean"
        arguments = SelectArguments(
            **pointers(self.reference, "clusters", "centroids", "sizes", "starts", "places"),
            **pointers(work, "scores", "statistics"),
            **pointers(batch, "requests", "table"),
            queries=queries.data_ptr(),
            counters=self._counters.data_ptr(),
            rows=selection.rows.data_ptr(),
            kv_heads=self.context.num_kv_heads,
            max_extents=batch.table.shape[1],
            units=work.units,
            top_k=self.config.top_k,
            cache_steps=self.config.cache_steps,
            scale=1.0 if mean else self.context.scaling * math.log2(math.e),
        )
        if self.recent is not None:
            arguments.recent = self.recent.clusters.data_ptr()
            for name, number in pointers(selection, "cached", "keep").items():
                setattr(arguments, name, number)
        return arguments


def choose_bytes(top_k: int, units: int, max_extents: int) -> int:
    """Return the bytes of ChooseArrays (choose.cuh)."""
    return 6 * units * UNIT + 4 * (5 * top_k + max_extents)


def cuda_macros(config: Config, head_dim: int, group_size: int) -> dict[str, int]:
    """Return the macros that select.cuh expects; raises ConfigError on a head size that the kernels do not support."""
    fits = head_dim % 32 == 0 and 32 <= head_dim <= 256
    limit = "a multiple of 32 up to 256 for ClusterKV on the GPU"
    require(fits, "head_dim", head_dim, limit, "build with --device cpu")
    return {
        "CLUSTERKV_CLUSTERS_PER_EXTENT": config.clusters_per_extent,
        "CLUSTERKV_LANES": 1 if config.group_reduce == "mean" else group_size,
        "CLUSTERKV_REDUCTION": GROUP_REDUCTIONS.index(config.group_reduce),
    }


def _check_shared_memory(context: IndexContext, wanted: int, limit: int) -> None:
    """Raise KernelError if a block needs more bytes of shared memory than the `limit` of this GPU."""
    if wanted > limit:
        config, tokens = context.config, context.extents.max_extents * EXTENT_TOKENS
        raise KernelError(
            f"ClusterKV on the GPU: up to {config.most_clusters(tokens)} clusters of {tokens} tokens and top_k = {config.top_k} "
            f"need {wanted} bytes of shared memory: must be at most {limit} on this GPU; raise tokens_per_cluster, or lower "
            "top_k or max_seq_len"
        )
