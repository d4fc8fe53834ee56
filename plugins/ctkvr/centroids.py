"""Makes the centroids of CTkvr from queries, and measures how near a query is to them, on any device.

Queries of a head share a large part, so that their cosines are all near 1 and say little about what a query looks for.
The mean of the prompt's centroid queries is therefore subtracted first (`Config.centred`; README).
"""

from __future__ import annotations

import torch
from torch import Tensor


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
