"""The static set in PyTorch, on any device and without a synchronisation: scores, choice, order, exchange.

PRKV paper, section 4.1, algorithm 1, and appendix G. The GPU's index runs the same code as the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import Config

SCORE_BYTES = 64 << 20  # scores that are held at a time; the operations on them need two or three times as much
NOWHERE = -1  # fills up lists of places


def observation_scores(queries: Tensor, keys: Tensor, scaling: float, valid: Tensor | None = None) -> Tensor:
    """Softmax attention of the observation window to each key, averaged over the window and the heads of a group.

    The softmax of a query head runs over the given keys alone. All queries are taken to come after all keys, which
    holds as long as the cache's local window is no shorter than the observation window.

    Parameters
    ----------
    queries : Tensor [H, w, D]
    keys : Tensor [G, n, D]
    valid : Tensor, bool [G, n], or None
        Keys that count; the others score -1.

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
    """rows [G, r, D] times keys [G, n, D]: float32 [G, r, n]. On a GPU 16-bit numbers stay what they are."""
    if keys.is_cuda and keys.dtype is not torch.float32:
        return torch.bmm(rows, keys.transpose(1, 2), out_dtype=torch.float32)
    return rows.float() @ keys.float().transpose(1, 2)


def largest(values: Tensor, count: Tensor, most: int) -> Tensor:
    """Mark the `count` largest of values [..., n], ties cut by lowest index: bool [..., n].

    Parameters
    ----------
    count : Tensor, int64 scalar
        At most `most` and n; on the device of the values, so that the host need not know it.
    """
    most = min(most, values.shape[-1])
    if most == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    best = values.topk(most, dim=-1).values
    last = best.index_select(-1, (count - 1).clamp(min=0).view(1))  # the smallest that is in
    above, equal = values > last, values == last
    left = count - above.sum(dim=-1, keepdim=True)
    return (above | (equal & (equal.cumsum(dim=-1) <= left))) & (count > 0)


def automatic_count(queries: Tensor, keys: Tensor, scaling: float, top_k: int, page: int) -> Tensor:
    """Static rows by the overlap of what the window's first and last query attend to: int64 scalar (eqs. 4 and 5).

    Mean over all query heads of the layer of the top-k keys that both share, rounded down to whole pages.

    Parameters
    ----------
    queries : Tensor [H, w, D]
    keys : Tensor [G, n, D], n >= top_k
    """
    group = queries.shape[0] // keys.shape[0]
    by_head = torch.stack((queries[:, 0], queries[:, -1]), dim=1).view(keys.shape[0], 2 * group, -1)
    scores = _products(by_head, keys) * scaling  # a softmax would not change their order
    all_of_k = torch.full((), top_k, device=keys.device)
    chosen = largest(scores, all_of_k, top_k).view(-1, 2, keys.shape[1])
    overlap = (chosen[:, 0] & chosen[:, 1]).sum()
    return overlap // (chosen.shape[0] * page) * page


def static_first(static: Tensor) -> Tensor:
    """The order with the marked tokens first, both parts in token order: bool [G, n] to int64 [G, n], token by place."""
    others = ~static
    count = static.sum(dim=-1, keepdim=True)
    places = torch.where(static, static.cumsum(dim=-1) - 1, count + others.cumsum(dim=-1) - 1)
    tokens = torch.arange(static.shape[-1], device=static.device).expand_as(static)
    return torch.empty_like(places).scatter_(-1, places, tokens)


def pair_exchange(chosen: Tensor, places: Tensor, homes: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that change places so that the chosen ones lie first: those that leave the static set, and those that enter.

    Both are in the order of the sequence, so that a row that leaves comes to lie near its old neighbours, as far as the
    places that become free allow it.

    Parameters
    ----------
    chosen : Tensor, bool [G, m]
        Candidates of the new static set, `count` a KV head.
    places : Tensor, int64 [G, m]
        Their places, no place twice; all those below `count` are among them.
    homes : Tensor, int64 [G, S]
        Where the row of each of the first S places was before it became static.
    count : Tensor, int64 scalar
        Static rows from now on, at most S.

    Returns
    -------
    leaving, entering : Tensor, int64 [G, min(S, m)]
        Row i of each pair changes places with the other; -1 behind the last pair.
    """
    far = torch.iinfo(torch.int64).max
    first = torch.arange(homes.shape[1], device=homes.device).expand_as(homes)
    inside = places < homes.shape[1]
    stays = torch.zeros((homes.shape[0], homes.shape[1] + 1), dtype=torch.bool, device=homes.device)
    stays.scatter_(
        1, torch.where(inside, places, homes.shape[1]), chosen & inside
    )  # the last column takes what is beyond
    leaves = ~stays[:, :-1] & (first < count)
    enters = chosen & (places >= count)
    width = min(homes.shape[1], places.shape[1])
    order = torch.where(leaves, homes, far).argsort(dim=1, stable=True)[:, :width]
    leaving = torch.where(leaves, first, NOWHERE).gather(1, order)
    entering = torch.where(enters, places, far).sort(dim=1).values[:, :width]
    return leaving, torch.where(entering < far, entering, NOWHERE)


def candidates(config: Config, picked: Tensor, whole: int) -> tuple[Tensor, Tensor]:
    """Places that may be static from now on, and which of them count: int64 and bool [G, m].

    The first places come first: they may be static already. Then pages: all, or those selected most often since the
    last update (ties: the first ones).

    Parameters
    ----------
    picked : Tensor, int32 [G, whole / page]
        How often each page was selected.
    whole : int
        Places of the region's whole pages: the last page may still grow.
    """
    first_pages = min(config.most_static, whole) // config.page
    own = torch.arange(first_pages, device=picked.device).expand(picked.shape[0], -1)
    times = picked[:, first_pages:].long()
    pages = most = times.shape[1]
    if config.update_scope == "all":
        times = torch.ones_like(times)
    else:
        most = min(pages, config.update_pages)
    ranked = times * pages + torch.arange(pages - 1, -1, -1, device=picked.device)  # no two are equal
    best = ranked.topk(most, dim=1).indices
    numbers = torch.cat((own, best + first_pages), dim=1)
    counts = torch.cat((torch.ones_like(own, dtype=torch.bool), times.gather(1, best) > 0), dim=1)
    places = numbers[..., None] * config.page + torch.arange(config.page, device=picked.device)
    return places.flatten(1), counts.repeat_interleave(config.page, dim=1)
