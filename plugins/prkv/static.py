"""The static set: scores, candidates, choice, order; in PyTorch, on any device, without a synchronisation.

PRKV paper, section 4.1, algorithm 1. The GPU's index and the reference run the same code.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCORE_BYTES = 64 << 20  # bytes of scores held at a time; operations on them need two or three times as much


def observation_scores(queries: Tensor, keys: Tensor, scaling: float, valid: Tensor | None = None) -> Tensor:
    """Compute the softmax attention of the observation window to each key, averaged over the window and a group's heads.

    The softmax of a query head runs over the given keys alone. All queries are assumed to come after all keys, which
    holds if the cache's local window is no shorter than the observation window.

    Parameters
    ----------
    queries : Tensor [H, w, D]
    keys : Tensor [G, n, D]
    valid : Tensor, bool [G, n], or None
        Which keys count; all other keys score -1.

    Returns
    -------
    Tensor, float32 [G, n]
    """
    kv_heads, n = keys.shape[:2]
    rows = queries.reshape(kv_heads, -1, queries.shape[-1])  # the heads of a group are neighbours
    step = max(256, SCORE_BYTES // (4 * rows.shape[0] * rows.shape[1]))
    spans = [slice(first, first + step) for first in range(0, n, step)]

    def scores(span: slice) -> Tensor:
        part = _products(rows, keys[:, span]).mul_(scaling)
        return part if valid is None else part.masked_fill_(~valid[:, None, span], -torch.inf)

    total = torch.full(rows.shape[:2], -torch.inf, device=keys.device)
    for span in spans:
        total = torch.logaddexp(total, scores(span).logsumexp(dim=-1))
    means = [scores(span).sub_(total[..., None]).exp_().mean(dim=1) for span in spans]
    found = torch.cat(means, dim=1) if means else total.new_empty((kv_heads, 0))
    return found if valid is None else torch.where(valid, found, -1.0)


def _products(rows: Tensor, keys: Tensor) -> Tensor:
    """Multiply rows [G, r, D] with keys [G, n, D]: float32 [G, r, n]. On a GPU 16-bit numbers are not converted first."""
    if keys.is_cuda and keys.dtype is not torch.float32:
        return torch.bmm(rows, keys.transpose(1, 2), out_dtype=torch.float32)
    return rows.float() @ keys.float().transpose(1, 2)


def largest(values: Tensor, count: int) -> Tensor:
    """Mark the `count` <= n largest of values [..., n], ties cut by lowest index: bool [..., n]."""
    if count == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    last = values.topk(count, dim=-1).values[..., -1:]
    above, equal = values > last, values == last
    left = count - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1) <= left))


def marked_first(marked: Tensor) -> Tensor:
    """List marked tokens first, then the others, both in token order: bool [G, n] to int64 [G, n]."""
    others = ~marked
    count = marked.sum(dim=-1, keepdim=True)
    places = torch.where(marked, marked.cumsum(dim=-1) - 1, count + others.cumsum(dim=-1) - 1)
    tokens = torch.arange(marked.shape[-1], device=marked.device).expand_as(marked)
    return torch.empty_like(places).scatter_(-1, places, tokens)


def static_first(static: Tensor, length: int) -> Tensor:
    """List static tokens int64 [G, s] first, then the others in token order: int64 [G, length] (algorithm 1, line 11)."""
    marked = torch.zeros((static.shape[0], length), dtype=torch.bool, device=static.device)
    return marked_first(marked.scatter_(1, static, True))


def candidates(static: Tensor, picked: Tensor, page: int, most: int) -> tuple[Tensor, Tensor]:
    """List the tokens that may be static from now on: those that are, and those of the pages selected since the last update.

    Parameters
    ----------
    static : Tensor, int64 [G, s]
        The static tokens.
    picked : Tensor, int32 [G, pages]
        How often each page was selected.
    page : int
        Tokens of a page; the last page is whole.
    most : int
        So many pages at most, those selected most often (ties: the first ones).

    Returns
    -------
    tokens : Tensor, int64 [G, m]
        All that count, ascending, then others.
    counts : Tensor, int64 [G]
        How many of them count.
    """
    times, pages = picked.long(), picked.shape[1]
    ranked = times * pages + torch.arange(pages - 1, -1, -1, device=picked.device)  # no two are equal
    best = ranked.topk(min(pages, most), dim=1).indices
    chosen = torch.zeros_like(picked, dtype=torch.bool).scatter_(1, best, times.gather(1, best) > 0)
    marked = chosen.repeat_interleave(page, dim=1).scatter_(1, static, True)
    return marked_first(marked)[:, : best.shape[1] * page + static.shape[1]], marked.sum(dim=1)


def choose(values: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Take the `count` tokens, of int64 [G, m], whose values [G, m] are largest (ties: the first ones): ascending."""
    return tokens.gather(1, marked_first(largest(values, count))[:, :count]).sort(dim=1).values
