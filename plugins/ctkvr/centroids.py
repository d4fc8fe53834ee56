"""Centroids of CTkvr: what a query is kept as, and how near a centroid is to a query. On any device.

Queries of a head share a large part, so that their cosines are all near 1 and say little about what a query looks for.
The mean of the prompt's centroid queries is therefore subtracted first (`Config.centred`; README).
"""

from __future__ import annotations

import torch
from torch import Tensor


def prompt_means(queries: Tensor, centred: bool) -> Tensor:
    """Mean of a prompt's centroid queries [H, count, D], float32 [H, D]; zeros if not `centred` or without queries."""
    if centred and queries.shape[1]:
        return queries.float().mean(dim=1)
    return queries.new_zeros((queries.shape[0], queries.shape[2]), dtype=torch.float32)


def make_centroids(queries: Tensor, means: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Turn queries into centroids.

    Parameters
    ----------
    queries : Tensor [H, C, D]
        As attention saw them.
    means : Tensor, float32 [H, D]
        Their prompt's (prompt_means).
    dtype : torch.dtype
        What centroids are stored in.

    Returns
    -------
    centroids : Tensor [H, C, D] of `dtype`
        Queries less the mean, divided by their norms; zeros stay zeros.
    offsets : Tensor, float32 [H, C]
        Products of the centroids, as stored, with the mean.
    """
    differences = queries.float() - means[:, None]
    centroids = (differences / positive_norm(differences)[..., None]).to(dtype)
    return centroids, (centroids.float() * means[:, None]).sum(dim=-1)


def cosines(query: Tensor, centroids: Tensor, means: Tensor, offsets: Tensor) -> Tensor:
    """Cosines of a query [H, D], less the mean, with its heads' centroids [H, C, D]: float32 [H, C].

    (q·c - mean·c) / ‖q - mean‖ with c and mean·c as stored, so that a GPU multiplies q as it is, on tensor cores; 0 if q is
    the mean.
    """
    products = (centroids.float() @ query.float()[..., None])[..., 0]
    return (products - offsets) / positive_norm(query.float() - means)[:, None]


def positive_norm(vectors: Tensor) -> Tensor:
    """Norms of float32 vectors [..., D], float32 [...]; 1 in place of 0."""
    norm = vectors.norm(dim=-1)
    return torch.where(norm > 0, norm, 1.0)
