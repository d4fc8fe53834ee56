"""Attention of one decode step over window and selected rows, on the CPU.

Scores and softmax are in float32 whatever the rows' dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.core.cpu_library import CpuLibrary
from kvseek.plugins.layer_cache import LayerCache
from kvseek.plugins.selection import Selection

from .native import attend_native


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Combine attention over two disjoint sets of rows: outputs [..., D] and log-sum-exps [...] of each.

    A part with no rows has log-sum-exp -inf; at least one part must have rows.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = (lse_a - lse).exp()[..., None], (lse_b - lse).exp()[..., None]
    return (out_a * weight_a + out_b * weight_b).to(out_a.dtype), lse


def attend(
    queries: Tensor, selection: Selection, cache: LayerCache, scaling: float, library: CpuLibrary | None
) -> Tensor:
    """Attend over the window and the selected retrieval rows of each request.

    Parameters
    ----------
    queries : Tensor [batch, H, D]
        Same dtype as the cache.
    library : CpuLibrary or None
        Compiled kernels; None runs the reference.

    Returns
    -------
    Tensor [batch, H, D], dtype of the queries
    """
    if library is None:
        return attend_reference(queries, selection, cache, scaling)
    return attend_native(queries, selection, cache, scaling, library)


def attend_reference(queries: Tensor, selection: Selection, cache: LayerCache, scaling: float) -> Tensor:
    """What `attend` means, in PyTorch, one request and KV head at a time."""
    heads, dim = queries.shape[1:]
    out = torch.empty_like(queries)
    for request in range(queries.shape[0]):
        window, retrieval = cache.window_rows(request), cache.retrieval_rows(request)
        group = heads // window.shape[0]
        for head in range(window.shape[0]):
            chosen = selected_positions(selection, request, head, retrieval.shape[1])
            rows = torch.cat([window[head], retrieval[head, chosen]]).float()
            q = queries[request, head * group : (head + 1) * group].float()
            weights = (q @ rows[:, 0].T * scaling).softmax(dim=-1)
            out[request, head * group : (head + 1) * group] = (weights @ rows[:, 1]).to(out.dtype)
    return out.view(-1, heads, dim)


def selected_positions(selection: Selection, request: int, head: int, length: int) -> Tensor:
    """Retrieval positions that a selection means for one request and KV head, int64, in entry order."""
    entries = selection.rows[request, head].long()
    entries = entries[entries >= 0]
    positions = (entries[:, None] * selection.block + torch.arange(selection.block, device=entries.device)).flatten()
    return positions[positions < length]
