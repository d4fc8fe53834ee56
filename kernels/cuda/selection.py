"""Selections on a GPU: what every launch is given, and the memory of intermediate results, whatever the method."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvseek.core.batch import Batch, most_requests
from kvseek.core.errors import KernelError, require
from kvseek.core.index_context import IndexContext
from kvseek.kernels.arguments import require_fit

from .codes.store import MAX_DIM, MIN_DIM


class SelectionWorkspace:
    """Intermediate results of a method's selections, for batches of up to `most` requests.

    Layers run one after another, and so do the graphs of batch sizes, so one workspace serves all of them. It is allocated when
    it is made, because captured graphs hold its addresses, and because it has to be counted when memory is divided.

    Attributes
    ----------
    most : int
        Requests of the largest batch that the slots allow, those that fill up a graph included (most_requests).
    tasks : int
        Requests times KV heads.
    """

    def __init__(self, context: IndexContext) -> None:
        self._device, self._kernels, self._kv_heads = context.device, context.cuda, context.num_kv_heads
        self.most = most_requests(context.extents.slots)
        self.tasks = self.most * context.num_kv_heads

    def new(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Allocate an array that kernels write before they read it."""
        return torch.empty(shape, dtype=dtype, device=self._device)

    def zeros(self, *shape: int) -> Tensor:
        """Allocate int32 zeros, for kernels that count, and leave zeros behind."""
        return torch.zeros(shape, dtype=torch.int32, device=self._device)

    def blocks(self, batch: int, most: int, of_multiprocessor: int = 1) -> int:
        """Return the blocks of a KV head in a launch that divides work by lengths (Units::divide of units.cuh).

        As many as run at once, `of_multiprocessor` on each, but two for each request, so that long ones get more than one where
        requests are many; no more than `most` for each.
        """
        assert self._kernels is not None, "an index of CUDA kernels asks"
        at_once = of_multiprocessor * self._kernels.multiprocessors
        return min(max(at_once // self._kv_heads, 2 * batch), most * batch)

    def launch(
        self,
        kernel: str,
        blocks: int,
        threads: int,
        arguments: ctypes.Structure,
        *,
        requests: int = 1,
        shared_bytes: int = 0,
        even: bool = False,
    ) -> None:
        """Launch kvseek_`kernel` as CudaKernels.launch: `blocks` blocks for each KV head, and so for each of `requests`."""
        assert self._kernels is not None, "an index of CUDA kernels launches"
        grid = (blocks, self._kv_heads, requests)
        self._kernels.launch(f"kvseek_{kernel}", grid, threads, arguments, shared_bytes, overlap=True, even=even)

    def require(self, batch: int) -> None:
        """Raise KernelError if a batch is larger than the workspace."""
        if batch > self.most:
            raise KernelError(
                f"batch = {batch}: must be at most {self.most}, the requests that the slots allow; raise max_batch_size"
            )

    def begin(self, context: IndexContext, queries: Tensor, batch: Batch) -> tuple[Tensor, Tensor, dict[str, int]]:
        """Check the queries [batch, H, D] of a layer's selection, and allocate its rows.

        Returns
        -------
        queries : Tensor [batch, H, D]
            Contiguous; to be kept until the kernels have been launched.
        rows : Tensor, int32 [batch, G, top_k]
            For the kernels to write.
        arguments : dict
            What the kernels of all methods are given, by the names of their arguments.

        Raises
        ------
        KernelError
            For queries of another dtype or device than the cache's, and for a batch that the slots do not allow.
        """
        top_k = context.config.top_k
        require_fit("queries", queries, context)
        self.require(batch.size)
        queries = queries.contiguous()
        rows = torch.empty((batch.size, context.num_kv_heads, top_k), dtype=torch.int32, device=queries.device)
        arguments = {
            "queries": queries.data_ptr(),
            "requests": batch.requests.data_ptr(),
            "table": batch.table.data_ptr(),
            "rows": rows.data_ptr(),
            "batch": batch.size,
            "kv_heads": context.num_kv_heads,
            "max_extents": batch.table.shape[1],
            "top_k": top_k,
        }
        return queries, rows, arguments


def require_head_dim(head_dim: int, kernels: str, remedy: str = "build with --device cpu") -> None:
    """Raise ConfigError, with the name of the kernels, unless those that hold rotated vectors support a head size."""
    fits = head_dim % 32 == 0 and MIN_DIM <= head_dim <= MAX_DIM
    limit = f"a multiple of 32 from {MIN_DIM} to {MAX_DIM} {kernels} on the GPU"
    require(fits, "head_dim", head_dim, limit, remedy)
