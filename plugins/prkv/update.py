"""The periodic choice of a new static set on the GPU: prepared beside the decode steps, published by one launch.

A side stream reads and computes all that is needed, into buffers that no step sees. PUBLISH_STEPS steps later one kernel swaps
rows in the pool, writes the boxes, and makes the hot rows of these places invalid: a step sees all of these changes or none.
The number of steps is fixed, so that a request's tokens do not depend on how fast the side stream was.
Only whole pages take part, so an eviction, which appends places, never touches rows of an update. PRKV paper, section 4.1.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvseek.core.streams import SideStream, Ticket
from kvseek.plugins.attention.splits import address
from kvseek.plugins.contract import IndexContext, LayerRows
from kvseek.plugins.shared.arguments import pointers

from .device_boxes import CudaBoxes
from .device_codes import CudaCodes
from .reference import ReferenceIndex
from .static import candidates, largest, pair_exchange

GATHER_THREADS = 256
GATHER_BLOCKS = 32  # blocks of all KV heads: enough to use PCIe fully, few enough to leave the GPU to decode steps
PUBLISH_THREADS = 128
# Steps from the start of an update until it is published. A few requests' side work has ended by then; if that of many has
# not, the step waits for it, because a request's tokens must not depend on how busy the GPU is.
PUBLISH_STEPS = 4


class RowsArguments(ctypes.Structure):
    """Arguments of kvseek_prkv_gather and kvseek_prkv_scatter, as in update.cu."""

    _fields_ = (
        *((name, c_void_p) for name in ("pool", "table", "places", "rows")),
        ("extent_stride", c_int64),
        *((name, c_int32) for name in ("count", "width")),
    )


@dataclass(frozen=True)
class Exchange:
    """Everything that an update is going to write, for P pairs of places, in buffers of the side stream.

    Attributes
    ----------
    count : Tensor, int32 [1]
        Number of static rows after the update.
    leaving, entering : Tensor, int32 [G, P]
        Pairs of places whose rows are swapped; -1 behind the last pair.
    entered, left : Tensor [G, P, 2, D]
        Rows of the places `entering` and `leaving` before the update; zeros behind the last pair.
    new_boxes : Tensor [G, P, 2, D], or None
        Boxes, after the update, of the pages that the places `entering` lie in; None if pages have no boxes.
    """

    count: Tensor
    leaving: Tensor
    entering: Tensor
    entered: Tensor
    left: Tensor
    new_boxes: Tensor | None


@dataclass
class Update:
    """An update of a slot that is under way, with the tensors of the current stream that the side stream reads."""

    queries: Tensor
    picked: Tensor
    table: Tensor
    target: Tensor
    whole: int
    ticket: Ticket | None = None
    results: list[Exchange] = field(default_factory=list)
    steps: int = 0  # of the slot since the update began

    @property
    def done(self) -> bool:
        """Whether the side stream has ended its work; never waits."""
        return self.ticket is not None and self.ticket.done


class Updater:
    """Prepares and publishes the updates of one layer."""

    def __init__(self, context: IndexContext, arrays: ReferenceIndex, summaries: CudaBoxes | CudaCodes) -> None:
        self._context, self._arrays, self._summaries = context, arrays, summaries
        assert context.cuda is not None, "made by an index of CUDA kernels"
        self._kernels = context.cuda
        if "prkv_side" not in context.shared:
            context.shared["prkv_side"] = SideStream(context.device)
        self._side: SideStream = context.shared["prkv_side"]
        self._under_way: dict[int, Update] = {}
        self._dropped: list[Update] = []

    @torch.inference_mode()
    def start(self, slot: int) -> None:
        """Begin an update, unless one is under way or there is nothing to choose from; raises torch.OutOfMemoryError."""
        arrays, page = self._arrays, self._arrays.config.page
        whole = self._context.lengths[slot] // page * page
        if slot in self._under_way or arrays.config.most_static == 0 or whole == 0:
            return
        table = self._context.extents.device_table[slot].clone()  # the slot may be closed while the side stream reads
        queries = arrays.recent[slot].transpose(0, 1).contiguous()
        update = Update(queries, arrays.by_page(arrays.picked, slot, whole), table, arrays.targets[slot], whole)
        update.ticket = self._side.run(lambda: update.results.append(self._prepare(slot, update)))
        arrays.picked.index_fill_(0, arrays.extents_of(slot, whole), 0)  # the update has a copy
        self._under_way[slot] = update

    def publish(self, slot: int) -> None:
        """Count a step of the slot, and publish its update in the step that is to see it first; the host does not wait."""
        update = self._under_way.get(slot)
        if update is None:
            return
        update.steps += 1
        if update.steps < min(PUBLISH_STEPS, self._arrays.config.update_interval):
            return
        del self._under_way[slot]
        assert update.ticket is not None, "start() gives every update its ticket"
        update.ticket.wait()
        # The buffers belong to the side stream. Its next work waits for the current stream, and so for this launch too.
        self._publish(slot, update)

    def forget(self, slot: int) -> None:
        """Drop the update that is under way for a slot, so that it is never published."""
        self._dropped = [update for update in self._dropped if not update.done]
        update = self._under_way.pop(slot, None)
        if update is not None:
            self._dropped.append(update)  # the side stream still reads the current stream's copies

    def __len__(self) -> int:
        """Number of updates that are under way."""
        return len(self._under_way)

    @property
    def _rows(self) -> LayerRows:
        assert self._context.rows is not None, "an index without rows only tells what memory it takes"
        return self._context.rows

    def _prepare(self, slot: int, update: Update) -> Exchange:
        config, arrays, scaling = self._arrays.config, self._arrays, self._context.scaling
        places, valid = candidates(config, update.picked, update.whole)
        keys = self.gather(update.table, torch.where(valid, places, -1), self._context.head_dim)
        values = arrays.observe(update.queries, keys, scaling, valid.sum(dim=1, dtype=torch.int32))
        del keys
        count = update.target.clamp(max=update.whole)
        chosen = largest(values, count, config.most_static)
        leaving, entering = pair_exchange(chosen, places, arrays.homes[slot].long(), count)
        row = 2 * self._context.head_dim
        return Exchange(
            count.int().view(1),
            leaving.int().contiguous(),
            entering.int().contiguous(),
            self.gather(update.table, entering, row),
            self.gather(update.table, leaving, row),
            self._boxes(update, leaving, entering) if isinstance(self._summaries, CudaBoxes) else None,
        )

    def _boxes(self, update: Update, leaving: Tensor, entering: Tensor) -> Tensor:
        """Compute the boxes that the pages of `entering` will have after the pairs are swapped: [G, P, 2, D]."""
        page, far = self._arrays.config.page, torch.iinfo(torch.int64).max
        inside = torch.arange(page, device=entering.device)
        places = (entering[..., None] // page * page + inside).flatten(1)
        ascending = torch.where(entering >= 0, entering, far)  # `entering` is ascending already
        near = torch.searchsorted(ascending, places).clamp(max=entering.shape[1] - 1)
        moved = ascending.gather(1, near) == places
        sources = torch.where(moved, leaving.gather(1, near), places).clamp(min=-1)
        keys = self.gather(update.table, sources, self._context.head_dim)
        keys = keys.view(*entering.shape, page, -1)
        return torch.stack((keys.amin(dim=2), keys.amax(dim=2)), dim=2)

    def gather(self, table: Tensor, places: Tensor, width: int) -> Tensor:
        """Read the first `width` numbers of the rows at places int64 [G, m]: [G, m, width]; zeros for -1.

        `table` int32 [max_extents] is a slot's row of the extent table.
        """
        out = torch.empty((*places.shape, width), dtype=self._context.dtype, device=self._context.device)
        self._copy("kvseek_prkv_gather", table, 0, places.int().contiguous(), out)
        return out

    def sort_rows(self, slot: int, first: int) -> None:
        """See Index.sort_rows. The rows of one KV head are read, on the side stream, while those of the head before are written.

        There may be no memory for a copy of the rows of all heads; the work space counts two (activation_memory.py).
        """
        context, sources = self._context, self._arrays.places_from(slot, first).int()
        heads, count = sources.shape
        if count == 0:
            return
        table = context.extents.device_table[slot]
        targets = first + torch.arange(count, dtype=torch.int32, device=context.device)
        rows = torch.empty((2, 1, count, 2 * context.head_dim), dtype=context.dtype, device=context.device)

        def read(head: int) -> Ticket:  # allocates nothing, so that no error leaves work behind that nobody waits for
            places, out = sources[head][None], rows[head % 2]
            return self._side.run(lambda: self._copy("kvseek_prkv_gather", table, head, places, out))

        ticket = read(0)
        for head in range(heads):
            ticket.wait()
            if head + 1 < heads:
                ticket = read(head + 1)  # into the buffer that the head before this one has been written from
            self._copy("kvseek_prkv_scatter", table, head, targets[None], rows[head % 2])

    def _copy(self, kernel: str, table: Tensor, head: int, places: Tensor, rows: Tensor) -> None:
        """Copy between the pool and rows [heads, m, width]: those at places int32 [heads, m] of KV heads `head` and on."""
        (heads, count, width), (_, _, of_head, *row) = rows.shape, self._rows.pool.shape
        arguments = RowsArguments(
            pool=self._rows.pointer + head * of_head * math.prod(row) * rows.element_size(),
            table=table.data_ptr(),
            places=places.data_ptr(),
            rows=rows.data_ptr(),
            extent_stride=self._rows.extent_stride,
            count=count,
            width=width,
        )
        grid = (max(1, GATHER_BLOCKS // heads), heads, 1)
        self._kernels.launch(kernel, grid, GATHER_THREADS, arguments)

    def _publish(self, slot: int, update: Update) -> None:
        (exchange,) = update.results
        arrays = self._arrays
        arguments = self._summaries.publish_arguments(
            **pointers(exchange, "leaving", "entering", "entered", "left", "count"),
            **self._summaries.exchanged(exchange.new_boxes),
            pool=self._rows.pointer,
            table=update.table.data_ptr(),
            frames=address(self._context.frames),
            static_rows=arrays.static_rows[slot].data_ptr(),
            homes=arrays.homes[slot].data_ptr(),
            tokens=address(arrays.tokens),
            extent_stride=self._rows.extent_stride,
            kv_heads=self._context.num_kv_heads,
            pairs=exchange.leaving.shape[1],
            most_static=arrays.config.most_static,
        )
        grid = (exchange.leaving.shape[1], self._context.num_kv_heads, 1)
        self._kernels.launch("kvseek_prkv_publish", grid, PUBLISH_THREADS, arguments)
