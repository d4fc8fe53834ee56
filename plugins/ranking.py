"""What methods share that rank rows one by one: the choice of the best for the query heads that share a KV head, and bases.

Each query head scores by itself; its scores become softmax weights, which are averaged over the group. Averaging the queries
instead would lose the heads whose scores cancel (PRKV paper).

    RankedIndex    the top_k rows of a region, however they are found
      ScanIndex    a scan of all rows finds candidates, better estimates choose among them
        CodedIndex both read nested key codes (kernels/reference/codes/key_codes.py)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvseek.core.batch import Batch, Selection
from kvseek.core.index_context import IndexContext
from kvseek.kernels.cpu.codes.store import NativeCodeStore
from kvseek.kernels.cuda.codes.store import CudaCodeStore
from kvseek.kernels.reference.codes.key_codes import BITS, QueryLanes, estimate_at, round_lanes
from kvseek.kernels.reference.codes.rotation import padded_dim, rotate, rotation_signs
from kvseek.kernels.reference.codes.store import CodeStore

from .contract import Budget, Index

Create = Callable[[IndexContext], Index]


def index_by_device(on_gpu: Create, native: Create, reference: Create) -> Create:
    """Return the `create` of a method: for the GPU, on compiled code of the CPU, or the reference."""

    def create(context: IndexContext) -> Index:
        if context.cuda is not None:
            return on_gpu(context)
        return reference(context) if context.library is None else native(context)

    return create


class RankedIndex(Index):
    """Selects the `top_k` rows of its Config from each region, and all of a region that has no more."""

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        self.config: Any = context.config

    def budget(self, length: int) -> Budget:
        """See Index.budget. The rows are the top k."""
        return Budget(min(self.config.top_k, length))

    def select(self, queries: Tensor, batch: Batch) -> Selection | None:
        """See Index.select. Rows int32 [batch, G, top_k] ascend; -1 fills up."""
        kv_heads, top_k = self.context.num_kv_heads, self.config.top_k
        rows = torch.full((batch.size, kv_heads, top_k), -1, dtype=torch.int32, device=queries.device)
        for request, (slot, length) in enumerate(zip(batch.slots, batch.lengths, strict=True)):
            if length <= top_k:
                rows[request, :, :length] = torch.arange(length, dtype=torch.int32, device=queries.device)
            else:
                rows[request] = self.best(queries[request].reshape(kv_heads, -1, queries.shape[-1]), slot, length)
        return Selection(rows)

    @abstractmethod
    def best(self, queries: Tensor, slot: int, length: int) -> Tensor:
        """Choose among the places of a region of more than top_k rows: queries [G, g, D] to [G, top_k], ascending."""


class ScanIndex(RankedIndex):
    """Chooses in two passes: over all rows for candidates, then over these for the rows."""

    def best(self, queries: Tensor, slot: int, length: int) -> Tensor:
        lanes = self.lanes(queries)
        candidates = self.candidates(lanes, slot, length)
        values = self.values(self.estimates(lanes, candidates, slot, length))
        return candidates.gather(1, best_positions(values, self.config.top_k))

    @abstractmethod
    def lanes(self, queries: Tensor) -> Any:
        """Make of queries [G, g, D] what both passes take: that of `lanes` queries, which rank on their own."""

    @abstractmethod
    def candidates(self, lanes: Any, slot: int, length: int) -> Tensor:
        """Find the places that the second pass chooses from: int64 [G, c], c >= top_k, ascending."""

    @abstractmethod
    def estimates(self, lanes: Any, candidates: Tensor, slot: int, length: int) -> Tensor:
        """Estimate q·k of candidates int64 [G, c]: float32 [G, lanes, c]."""

    def values(self, estimates: Tensor) -> Tensor:
        """Reduce estimates [G, lanes, c] to what candidates are ranked by: [G, c]."""
        return softmax_mean(estimates, self.context.scaling)


class CodedIndex(ScanIndex):
    """Keeps codes of every key, whose estimates choose among the candidates.

    The codebook "signs" (rotation_codebook) must be among Traits.codebooks. Entries are made from the keys of whole blocks
    alone, so that requests may share them (Traits.prefix_reuse "entries").
    """

    def __init__(self, context: IndexContext, bits: int = BITS) -> None:
        super().__init__(context)
        self.codes = code_store(context, bits)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of the codes."""
        return self.codes.bytes_per_token

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """See Index.build; the queries are not used."""
        self.codes.append(slot, 0, keys)

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """See Index.append. No selection reads beyond a region's length, so there is nothing to publish."""
        self.codes.append(slot, start, keys)

    def lanes(self, queries: Tensor) -> QueryLanes:
        """Rotate and round queries: [G, g, D] to [G, g, P]."""
        return round_lanes(rotate(queries.float(), self.codes.signs))

    def estimates(self, lanes: QueryLanes, candidates: Tensor, slot: int, length: int) -> Tensor:
        return estimate_at(self.codes.read(slot, length), candidates, lanes)


def code_store(context: IndexContext, bits: int = BITS) -> CodeStore:
    """Make the codes of an index, encoded by what its device has: kernels of the GPU, compiled code of the CPU, or PyTorch."""
    native = CodeStore if context.library is None else NativeCodeStore
    kind = native if context.cuda is None else CudaCodeStore
    return kind(context, context.codebooks["signs"], bits)


def rotation_codebook(seed: int | None, head_dim: int) -> dict[str, Tensor]:
    """Draw the signs of the codes' rotation, for Traits.codebooks; None: an index without codes."""
    return {} if seed is None else {"signs": rotation_signs(seed, padded_dim(head_dim))}


def softmax_mean(scores: Tensor, scaling: float) -> Tensor:
    """Reduce the scores of a group's queries to one value a key: [G, queries, n] (q·k, unscaled) to [G, n]; higher is better.

    The softmax of each query runs over the n keys given, after multiplication by `scaling`.
    """
    return (scores * scaling).softmax(dim=-1).mean(dim=1)


def best_positions(values: Tensor, count: int) -> Tensor:
    """Find the indexes of the `count` largest of values [..., n], ties cut by lowest index: int64 [..., count], ascending."""
    order = values.argsort(dim=-1, descending=True, stable=True)
    return order[..., :count].sort(dim=-1).values
