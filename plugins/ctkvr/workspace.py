"""Arguments of the kernels of a CTkvr selection, and the memory for their intermediate results."""

from __future__ import annotations

import torch

from kvseek.core.index_context import IndexContext
from kvseek.kernels.cuda.selection import SelectionWorkspace
from kvseek.kernels.structs import c_struct

TILE = 16  # keys that a warp scores at once (products.cuh)
LARGEST_KEYS = (
    80 << 10
)  # bytes of keys that the rerank keeps in shared memory: the smallest GPUs have 99 KiB for a block

StepArguments = c_struct("plugins/ctkvr/cuda/step.cuh", "StepArguments")
CodedStepArguments = c_struct("plugins/ctkvr/cuda/coded.cu", "CodedStepArguments", StepArguments)
MergeArguments = c_struct("plugins/ctkvr/cuda/merge.cu", "MergeArguments")


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
