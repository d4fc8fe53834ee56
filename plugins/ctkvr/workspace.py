"""Arguments of the kernels of a CTkvr selection, and the memory for their intermediate results."""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.core.batch import most_requests
from kvseek.core.index_context import IndexContext
from kvseek.kernels.arguments import require_room
from kvseek.kernels.structs import c_struct

TILE = 16  # keys that a warp scores at once (products.cuh)
LARGEST_KEYS = (
    80 << 10
)  # bytes of keys that the rerank keeps in shared memory: the smallest GPUs have 99 KiB for a block

StepArguments = c_struct("plugins/ctkvr/cuda/step.cuh", "StepArguments")
CodedStepArguments = c_struct("plugins/ctkvr/cuda/coded.cu", "CodedStepArguments", StepArguments)
MergeArguments = c_struct("plugins/ctkvr/cuda/merge.cu", "MergeArguments")


class Workspace:
    """Intermediate results of a selection, for batches of up to `most` requests.

    Layers run one after another, so one workspace serves all of them. It is allocated when it is made, because captured graphs
    hold its addresses, and because it has to be counted when memory is divided.

    Attributes
    ----------
    most : int
        Requests of the largest batch that the slots allow, those that fill up a graph included (most_requests).
    cosines : Tensor, float32 [most, G, ring]
    recalled : Tensor, int32 [most, G, capacity]
    counts : Tensor, int32 [most, G]
    scores : Tensor, float32 [most, G, capacity, g]
    statistics : Tensor, float32 [most, G, capacity / 16 rounded up, g, 2]
    keys : Tensor, int32 [most, G, 2, capacity], or None if the keys of a request and KV head fit into shared memory
    """

    def __init__(self, context: IndexContext, ring: int, capacity: int) -> None:
        self.most, self._kv_heads, group = (
            most_requests(context.extents.slots),
            context.num_kv_heads,
            context.group_size,
        )
        tasks = (self.most, self._kv_heads)

        def new(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty((*tasks, *shape), dtype=dtype, device=context.device)

        self.cosines = new(torch.float32, ring)
        self.recalled, self.counts = new(torch.int32, capacity), new(torch.int32)
        self.scores = new(torch.float32, capacity, group)
        self.statistics = new(torch.float32, -(-capacity // TILE), group, 2)
        self.shared_key_bytes = 4 * capacity if 4 * capacity <= LARGEST_KEYS else 0
        self.keys = None if self.shared_key_bytes else new(torch.int32, 2, capacity)

    def require(self, batch: int) -> None:
        """Raise KernelError if a batch is larger than the workspace."""
        require_room(batch, self.most)
