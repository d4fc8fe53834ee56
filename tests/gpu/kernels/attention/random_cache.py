"""A four-region cache of random rows on the GPU or in host memory, and what attention over it should give."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvseek.core.batch import Batch, RequestState, Selection
from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.extents import ExtentTable
from kvseek.engine.cache.row_storage import RowForm
from kvseek.kernels.reference.attention import attend as reference
from kvseek.kernels.reference.attention.rounded_rows import round_rows, widen_rows

POISON = float("nan")  # what memory that must not be read holds


class RandomCache:
    """One layer's window and row pool. Whatever no request may read is NaN.

    Parameters
    ----------
    lengths : sequence of int
        Retrieval tokens of each slot. One slot more is for padding requests.
    window_rows, sink : int
        Rows of the window and of its sink.
    host_rows : bool
        Keep the row pool in pinned host memory.
    layers : int
        Layers of the pool; this layer is the last, so that the stride between extents is not the least one.
    rounded : bool
        Rows have 8 bits.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
        window_rows: int = 88,
        sink: int = 16,
        host_rows: bool = False,
        layers: int = 2,
        rounded: bool = False,
    ) -> None:
        self.lengths, self.kv_heads, self.dim = list(lengths), kv_heads, dim
        self.sink, self.ring, self.device = sink, window_rows - sink, device
        needed = [-(-length // EXTENT_TOKENS) for length in lengths]
        self.extents = ExtentTable(len(lengths) + 1, max(1, *needed), sum(needed) + 1, device)
        for slot in reversed(range(len(lengths))):  # not the order in which attention meets them
            self.extents.reserve(slot, lengths[slot])
        form, pinned = RowForm(kv_heads, dim, dtype, rounded), host_rows and device.type == "cuda"
        memory, shape = torch.device("cpu") if host_rows else device, form.shape(layers, self.extents.capacity)
        planes = form.planes(torch.zeros(shape, dtype=form.dtype, device=memory, pin_memory=pinned))
        planes[-1].fill_(POISON)
        self.rows, self.scales = planes[0][:, layers - 1], planes[1][:, layers - 1] if rounded else None
        for slot, length in enumerate(lengths):
            values = torch.randn(kv_heads, length, 2, dim, device=device).to(dtype)
            for plane, part in zip(planes, round_rows(values) if rounded else (values,), strict=True):
                self.extents.write(plane[:, layers - 1], slot, 0, part)
        self.window = torch.full((len(lengths) + 1, kv_heads, window_rows, 2, dim), POISON, dtype=dtype, device=device)

    def request(
        self, slot: int, sink_rows: int, ring_first: int, ring_rows: int, position: int, dense: bool
    ) -> RequestState:
        """Fill the valid window rows of a slot, poison the others, and describe the request."""
        window = self.window[slot]
        window.fill_(POISON)
        ring = (torch.arange(ring_first, ring_first + ring_rows) % self.ring) + self.sink
        valid = torch.cat((torch.arange(sink_rows), ring)).to(self.device)
        fresh = torch.randn(self.kv_heads, len(valid), 2, self.dim, device=self.device)
        window[:, valid] = fresh.to(window.dtype)
        return RequestState(
            token=7,
            slot=slot,
            position=position,
            sink_rows=sink_rows,
            ring_first=ring_first,
            ring_rows=ring_rows,
            length=self.lengths[slot],
            dense=dense,
        )

    def padding(self) -> RequestState:
        """What fills up a graph's bucket: the last slot, one window row, no retrieval rows."""
        slot = len(self.lengths)
        self.window[slot, :, 0] = 1.0
        return RequestState(slot=slot, sink_rows=1, length=0, dense=True)

    def batch(self, requests: Sequence[RequestState]) -> Batch:
        """Requests as kernels read them."""
        return Batch.of(requests, self.extents.device_table)

    def select(self, requests: Sequence[RequestState], entries: int) -> Tensor:
        """Random places, ascending, -1 at the end: int32 [batch, G, entries]."""
        rows = torch.full((len(requests), self.kv_heads, entries), -1, dtype=torch.int32)
        for number, request in enumerate(requests):
            for head in range(self.kv_heads):
                chosen = torch.randperm(request.length)[:entries].sort().values.int()
                rows[number, head, : len(chosen)] = chosen
        return rows.to(self.device)

    def pages(self, requests: Sequence[RequestState], entries: int, page: int) -> Tensor:
        """Random pages, their places next to each other; a list's last page may be cut, -1s may stand within one.

        Pages start at any multiple of `page`, so some end behind the slot's last row: -1 stands for what they lack.
        """
        rows = torch.full((len(requests), self.kv_heads, entries), -1, dtype=torch.int32)
        for number, request in enumerate(requests):
            for head in range(self.kv_heads):
                first = torch.randperm(-(-request.length // page))[: -(-entries // page)].int() * page
                places = (first[:, None] + torch.arange(page, dtype=torch.int32)).flatten()[:entries]
                rows[number, head, : len(places)] = torch.where(places < request.length, places, -1)
        return rows.to(self.device)

    def expected_lse(
        self, queries: Tensor, requests: Sequence[RequestState], selected: Tensor | None, scaling: float
    ) -> Tensor:
        """Log-sum-exp of the scaled scores of all attended rows, in float32: [batch, H] on the CPU."""
        group = queries.shape[1] // self.kv_heads
        result = torch.empty(queries.shape[:2])
        for number, request in enumerate(requests):
            ring = torch.arange(request.ring_first, request.ring_first + request.ring_rows) % self.ring + self.sink
            window_rows = torch.cat((torch.arange(request.sink_rows), ring))
            pool = self.extents.read(self.wide_rows(), request.slot, request.length)[:, :, 0]
            for head in range(self.kv_heads):
                places = torch.arange(request.length)
                if selected is not None and not request.dense:
                    own = selected[number, head].cpu().long()
                    places = own[own >= 0]
                window = self.window[request.slot, head, window_rows.to(self.device), 0].float().cpu()
                keys = torch.cat((window, pool[head, places]))
                own_heads = slice(head * group, (head + 1) * group)
                scores = queries[number, own_heads].float().cpu() @ keys.T * scaling
                result[number, own_heads] = scores.logsumexp(-1)
        return result

    def wide_rows(self) -> Tensor:
        """The layer's part of the pool in float32, on the CPU."""
        if self.scales is None:
            return self.rows.float().cpu()
        return widen_rows(self.rows.cpu(), self.scales.cpu())

    def expected(
        self, queries: Tensor, requests: Sequence[RequestState], selected: Tensor | None, scaling: float
    ) -> Tensor:
        """What the reference gives in float32: [batch, H, D] on the CPU."""
        batch = Batch.of(requests, self.extents.table)
        selection = None if selected is None else Selection(selected.cpu())
        window, rows = self.window.float().cpu(), self.wide_rows()
        return reference.attend(queries.float().cpu(), batch, selection, window, rows, sink=self.sink, scaling=scaling)
