"""The static set: scores, choice, order, exchange; in PyTorch, on any device, without a synchronisation.

PRKV paper, section 4.1, algorithm 1, and appendix G. The GPU's index and the reference run the same code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import Config

SCORE_BYTES = 64 << 20  # bytes of scores held at a time; operations on them need two or three times as much
NOWHERE = -1  # fills up lists of places


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


def largest(values: Tensor, count: Tensor, most: int) -> Tensor:
    """Mark the `count` largest of values [..., n], ties cut by lowest index: bool [..., n].

    Parameters
    ----------
    count : Tensor, int64 scalar
        At most `most` and n; on the device of the values, so that the host does not wait for it.
    """
    most = min(most, values.shape[-1])
    if most == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    best = values.topk(most, dim=-1).values
    last = best.index_select(-1, (count - 1).clamp(min=0).view(1))  # the smallest of the `count` largest
    above, equal = values > last, values == last
    left = count - above.sum(dim=-1, keepdim=True)
    return (above | (equal & (equal.cumsum(dim=-1) <= left))) & (count > 0)


def automatic_count(queries: Tensor, keys: Tensor, scaling: float, top_k: int, page: int) -> Tensor:
    """Count static rows by the overlap between the window's first and last query: int64 scalar (eqs. 4 and 5).

    The count is the mean number, over all query heads of the layer, of keys that are in the top k of both queries, rounded down
    to whole pages.

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
    """Order marked tokens first, both parts in token order: bool [G, n] to the token of each place, int64 [G, n]."""
    others = ~static
    count = static.sum(dim=-1, keepdim=True)
    places = torch.where(static, static.cumsum(dim=-1) - 1, count + others.cumsum(dim=-1) - 1)
    tokens = torch.arange(static.shape[-1], device=static.device).expand_as(static)
    return torch.empty_like(places).scatter_(-1, places, tokens)


def pair_exchange(chosen: Tensor, places: Tensor, homes: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Pair the rows that leave the static set with those that enter it; after swapping, the chosen rows have the first places.

    Both lists are in the order of the sequence, so that a row that leaves gets a place near its old neighbours, as far as the
    free places allow it.

    Parameters
    ----------
    chosen : Tensor, bool [G, m]
        Which of the m candidates form the new static set: `count` per KV head.
    places : Tensor, int64 [G, m]
        Places of the candidates, no place twice; all places below `count` are among them.
    homes : Tensor, int64 [G, S]
        Place that the row of each of the first S places had before it became static.
    count : Tensor, int64 scalar
        Number of static rows from now on, at most S.

    Returns
    -------
    leaving, entering : Tensor, int64 [G, min(S, m)]
        Places of pair i: the rows at leaving[i] and entering[i] are swapped; -1 behind the last pair.
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
    """List the places that may be static from now on, and which of them count: int64 and bool [G, m].

    The first places, which may be static already, come first. Then come the places of pages: of all pages, or of those selected
    most often since the last update (ties: the first pages).

    Parameters
    ----------
    picked : Tensor, int32 [G, whole / page]
        How often each page was selected.
    whole : int
        Number of places in the region's whole pages; the last page may still grow.
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
