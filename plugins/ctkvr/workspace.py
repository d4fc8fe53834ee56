"""Arguments of the kernels of a CTkvr selection, and the memory for their intermediate results."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch

from kvseek.core.index_context import IndexContext
from kvseek.kernels.cuda.selection import SelectionWorkspace

TILE = 16  # keys that a warp scores at once (products.cuh)
LARGEST_KEYS = (
    80 << 10
)  # bytes of keys that the rerank keeps in shared memory: the smallest GPUs have 99 KiB for a block


class StepArguments(ctypes.Structure):
    """Arguments of kvseek_ctkvr_probe, _recall and _rerank, as in step.cuh."""

    _fields_ = (
        *((name, c_void_p) for name in ("queries", "requests", "table", "rows", "centroids", "means", "offsets")),
        *((name, c_void_p) for name in ("lists", "written", "prompted", "listed", "cosines", "recalled", "counts")),
        *((name, c_void_p) for name in ("scores", "statistics", "keys", "selected", "host_recalled", "host_counts")),
        *((name, c_void_p) for name in ("host_queries", "host_slots")),
        ("extent_stride", c_int64),
        *((name, c_int32) for name in ("batch", "kv_heads", "max_extents", "ring", "width", "capacity", "probes")),
        *((name, c_int32) for name in ("prompt_probes", "recent", "top_k")),
        ("scale", c_float),
    )


class CodedStepArguments(ctypes.Structure):
    """Arguments of kvseek_ctkvr_recall_coded, as in coded.cu."""

    _fields_ = (
        ("step", StepArguments),
        *((name, c_void_p) for name in ("high", "low", "scales", "means", "mean_steps", "signs")),
        ("block_bits", c_int32),
    )


class MergeArguments(ctypes.Structure):
    """Arguments of kvseek_ctkvr_merge, as in merge.cu."""

    _fields_ = (
        *((name, c_void_p) for name in ("queries", "requests", "out", "lse", "host_out", "host_lse", "host_best")),
        *((name, c_void_p) for name in ("centroids", "means", "offsets", "lists", "written")),
        *((name, c_int32) for name in ("kv_heads", "ring", "width", "top_k")),
    )


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
