"""ClusterKV on the GPU: the reference's arrays, filled by DeviceKMeans and searched by two kernels (select.cu).

Where a layer's rows lie in host memory, those that a slot's last steps selected stay on the device (paper, section
IV-D): the attention kernel copies every selected row into a store, and the selection knows which clusters are there.
"""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int32, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS, require
from kvseek.core.errors import KernelError
from kvseek.core.streams import SideStream, Ticket
from kvseek.plugins.batch import DeviceBatch
from kvseek.plugins.contract import DeviceIndex, IndexContext
from kvseek.plugins.selection import DeviceSelection, Selection
from kvseek.plugins.shared.group import GROUP_REDUCTIONS

from .config import Config
from .kmeans import ClusterArrays, DeviceKMeans
from .reference import ReferenceIndex

SCORE_THREADS, CHOOSE_THREADS = 256, 1024  # as score.cuh and choose.cuh have them
UNIT = 32  # clusters that are scored together (select.cuh)
SCORE_BLOCKS = 4  # of a multiprocessor: as many as its registers hold at head_dim 128
CHOOSE_STATIC_BYTES = 12 << 10  # upper bound of ChooseMemory (choose.cuh)
LAYERS_IN_FLIGHT = 2  # of a prompt whose keys wait on the device for their clustering
NEVER = -(2**30)  # a decode step that no later one can be near


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
    """Scores of a selection. Layers run one after another, so one work space serves all of them.

    Attributes
    ----------
    units : int
        Units of clusters of the longest region.
    scores : Tensor, float32 [slots, G, units, 32, lanes]
        Of each cluster, as powers of two ("mean": q·k); -inf if it has no keys.
    statistics : Tensor, float32 [slots, G, units, lanes, 2]
        Largest score of a unit, and the sum of the powers relative to it.
    """

    def __init__(self, context: IndexContext, lanes: int) -> None:
        longest = context.extents.max_extents * EXTENT_TOKENS
        self.units = -(-context.config.most_clusters(longest) // UNIT)
        shape = (context.extents.slots, context.num_kv_heads, self.units)
        self.scores = torch.empty((*shape, UNIT, lanes), dtype=torch.float32, device=context.device)
        self.statistics = torch.empty((*shape, lanes, 2), dtype=torch.float32, device=context.device)


class PromptClustering:
    """The side stream on which prompts are clustered, one layer after the other, while the next layers compute."""

    def __init__(self, device: torch.device) -> None:
        self._stream = SideStream(device)
        self._pending: deque[tuple[int, Ticket, tuple[Tensor, ...]]] = deque()  # slot, and what its work reads

    def run(self, slot: int, read: tuple[Tensor, ...], work: Callable[[], None]) -> None:
        """Run `work`, which reads `read`; the current stream waits for older work than that of the layer before."""
        self._reclaim(LAYERS_IN_FLIGHT - 1)
        self._pending.append((slot, self._stream.run(work), read))

    def finish(self, slot: int) -> None:
        """Make the current stream wait for the work of a slot."""
        if any(owner == slot for owner, _, _ in self._pending):
            self._reclaim(0)

    def _reclaim(self, keep: int) -> None:
        # The current stream allocated what is read, so after the wait its memory may go to whatever it runs next.
        while self._pending and (len(self._pending) > keep or self._pending[0][1].done):
            _, ticket, _ = self._pending.popleft()
            ticket.wait()


@dataclass(frozen=True)
class RecentRows:
    """The rows that the last steps selected: a step at position p writes buffer p mod (R + 1), R = cache_steps.

    Attributes
    ----------
    store : Tensor [slots, G, (R + 1) * top_k, 2, D]
        As in DeviceSelection.
    clusters : Tensor, int32 [E, G, S, 4]
        Of each cluster: the last position that selected it, its first row in the store, its rows there, unused.
    """

    store: Tensor
    clusters: Tensor

    @classmethod
    def empty(cls, context: IndexContext) -> RecentRows:
        """Room for all slots, holding nothing."""
        config: Config = context.config
        slots, capacity, heads = context.extents.slots, context.extents.capacity, context.num_kv_heads
        store = (slots, heads, (config.cache_steps + 1) * config.top_k, 2, context.head_dim)
        entries = (capacity, heads, config.slots_per_extent, 4)
        with torch.inference_mode(False):  # they are written to in and outside of it
            return cls(
                torch.empty(store, dtype=context.dtype, device=context.device),
                torch.full(entries, NEVER, dtype=torch.int32, device=context.device),
            )


class CudaIndex(DeviceIndex):
    """The index of one layer. Given the same clusters it selects the reference's rows, in the reference's order.

    Scores differ from the reference's by rounding, so of two clusters that score alike either may be the one that is cut.
    """

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        self.reference = ReferenceIndex(context)  # owns the arrays
        self.config: Config = context.config
        assert context.cuda is not None, "create() makes a CudaIndex only for CUDA kernels"
        self._kernels = context.cuda
        lanes = 1 if self.config.group_reduce == "mean" else context.group_size
        shared = context.shared
        if "clusterkv" not in shared:
            shared["clusterkv"] = (Workspace(context, lanes), PromptClustering(context.device))
        self.workspace: Workspace = shared["clusterkv"][0]
        self._prompts: PromptClustering = shared["clusterkv"][1]
        self._choose_bytes = choose_bytes(self.config.top_k, self.workspace.units, context.extents.max_extents)
        _check_shared_memory(context, self._choose_bytes, self._kernels.shared_memory_per_block - CHOOSE_STATIC_BYTES)
        self._kmeans = DeviceKMeans(context, self.config, self._kernels)
        arrays = self.reference
        self._arrays = ClusterArrays(arrays.centroids, arrays.sizes, arrays.starts, arrays.places)
        self._staged: dict[int, tuple[int, Tensor | None]] = {}  # new clusters, or the sum of the keys that join one
        self._recent: RecentRows | None = None
        self._counters = torch.zeros(2, dtype=torch.int64, device=context.device)

    @property
    def bytes_per_token(self) -> float:
        """See ReferenceIndex.bytes_per_token; where rows lie in host memory, 16 bytes more per cluster slot."""
        recent = 0.0 if self.recent is None else self.recent.clusters[0].nbytes / EXTENT_TOKENS
        return self.reference.bytes_per_token + recent

    @property
    def recent(self) -> RecentRows | None:
        """Rows of the last steps: None if the layer keeps none; allocated when first asked for.

        An index that nobody bound counts as one whose rows lie in host memory: memory is planned before rows are placed.
        """
        unused = self.reference.dense or self.config.cache_steps == 0
        if unused or (self.rows is not None and not self.rows.on_host):
            return None
        if self._recent is None:
            self._recent = RecentRows.empty(self.context)
        return self._recent

    def hit_rate(self) -> float | None:
        """Share of the rows selected so far that the store held; None if there were none. Waits for the device."""
        found, read = self._counters.tolist()
        return found / (found + read) if found + read else None

    def plan(self, length: int) -> tuple[int, ...]:
        """The kernels need no numbers of their own."""
        return ()

    def attended(self, length: int) -> int:
        """Rows of a region that a KV head attends to."""
        return length if self.reference.dense else min(self.config.top_k, length)

    def forget(self, slot: int) -> None:
        """See Index.forget."""
        self._prompts.finish(slot)
        self._staged.pop(slot, None)

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """See Index.build: runs on a side stream; the queries are not used."""
        index = self.reference
        index.begin(slot, keys.shape[1])
        self._staged.pop(slot, None)
        if index.dense:
            return
        self._forget_rows(slot)
        count = index.counts[slot]
        # A request that is cancelled gives its extents back without a wait, and its row of the table is cleared.
        table = self.context.extents.device_table[slot].clone()

        def work() -> None:
            if count:
                self._kmeans.cluster(slot, keys, 0, 0, count, self._arrays, table)
            index.publish(slot)

        # Even without keys: extents may come from a request whose clustering is still under way.
        self._prompts.run(slot, (keys, table), work)

    def finish_build(self, slot: int) -> None:
        """See Index.finish_build."""
        self._prompts.finish(slot)

    def stage(self, slot: int, start: int, keys: Tensor) -> None:
        """See DeviceIndex.stage: new clusters are invisible until the slot's count includes them."""
        index, tokens = self.reference, keys.shape[1]
        if index.dense:
            return
        added = index.new_clusters(slot, start, tokens)
        if added:
            self._kmeans.cluster(slot, keys, start, index.counts[slot], added, self._arrays)
            self._staged[slot] = (added, None)
        else:
            index.write_run(slot, start, tokens)
            self._staged[slot] = (0, keys.sum(dim=1, dtype=torch.float32))

    def commit(self, slot: int, start: int, count: int) -> None:
        """See DeviceIndex.commit."""
        index = self.reference
        if index.dense:
            return
        added, total = self._staged.pop(slot)
        if total is None:
            index.counts[slot] += added
            index.publish(slot)
        else:
            index.join(slot, total, count)

    def launch_select(self, queries: Tensor, batch: DeviceBatch) -> DeviceSelection | None:
        """See DeviceIndex.launch_select: two kernels, or none in a dense layer. Rows ascend inside a cluster."""
        if self.reference.dense:
            return None
        tasks, recent = batch.size * self.context.num_kv_heads, self.recent
        results = [self._entries(batch.size) for _ in range(1 if recent is None else 3)]
        arguments = self._arguments(queries, batch, recent, results)
        chunks = min(self.workspace.units, max(1, SCORE_BLOCKS * self._kernels.multiprocessors // tasks))
        self._launch("score", (chunks, tasks, 1), SCORE_THREADS, arguments, 0)
        self._launch("choose", (tasks, 1, 1), CHOOSE_THREADS, arguments, self._choose_bytes)
        return (
            DeviceSelection(results[0]) if recent is None else DeviceSelection(results[0], recent.store, *results[1:])
        )

    def select(self, queries: Tensor, slots: Sequence[int]) -> Selection:
        """See Index.select. Later steps find no rows of steps before it: nobody has filled the store for this one."""
        if queries.dtype is not self.context.dtype or not queries.is_cuda:
            limit = f"{self.context.dtype} on the GPU, as the index was made for"
            raise KernelError(f"queries: {queries.dtype} on {queries.device}: must be {limit}")
        selection = super().select(queries, slots)
        for slot in slots:
            self._forget_rows(slot)
        return selection

    def _forget_rows(self, slot: int) -> None:
        """Let no step find rows of earlier ones; on the current stream."""
        if self.recent is None:
            return
        owned = self.context.extents.room(slot) // EXTENT_TOKENS
        extents = self.context.extents.device_table[slot, :owned].long()  # stays on the device: nobody waits for it
        self.recent.clusters.index_fill_(0, extents, NEVER)

    def _entries(self, batch: int) -> Tensor:
        shape = (batch, self.context.num_kv_heads, self.config.top_k)
        return torch.empty(shape, dtype=torch.int32, device=self.context.device)

    def _launch(
        self, kernel: str, grid: tuple[int, int, int], threads: int, arguments: SelectArguments, shared_bytes: int
    ) -> None:
        self._kernels.launch(f"kvseek_clusterkv_{kernel}", grid, threads, arguments, shared_bytes, overlap=True)

    def _arguments(
        self, queries: Tensor, batch: DeviceBatch, recent: RecentRows | None, results: Sequence[Tensor]
    ) -> SelectArguments:
        index, work = self.reference, self.workspace
        arrays = {name: getattr(index, name) for name in ("clusters", "centroids", "sizes", "starts", "places")}
        if recent is not None:
            arrays |= {"recent": recent.clusters, "cached": results[1], "keep": results[2]}
        mean = self.config.group_reduce == "mean"
        return SelectArguments(
            **{name: array.data_ptr() for name, array in arrays.items()},
            queries=queries.data_ptr(),
            requests=batch.requests.data_ptr(),
            table=batch.table.data_ptr(),
            scores=work.scores.data_ptr(),
            statistics=work.statistics.data_ptr(),
            counters=self._counters.data_ptr(),
            rows=results[0].data_ptr(),
            kv_heads=self.context.num_kv_heads,
            max_extents=batch.table.shape[1],
            units=work.units,
            top_k=self.config.top_k,
            cache_steps=self.config.cache_steps,
            scale=1.0 if mean else self.context.scaling * math.log2(math.e),
        )


def choose_bytes(top_k: int, units: int, max_extents: int) -> int:
    """Bytes of ChooseArrays (choose.cuh)."""
    return 6 * units * UNIT + 4 * (5 * top_k + max_extents)


def cuda_defines(config: Config, head_dim: int, group_size: int) -> dict[str, int]:
    """Macros that select.cuh expects; raises ConfigError on a head size that the kernels do not support."""
    fits = head_dim % 32 == 0 and 32 <= head_dim <= 256
    limit = "a multiple of 32 up to 256 for ClusterKV on the GPU"
    require(fits, "head_dim", head_dim, limit, "build with --device cpu")
    return {
        "CLUSTERKV_SLOTS": config.slots_per_extent,
        "CLUSTERKV_LANES": 1 if config.group_reduce == "mean" else group_size,
        "CLUSTERKV_REDUCTION": GROUP_REDUCTIONS.index(config.group_reduce),
    }


def _check_shared_memory(context: IndexContext, wanted: int, limit: int) -> None:
    """Raise KernelError unless the `wanted` bytes are among the `limit` that a block of this GPU may ask for."""
    if wanted > limit:
        config, tokens = context.config, context.extents.max_extents * EXTENT_TOKENS
        raise KernelError(
            f"ClusterKV on the GPU: up to {config.most_clusters(tokens)} clusters of {tokens} tokens and top_k = {config.top_k} "
            f"need {wanted} bytes of shared memory: must be at most {limit} on this GPU; raise tokens_per_cluster, or lower "
            "top_k or max_seq_len"
        )
