"""CTkvr on the GPU: the reference's arrays, filled and searched by CUDA kernels (CTkvr paper, sections 3.1 and 3.2)."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from kvseek.core.batch import Batch, Selection
from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.errors import KernelError
from kvseek.core.index_context import IndexContext
from kvseek.kernels.arguments import pointers, require_numbered_rows
from kvseek.kernels.cuda.attention.attend import LayerAttention, address
from kvseek.kernels.cuda.codes.store import CudaCodeStore
from kvseek.kernels.cuda.selection import SelectionWorkspace, require_head_dim
from kvseek.kernels.structs import c_struct
from kvseek.plugins.contract import Attention, Budget, Index

from .config import Config
from .device_build import DeviceBuilder
from .host_cores import HostBuffers, HostCoreAttention
from .reference import ReferenceIndex

PROBE_THREADS, RECALL_THREADS, RERANK_THREADS = 512, 512, 1024
PROBE_CENTROIDS = 64  # centroids of a block (probe.cu)
# Shared memory of the recall kernel for an extent: its number, and a bit for each of its places.
EXTENT_BYTES = 4 + EXTENT_TOKENS // 8
STATIC_BYTES = 9 << 10  # static shared memory of the recall kernel, rounded up
QUERY_BYTES = 12  # of a rounded query beside its integers (kernels/cuda/codes/queries.cuh)
TILE = 16  # keys that a warp scores at once (products.cuh)
# Bytes of keys that the rerank keeps in shared memory: the smallest GPUs have 99 KiB for a block.
LARGEST_KEYS = 80 << 10

StepArguments = c_struct("plugins/ctkvr/cuda/step.cuh", "StepArguments")
CodedStepArguments = c_struct("plugins/ctkvr/cuda/coded.cu", "CodedStepArguments", StepArguments)


class Workspace(SelectionWorkspace):
    """Intermediate results of a selection.

    Attributes
    ----------
    cosines : Tensor, float32 [most, G, ring]
    recalled : Tensor, int32 [most, G, capacity]
    counts : Tensor, int32 [most, G]
    scores : Tensor, float32 [most, G, capacity, g]
    statistics : Tensor, float32 [most, G, capacity / 16 rounded up, g, 2]
    keys : Tensor, int32 [most, G, 2, capacity], or None if the keys of a request and KV head fit into shared memory
    """

    def __init__(self, context: IndexContext, ring: int, capacity: int) -> None:
        super().__init__(context)
        tasks, group = (self.most, context.num_kv_heads), context.group_size
        self.cosines = self.new(torch.float32, *tasks, ring)
        self.recalled, self.counts = self.new(torch.int32, *tasks, capacity), self.new(torch.int32, *tasks)
        self.scores = self.new(torch.float32, *tasks, capacity, group)
        self.statistics = self.new(torch.float32, *tasks, -(-capacity // TILE), group, 2)
        self.shared_key_bytes = 4 * capacity if 4 * capacity <= LARGEST_KEYS else 0
        self.keys = None if self.shared_key_bytes else self.new(torch.int32, *tasks, 2, capacity)


class CudaIndex(Index):
    """The index of one layer. The places of a list may be in any order, because no selection depends on it.

    Scores equal the reference's up to the order of sums, so rows may differ where weights agree to rounding. With
    `execution = "cpu"` and rows in host memory, host cores rerank and attend (host_cores.py), and `select` gives the GPU an
    empty selection. With `execution = "codes"` scores are estimates from codes, which kernels encode and read (coded.cu).

    Attributes
    ----------
    reference : ReferenceIndex
        Owns `centroids` [slots, H, ring, D] with their `means` and `offsets`, and `lists` int32 [slots, G, ring, width].
    written : Tensor, int32 [slots, G]
        Number of centroids that a slot's ring ever received; the kernels count it.
    prompted : Tensor, int32 [slots]
        Number of centroids of the prompt, which are the first that were written.
    listed : Tensor, int32 [slots]
        Tokens of the prompt's retrieval region.

    Raises
    ------
    KernelError
        If a region may be longer than shared memory has bits for.
    """

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        assert context.cuda is not None, "create() makes a CudaIndex only for CUDA kernels"
        self.config: Config = context.config
        self._kernels = context.cuda
        self.reference = ReferenceIndex(context)
        codes = self.reference.codes
        assert codes is None or isinstance(codes, CudaCodeStore), "code_store makes this kind for a GPU"
        self.codes = codes
        self.ring, self.width, self.capacity = self.reference.ring, self.reference.width, self.reference.capacity
        self._recall_bytes, query_bytes = EXTENT_BYTES * context.extents.table.shape[1], 0
        if self.codes is not None:
            require_numbered_rows("CTkvr's codes on the GPU", context)
            query_bytes = context.group_size * (self.codes.signs.shape[0] + QUERY_BYTES)
        _check_region(self._recall_bytes, self._kernels.shared_memory_per_block - query_bytes, context)
        slots, kv_heads = context.extents.slots, context.num_kv_heads
        self.written = torch.zeros((slots, kv_heads), dtype=torch.int32, device=context.device)
        self.prompted, self.listed = torch.zeros((2, slots), dtype=torch.int32, device=context.device)
        self._builder = DeviceBuilder(self._kernels, context.group_size, self.width, context.scaling)
        self.workspace = context.share("ctkvr", lambda: Workspace(context, self.ring, self.capacity))
        # While memory is measured, before rows are placed, `select` ranks on the device, which needs the most memory.
        self._host: HostCoreAttention | None = None
        if self.config.execution == "cpu" and context.rows is not None and context.rows.on_host:
            self._host = HostCoreAttention(self.reference, self.written, self.workspace.most, context.rows)

    @property
    def bytes_per_token(self) -> float:
        return self.reference.bytes_per_token

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """See ReferenceIndex.build. Runs on the current stream."""
        n = keys.shape[1]
        last = self.reference.take_prompt(slot, n, queries)
        self._builder.build(last, keys, self.reference.lists[slot])
        self.written[slot].fill_(last.shape[1])
        self.prompted[slot].fill_(last.shape[1])
        self.listed[slot].fill_(n)
        if self.codes is not None:
            self.codes.append(slot, 0, keys)

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """See ReferenceIndex.append. Runs on the current stream."""
        self.reference.append(slot, start, keys)

    def budget(self, length: int) -> Budget:
        return self.reference.budget(length)

    def select(self, queries: Tensor, batch: Batch) -> Selection:
        """See Index.select. Launches three kernels, or two with host cores. Rows ascend."""
        queries, rows, given = self.workspace.begin(self.context, queries, batch)
        if self._host is None:
            self._recall_and_rerank(self._arguments(given), rows, batch.size)
            return Selection(rows)
        self._recall(self._arguments(given, self._host.buffers), batch.size)
        return Selection(self._host.buffers.no_rows[: batch.size])

    def attend(self, queries: Tensor, batch: Batch, selection: Selection | None, attention: Attention) -> Tensor:
        if self._host is None:
            return attention(queries, batch, selection)
        assert isinstance(attention, LayerAttention), "the engine on a GPU gives the GPU's attention"
        return self._host.attend(queries, batch, selection, attention)

    def _recall_and_rerank(self, arguments: ctypes.Structure, rows: Tensor, batch: int) -> None:
        arguments.scores, arguments.statistics = self.workspace.scores.data_ptr(), self.workspace.statistics.data_ptr()
        arguments.keys, arguments.selected = address(self.workspace.keys), rows.data_ptr()
        self._recall(arguments, batch)
        work, blocks = self.workspace, 1 + self.config.update
        bytes_of_keys = work.shared_key_bytes
        work.launch("ctkvr_rerank", blocks, RERANK_THREADS, arguments, requests=batch, shared_bytes=bytes_of_keys)

    def _recall(self, arguments: ctypes.Structure, batch: int) -> None:
        work, blocks = self.workspace, self.workspace.blocks(batch, -(-self.capacity // TILE))
        work.launch("ctkvr_probe", -(-self.ring // PROBE_CENTROIDS), PROBE_THREADS, arguments, requests=batch)
        if self.codes is None:
            work.launch("ctkvr_recall", blocks, RECALL_THREADS, arguments, shared_bytes=self._recall_bytes)
        else:
            coded = CodedStepArguments(step=arguments, **self.codes.arguments("high", "low"))
            work.launch("ctkvr_recall_coded", blocks, RECALL_THREADS, coded, shared_bytes=self._recall_bytes)

    def _arguments(self, given: dict[str, int], host: HostBuffers | None = None) -> ctypes.Structure:
        copies = {} if host is None else host.targets()
        rows = self.context.rows  # None while memory is measured, when all requests are dense and no row is read
        return StepArguments(
            **(given | {"rows": rows.pointer if rows else 0}),  # the pool's, not those that are selected
            **copies,
            **pointers(self.reference, "centroids", "means", "offsets", "lists"),
            **pointers(self, "written", "prompted", "listed"),
            **pointers(self.workspace, "cosines", "recalled", "counts"),
            extent_stride=rows.extent_stride if rows else 0,
            ring=self.ring,
            width=self.width,
            capacity=self.capacity,
            probes=self.config.probes,
            prompt_probes=self.config.prompt_probes,
            recent=self.config.recent,
            scale=self.context.scaling * math.log2(math.e),
        )


def cuda_macros(config: Config, head_dim: int, group_size: int) -> dict[str, int]:
    """Return the macro of coded.cu; raises ConfigError on a head size that the kernels of the codes do not support."""
    if not config.bits:
        return {}
    remedy = "set execution to 'cpu', or build with --device cpu"
    require_head_dim(head_dim, "with execution = 'codes'", remedy)
    return {"CTKVR_CODE_BITS": config.bits}


def _check_region(recall_bytes: int, limit: int, context: IndexContext) -> None:
    """Raise KernelError unless the recall's bits of a region fit into the `limit` bytes of a block's shared memory."""
    most = (limit - STATIC_BYTES) // EXTENT_BYTES
    extents = context.extents.table.shape[1]
    if extents > most:
        raise KernelError(
            f"CTkvr on the GPU: max_seq_len: regions of up to {extents * EXTENT_TOKENS} tokens need {recall_bytes} bytes of "
            f"shared memory: must be at most {most * EXTENT_TOKENS} tokens, {most * EXTENT_BYTES} bytes, on this GPU; lower "
            "max_seq_len"
        )
