"""Attention: prefill over a prompt, and one decode step over window and selected rows.

Scores and softmax are in float32 whatever the rows' dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import LayerCache

if TYPE_CHECKING:
    from kvseek.plugins.base import Selection

    from .kernels import CpuLibrary


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Attend from the last q tokens of a sequence to all of it, causally.

    Parameters
    ----------
    queries : Tensor [H, q, D]
    keys, values : Tensor [G, n, D], n >= q

    Returns
    -------
    Tensor [q, H, D]
    """
    heads, q, dim = queries.shape
    kv_heads, past = keys.shape[0], keys.shape[1] - q
    own_keys, own_values = (part[:, past:].repeat_interleave(heads // kv_heads, dim=0) for part in (keys, values))
    out, lse = _flash(queries, own_keys, own_values, scaling, causal=True)
    if past:
        # Every query sees all of the past, so the heads of a group stack as further queries of one KV head.
        stacked = queries.reshape(kv_heads, -1, dim)
        past_out, past_lse = _flash(stacked, keys[:, :past], values[:, :past], scaling, causal=False)
        out, _ = merge(out, lse, past_out.reshape(heads, q, dim), past_lse.reshape(heads, q))
    return out.transpose(0, 1)


def _flash(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    # The public scaled_dot_product_attention keeps its log-sum-exp to itself; merging two parts needs it.
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = operator(queries[None], keys[None], values[None], 0.0, causal, scale=scaling)
    return out[0], lse[0]


def causal_attention_device(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """`causal_attention` on a GPU: queries [H, q, D] and keys, values [G, n, D] to [q, H, D], n >= q.

    Flash attention aligns its causal mask to the bottom right and lets heads share keys, so a chunk needs neither a mask
    nor copies. It has no float32: the memory-efficient kernel that has reads keys of every query head, which are copied
    for it. torch.nn.attention.bias chooses between the two by dtype.
    """
    from torch.nn.attention.bias import causal_lower_right

    heads, q = queries.shape[:2]
    shared = queries.dtype is not torch.float32
    if not shared:
        keys, values = (part.repeat_interleave(heads // keys.shape[0], dim=0) for part in (keys, values))
    mask = causal_lower_right(q, keys.shape[1])
    out = F.scaled_dot_product_attention(
        queries[None], keys[None], values[None], attn_mask=mask, scale=scaling, enable_gqa=shared
    )
    return out[0].transpose(0, 1)


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
    from kvseek.plugins.common.attend import attend_native

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
