"""The periodic choice of a new static set on the GPU: prepared beside the decode steps, published between two of them.

A side stream reads and computes all that is needed, into buffers that no step sees. PUBLISH_STEPS steps later the set, and what
pages are scored by, change on the stream of the steps: a step sees all of these changes or none. The number of steps is fixed,
so that a request's tokens do not depend on how fast the side stream was. Only tokens of whole pages take part, so an eviction,
which appends tokens, never touches what an update writes. PRKV paper, section 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvseek.core.index_context import IndexContext
from kvseek.core.streams import SideStream, SideWork
from kvseek.kernels.structs import c_struct

from .reference import ReferenceIndex
from .static import choose

GATHER_THREADS = 256
GATHER_BLOCKS = 32  # blocks of all KV heads: enough to use PCIe fully, few enough to leave the GPU to decode steps
# Steps from the start of an update until it is published. A few requests' side work has ended by then; if that of many has
# not, the step waits for it, because a request's tokens must not depend on how busy the GPU is.
PUBLISH_STEPS = 4

KeysArguments = c_struct("plugins/prkv/cuda/update.cu", "KeysArguments")


@dataclass
class Update:
    """An update of a slot that is under way.

    Attributes
    ----------
    queries, picked, table, old : Tensor
        Copies, of the current stream, of what the side stream reads: queries [H, w, D], counts of pages int32 [G, pages], the
        slot's row of the extent table, and its static set int64 [G, s].
    whole : int
        Tokens that take part.
    count : int
        Static tokens from now on.
    results : list
        Of the side stream: the new static set int64 [G, count], and what Summaries.prepare has returned for it.
    steps : int
        Of the slot since the update began.
    """

    queries: Tensor
    picked: Tensor
    table: Tensor
    old: Tensor
    whole: int
    count: int
    work: SideWork | None = None
    results: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    steps: int = 0

    @property
    def done(self) -> bool:
        """Whether the side stream has ended its work; never waits."""
        return self.work is not None and self.work.done


class Updater:
    """Prepares and publishes the updates of one layer."""

    def __init__(self, context: IndexContext) -> None:
        self._context = context
        assert context.cuda is not None, "made by an index of CUDA kernels"
        self._kernels = context.cuda
        self._side = context.share("prkv.side", lambda: SideStream(context.device))
        self._under_way: dict[int, Update] = {}
        self._dropped: list[Update] = []

    @torch.inference_mode()
    def start(self, index: ReferenceIndex, slot: int) -> None:
        """Begin an update, unless one is under way or there is nothing to choose from; raises torch.OutOfMemoryError."""
        whole = index.whole(self._context.lengths[slot])
        count = index.static_count(whole)
        if slot in self._under_way or count == 0:
            return
        table = self._context.extents.device_table[slot].clone()  # the slot may be closed while the side stream reads
        queries = index.recent[slot].transpose(0, 1).contiguous()
        update = Update(queries, index.take_picked(slot, whole), table, index.static_of(slot), whole, count)
        update.work = self._side.run(lambda: update.results.append(self._prepare(index, update)))
        self._under_way[slot] = update

    @torch.inference_mode()
    def publish(self, index: ReferenceIndex, slot: int) -> None:
        """Count a step of the slot, and publish its update in the step that is to see it first; the host does not wait."""
        update = self._under_way.get(slot)
        if update is None:
            return
        update.steps += 1
        if update.steps < min(PUBLISH_STEPS, index.config.update_interval):
            return
        del self._under_way[slot]
        assert update.work is not None, "start() gives every update its work"
        update.work.wait()
        # The buffers belong to the side stream. Its next work waits for the current stream, and so for these launches too.
        ((static, prepared),) = update.results
        index.summaries.renew(slot, update.old, static, prepared)
        index.set_static(slot, static)

    def forget(self, slot: int) -> None:
        """Drop the update that is under way for a slot, so that it is never published."""
        self._dropped = [update for update in self._dropped if not update.done]
        update = self._under_way.pop(slot, None)
        if update is not None:
            self._dropped.append(update)  # the side stream still reads the current stream's copies

    def __len__(self) -> int:
        """Number of updates that are under way."""
        return len(self._under_way)

    def _prepare(self, index: ReferenceIndex, update: Update) -> tuple[Tensor, Tensor | None]:
        tokens, counts = index.candidates(update.old, update.picked, update.whole)
        keys = self.gather(update.table, tokens)
        values = index.observe(update.queries, keys, self._context.scaling, counts.int())
        static = choose(values, tokens, update.count)
        return static, index.summaries.prepare(keys, static)

    def gather(self, table: Tensor, tokens: Tensor) -> Tensor:
        """Read the keys of tokens int64 [G, m]: [G, m, D]. `table` int32 [max_extents] is a slot's row of the extent table."""
        context, rows = self._context, self._context.rows
        assert rows is not None, "an index without rows only tells what memory it takes"
        keys = torch.empty((*tokens.shape, context.head_dim), dtype=context.dtype, device=context.device)
        numbers = tokens.int().contiguous()
        arguments = KeysArguments(
            pool=rows.pointer,
            table=table.data_ptr(),
            tokens=numbers.data_ptr(),
            keys=keys.data_ptr(),
            extent_stride=rows.extent_stride,
            count=tokens.shape[1],
        )
        grid = (max(1, GATHER_BLOCKS // tokens.shape[0]), tokens.shape[0], 1)
        self._kernels.launch("kvseek_prkv_gather", grid, GATHER_THREADS, arguments)
        return keys
