"""Attention of one decode step over window and selected rows, in PyTorch: the definition of correct for CPU and GPU kernels.

Scores and softmax are in float32 for rows of every dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.core.batch import Batch, Selection
from kvseek.core.extents import extents_for

from .rounded_rows import widen_rows


def attend(
    queries: Tensor,
    batch: Batch,
    selection: Selection | None,
    window: Tensor,
    rows: Tensor,
    *,
    sink: int,
    scaling: float,
    scales: Tensor | None = None,
) -> Tensor:
    """Attend over the window and the selected retrieval rows of each request, one request and KV head at a time.

    Parameters
    ----------
    queries : Tensor [batch, H, D]
        Same dtype as the rows.
    selection : Selection or None
        None: all requests attend to every row. Not read for dense requests.
    window : Tensor [slots, G, window, 2, D]
        Window rows, K then V.
    rows : Tensor [extents, G, 1024, 2, D]
        The layer's part of the row pool (strided by extent).
    sink : int
        Capacity of the sink: the ring starts at window row `sink`.
    scales : Tensor [extents, G, 1024, 2], optional
        Of rows in 8 bits (rounded_rows.py).

    Returns
    -------
    Tensor [batch, H, D], dtype of the queries
    """
    heads, dim = queries.shape[1:]
    out = torch.empty_like(queries)
    dense = batch.column("dense").tolist()
    for request in range(batch.size):
        near, far = window_rows(batch, request, window, sink), retrieval_rows(batch, request, rows)
        if scales is not None:
            far = widen_rows(far, retrieval_rows(batch, request, scales))
        group = heads // near.shape[0]
        for head in range(near.shape[0]):
            places = selected_places(None if dense[request] else selection, request, head, far.shape[1])
            both = torch.cat([near[head].float(), far[head, places].float()])
            q = queries[request, head * group : (head + 1) * group].float()
            weights = (q @ both[:, 0].T * scaling).softmax(dim=-1)
            out[request, head * group : (head + 1) * group] = (weights @ both[:, 1]).to(out.dtype)
    return out.view(-1, heads, dim)


def window_rows(batch: Batch, request: int, window: Tensor, sink: int) -> Tensor:
    """Copy the window rows of one request in token order, [G, tokens, 2, D]."""
    sink_rows, first, count = (int(batch.column(name)[request]) for name in ("sink_rows", "ring_first", "ring_rows"))
    ring = max(1, window.shape[2] - sink)
    wrapped = torch.arange(first, first + count, device=window.device) % ring + sink
    held = torch.cat([torch.arange(sink_rows, device=window.device), wrapped])
    return window[batch.slots[request]][:, held]


def retrieval_rows(batch: Batch, request: int, rows: Tensor) -> Tensor:
    """Copy the retrieval rows of one request in the order of places, [G, n, 2, D], or their scales, [G, n, 2]."""
    n = batch.lengths[request]
    extents = batch.table[batch.slots[request], : extents_for(n)].tolist()
    if not extents:
        return rows.new_empty((rows.shape[1], 0, *rows.shape[3:]))
    return torch.cat([rows[extent] for extent in extents], dim=1)[:, :n]


def selected_places(selection: Selection | None, request: int, head: int, length: int) -> Tensor:
    """List the places that a request and KV head attends to in a region of `length` tokens, int64, in the order of entries."""
    if selection is None:
        return torch.arange(length)
    entries = selection.rows[request, head].long()
    return entries[(entries >= 0) & (entries < length)]


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Combine attention over two disjoint sets of rows: outputs [..., D] and log-sum-exps [...] of each.

    A part with no rows has log-sum-exp -inf; at least one part must have rows.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = (lse_a - lse).exp()[..., None], (lse_b - lse).exp()[..., None]
    return (out_a * weight_a + out_b * weight_b).to(out_a.dtype), lse
