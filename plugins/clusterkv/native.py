"""ClusterKV on the CPU with compiled kernels: the reference's index, encoded and searched in C++, clustered in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.core.batch import Batch, Selection
from kvseek.core.cpu_library import pointer
from kvseek.core.index_context import IndexContext
from kvseek.kernels.cpu.codes.store import NativeCodeStore
from kvseek.kernels.cpu.selection import NativeSelection, require_native
from kvseek.kernels.reference.codes.key_codes import STEPS
from kvseek.kernels.structs import c_struct

from .reference import ReferenceIndex

ClusterkvSelectArguments = c_struct("plugins/clusterkv/cpu/select.cpp", "ClusterkvSelectArguments")


class NativeIndex(ReferenceIndex):
    """The reference's arrays, encoded and searched by compiled kernels.

    From equal clusters and codes, estimates equal the reference's to the bit. Scores of clusters and softmax weights differ by
    rounding, so of two clusters, or of two rows, of nearly equal value either may be taken. A region of at most top_k rows is
    selected in the order of its places, not of its clusters.
    """

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        require_native("native clusters", context)
        config = self.config
        fields: dict[str, float] = {
            "kv_heads": context.num_kv_heads,
            "dim": context.head_dim,
            "bfloat16": context.dtype is torch.bfloat16,
        }
        if isinstance(self.codes, NativeCodeStore):
            fields |= self.codes.arguments | {"step": STEPS[config.rerank_bits]}
        arrays = ("clusters", "centroids", "sizes", "starts", "spreads", "places")
        arguments = ClusterkvSelectArguments(
            **fields,
            **{name: pointer(getattr(self, name)) for name in arrays},
            group=context.group_size,
            top_k=config.top_k,
            listed=config.rows_of_clusters,
            clusters_per_extent=config.clusters_per_extent,
            scaling=context.scaling,
            spread_weight=config.spread_weight,
        )
        self._selection = NativeSelection("kvseek_clusterkv_select", arguments, context)

    def select(self, queries: Tensor, batch: Batch) -> Selection | None:
        return None if self.dense else self._selection(queries, batch)
