"""The query-centroid inverted file in PyTorch, on any device: centroids, and their lists (CTkvr paper, algorithm 1).

Queries of a head share a large part, so that their cosines are all near 1 and say little about what a query looks for.
The mean of the prompt's centroid queries is therefore subtracted first (`Config.centred`; README).
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE_SCORES = 1 << 24  # scores that are held at once, those of a tile: 64 MiB of float32


def prompt_means(queries: Tensor, centred: bool) -> Tensor:
    """Average a prompt's centroid queries [H, count, D]: float32 [H, D]; zeros if not `centred` or without queries."""
    if centred and queries.shape[1]:
        return queries.float().mean(dim=1)
    return queries.new_zeros((queries.shape[0], queries.shape[2]), dtype=torch.float32)


def make_centroids(queries: Tensor, means: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Turn queries into centroids.

    Parameters
    ----------
    queries : Tensor [H, C, D]
        Queries as attention saw them.
    means : Tensor, float32 [H, D]
        Means of their prompt (prompt_means).
    dtype : torch.dtype
        Dtype that centroids are stored in.

    Returns
    -------
    centroids : Tensor [H, C, D] of `dtype`
        Queries less the mean, divided by their norms; zeros stay zeros.
    offsets : Tensor, float32 [H, C]
        Products of the stored centroids with the mean.
    """
    differences = queries.float() - means[:, None]
    centroids = (differences / positive_norm(differences)[..., None]).to(dtype)
    return centroids, (centroids.float() * means[:, None]).sum(dim=-1)


def cosines(query: Tensor, centroids: Tensor, means: Tensor, offsets: Tensor) -> Tensor:
    """Compute the cosines of a query [H, D], less the mean, with its heads' centroids [H, C, D]: float32 [H, C].

    The formula is (q·c - mean·c) / ‖q - mean‖ with the stored c and mean·c, so that a GPU multiplies the unchanged q on
    tensor cores. The cosine is 0 if q is the mean.
    """
    products = (centroids.float() @ query.float()[..., None])[..., 0]
    return (products - offsets) / positive_norm(query.float() - means)[:, None]


def positive_norm(vectors: Tensor) -> Tensor:
    """Compute the norms of float32 vectors [..., D], float32 [...]; 1 in place of 0."""
    norm = vectors.norm(dim=-1)
    return torch.where(norm > 0, norm, 1.0)


def build_lists(queries: Tensor, keys: Tensor, rho: int, scaling: float, tile: int | None = None) -> Tensor:
    """List the keys that matter most to each centroid: softmax attention, maximum over the group, largest rho.

    Parameters
    ----------
    queries : Tensor [H, C, D]
        Centroid queries as attention saw them, not normalised: the maximum over the group compares softmax weights.
    keys : Tensor [G, n, D]
        Retrieval keys by place; on the queries' device.
    rho : int
        Width of a list, >= 1.
    scaling : float
        Softmax scale.
    tile : int, optional
        Centroids at a time, >= 1; None: as many as have TILE_SCORES scores. Scores are float32; all [H, C, n] scores never
        exist at once.

    Returns
    -------
    Tensor, int32 [G, C, rho]
        Places, best first, ties by lowest place; -1 fills up when n < rho.
    """
    kv_heads, n = keys.shape[:2]
    group, centroids = queries.shape[0] // kv_heads, queries.shape[1]
    grouped = queries.reshape(kv_heads, group, centroids, queries.shape[2])
    lists = torch.full((kv_heads, centroids, rho), -1, dtype=torch.int32, device=keys.device)
    if n == 0:
        return lists
    tile = max(1, TILE_SCORES // (group * n)) if tile is None else tile
    for head in range(kv_heads):
        head_keys = keys[head].float()
        for start in range(0, centroids, tile):
            values = attention_values(grouped[head, :, start : start + tile], head_keys, scaling)
            lists[head, start : start + tile, : min(rho, n)] = largest(values, min(rho, n)).int()
    return lists


def attention_values(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Compute the logarithm of each key's largest softmax weight in the group.

    Queries [..., g, t, D] and keys [..., n, D] to [..., t, n]. The weights themselves would order the keys alike, but small
    weights become zero in float32 and could not be told apart.
    """
    return log_weights((queries.float() @ keys.float().unsqueeze(-3).transpose(-1, -2)) * scaling, group=-3)


def log_weights(scores: Tensor, group: int = -2) -> Tensor:
    """Compute the logarithm of each key's largest softmax weight over the dimension `group`: [..., g, ..., n] to [..., n]."""
    return (scores - scores.logsumexp(dim=-1, keepdim=True)).amax(dim=group)


def largest(values: Tensor, count: int) -> Tensor:
    """Find the indexes of the `count` largest of float32 values [..., n], largest first, ties by lowest: int64 [..., count].

    A value's bits and its complemented index make one integer, so the order of evaluation does not matter; -0 is below 0.
    First count + 1 values are chosen by their bits alone, which is several times as fast. Only where the last two of these are
    equal, all values are ranked by the full integers.
    """
    bits = values.contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    best, chosen = ordered.topk(min(count + 1, values.shape[-1]), dim=-1)
    result = chosen.gather(-1, _ranked(best, chosen, count))
    if 0 < count < values.shape[-1]:
        cut = best[..., count - 1] == best[..., count]
        if cut.any():
            index = torch.arange(values.shape[-1], device=values.device)
            result[cut] = _ranked(ordered[cut], index, count)
    return result


def _ranked(ordered: Tensor, index: Tensor, count: int) -> Tensor:
    """Find the positions of the `count` largest of int32 [..., m], largest first, ties by lowest index: int64 [..., count]."""
    return ((ordered.long() << 32) | (0xFFFFFFFF - index)).topk(count, dim=-1).indices
