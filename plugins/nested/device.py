"""Nested codes on the GPU: the reference's arrays, filled and searched by CUDA kernels (docs/nested_codes.md)."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_void_p
from typing import Any

import torch
from torch import Tensor

from kvseek.core.batch import Batch, most_requests
from kvseek.core.config import EXTENT_TOKENS, require
from kvseek.core.index_context import IndexContext
from kvseek.core.selection import Selection
from kvseek.kernels.arguments import require_fit, require_numbered_rows, require_room
from kvseek.kernels.cuda.codes.store import MAX_DIM, MIN_DIM, CudaCodeStore

from .reference import ReferenceIndex

BINS = 4096  # of a histogram of scores
SCAN_THREADS, CHOOSE_THREADS = 256, 512
SCAN_BLOCKS = 2  # blocks of the scan of a multiprocessor
MOST_BLOCKS = 16  # blocks of a task in the choice, which share a multiprocessor each
HELD_CANDIDATES = 1600  # that the choice ranks without reading them again


class SelectArguments(ctypes.Structure):
    """Arguments of the kernels of a selection, as in select.cuh."""

    _fields_ = (
        *((name, c_void_p) for name in ("queries", "requests", "table", "high", "low", "scales")),
        *((name, c_void_p) for name in ("means", "mean_steps", "signs")),
        *((name, c_void_p) for name in ("scores", "totals", "places", "estimates", "keys")),
        *((name, c_void_p) for name in ("counts", "normalisers", "finished", "rows")),
        *(
            (name, c_int32)
            for name in ("kv_heads", "max_extents", "top_k", "chunks", "blocks", "capacity", "block_bits")
        ),
        ("scaling", c_float),
    )


class Workspace:
    """Intermediate results of a selection, for batches of up to `most` requests.

    Layers run one after another, and so do the graphs of batch sizes, so one workspace serves all of them. It is allocated when
    it is made, because captured graphs hold its addresses, and because it has to be counted when memory is divided. Scores lie in
    scratch extents: 2 bytes per token and KV head.

    Attributes
    ----------
    most : int
        Requests of the largest batch that the slots allow, those that fill up a graph included (most_requests).
    capacity : int
        Most candidates of a task. Keys whose score lies in the same bin as the last wanted one's are candidates as well, as far
        as there is room.
    scores : Tensor, int16 [scratch extents, G, 1024]
    """

    def __init__(self, context: IndexContext, candidates: int, multiprocessors: int) -> None:
        self._kv_heads, self._multiprocessors = context.num_kv_heads, multiprocessors
        self.most = most_requests(context.extents.slots)
        self.capacity = max(candidates, min(2 * candidates, HELD_CANDIDATES))
        tasks = self.most * self._kv_heads
        # One for each block of the choice, whatever the batch size.
        lists = max(tasks, min(multiprocessors, MOST_BLOCKS * tasks))

        def new(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=context.device)

        self.scores = new((context.scratch_extents, self._kv_heads, EXTENT_TOKENS), torch.int16)
        self._of_lists = {
            "places": new((lists, self.capacity), torch.int32),
            "estimates": new((lists, self.capacity, context.group_size), torch.float32),
            "keys": new((lists, self.capacity), torch.int32),
            "counts": new((lists,), torch.int32),
            "normalisers": new((lists, context.group_size, 2), torch.float32),
        }
        self._of_tasks = {  # each selection leaves zeros behind, for tasks of any batch size
            "totals": torch.zeros((tasks, BINS), dtype=torch.int32, device=context.device),
            "finished": torch.zeros(tasks, dtype=torch.int32, device=context.device),
        }

    def __call__(self, batch: int) -> dict[str, Any]:
        """Return arrays [tasks, ...] and grid sizes for a batch, by their names in SelectArguments.

        Raises KernelError if the batch is larger than the workspace.
        """
        require_room(batch, self.most)
        tasks = batch * self._kv_heads
        blocks = min(MOST_BLOCKS, max(1, self._multiprocessors // tasks))
        return {
            "chunks": max(1, SCAN_BLOCKS * self._multiprocessors // tasks),
            "blocks": blocks,
            "capacity": self.capacity,
            **{
                name: array[: tasks * blocks].view(tasks, blocks, *array.shape[1:])
                for name, array in self._of_lists.items()
            },
            **{name: array[:tasks] for name, array in self._of_tasks.items()},
        }


class CudaIndex(ReferenceIndex):
    """The reference's arrays, filled and searched by kernels.

    Codes equal the reference's but for channels that lie at the border of two levels up to rounding. At least as many keys are
    candidates as with the reference: those of the last bin of scores as far as there is room, the first by place.
    """

    store_type = CudaCodeStore
    codes: CudaCodeStore

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        assert context.cuda is not None, "create() makes a CudaIndex only for CUDA kernels"
        self._kernels = context.cuda
        require_numbered_rows("nested codes on the GPU", context)
        if "nested" not in context.shared:
            candidates = self.config.candidates * self.config.top_k
            context.shared["nested"] = Workspace(context, candidates, self._kernels.multiprocessors)
        self.workspace: Workspace = context.shared["nested"]

    def select(self, queries: Tensor, batch: Batch) -> Selection:
        """See ReferenceIndex.select. Launches two kernels."""
        require_fit("queries", queries, self.context)
        queries, heads = queries.contiguous(), self.context.num_kv_heads
        scratch = self.workspace(batch.size)
        rows = torch.empty((batch.size, heads, self.config.top_k), dtype=torch.int32, device=queries.device)
        arrays = {name: value.data_ptr() if isinstance(value, Tensor) else value for name, value in scratch.items()}
        arguments = SelectArguments(
            **arrays,
            **self.codes.arguments("high", "low"),
            queries=queries.data_ptr(),
            requests=batch.requests.data_ptr(),
            table=batch.table.data_ptr(),
            scores=self.workspace.scores.data_ptr(),
            rows=rows.data_ptr(),
            kv_heads=heads,
            max_extents=batch.table.shape[1],
            top_k=self.config.top_k,
            scaling=self.context.scaling,
        )
        tasks = batch.size * heads
        for kernel, blocks, threads in (
            ("scan", scratch["chunks"], SCAN_THREADS),
            ("choose", scratch["blocks"], CHOOSE_THREADS),
        ):
            grid = (blocks, tasks, 1)
            self._kernels.launch(f"kvseek_nested_{kernel}", grid, threads, arguments, overlap=True, even=True)
        return Selection(rows)


def cuda_macros(head_dim: int, group_size: int) -> dict[str, int]:
    """Return no macros: kernels need none of their own. Raises ConfigError on a head size that they do not support."""
    limit = f"a multiple of 32 from {MIN_DIM} to {MAX_DIM}"
    fits = head_dim % 32 == 0 and MIN_DIM <= head_dim <= MAX_DIM
    require(fits, "head_dim", head_dim, f"{limit} for nested codes on the GPU", "build with --device cpu")
    return {}
