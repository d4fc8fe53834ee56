"""K-means of keys by cosine in PyTorch, on any device; the reference for the kernels of kmeans.cu (paper, section III-B).

Both start from the same keys (initial_keys).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.errors import require

ASSIGN_TOKENS = 8 * EXTENT_TOKENS  # keys assigned at a time, which bounds temporary memory
_STEP = 1_000_003  # a prime: neighbouring (seed, layer, tokens) give generators of different states
_SEEDS = 2**63


@dataclass(frozen=True)
class Clustering:
    """The clusters of n keys. A cluster that lost all its keys has size 0 and a centroid of zeros, and is never selected.

    Attributes
    ----------
    centroids : Tensor, float32 [G, C, D]
        Mean of each cluster's keys, which are not normalised for it.
    spreads : Tensor, float32 [G, C]
        Root mean square of what the channels of a cluster's keys differ from those of the mean: σ / √D.
    sizes, starts : Tensor, int32 [G, C]
        Number of keys in each cluster, and in all clusters before it.
    order : Tensor, int32 [G, n]
        Numbers of the keys, sorted by cluster; inside a cluster they ascend.
    """

    centroids: Tensor
    spreads: Tensor
    sizes: Tensor
    starts: Tensor
    order: Tensor


def cluster_keys(keys: Tensor, chosen: Tensor, iterations: int) -> Clustering:
    """Cluster keys [G, n, D] by k-means with cosines, every KV head by itself; paper, section III-B.

    A key belongs to the cluster whose direction is nearest (ties: lowest number). A cluster's direction is that of the
    sum of its keys' unit vectors, so that a long key counts no more than a short one. A cluster that loses all its keys
    keeps its direction, and may win keys again.

    Parameters
    ----------
    keys : Tensor [G, n, D]
        Any number type and device; computed in float32.
    chosen : Tensor, int64 [C]
        Numbers of the keys that give the first directions, the same in all heads.
    iterations : int
        Most rounds; a round computes directions from labels, then labels from directions. A round that changes no label is
        the last.
    """
    units = F.normalize(keys.float(), dim=-1)
    directions = units[:, chosen]
    labels = nearest(units, directions)
    for _ in range(iterations):
        sums = cluster_sums(units, labels, len(chosen))
        kept = cluster_sizes(labels, len(chosen))[..., None] > 0
        directions = torch.where(kept, F.normalize(sums, dim=-1), directions)
        before, labels = labels, nearest(units, directions)
        if torch.equal(before, labels):
            break
    sizes = cluster_sizes(labels, len(chosen))
    centroids, spreads = cluster_means(keys.float(), labels, sizes)
    starts = sizes.cumsum(dim=-1) - sizes
    order = labels.argsort(dim=-1, stable=True)
    return Clustering(centroids, spreads, sizes.int(), starts.int(), order.int())


def cluster_means(keys: Tensor, labels: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean [G, C, D] and spread [G, C] (see `Clustering`) of the clusters of keys float32 [G, n, D]; zeros if empty."""
    means = cluster_sums(keys, labels, sizes.shape[1]) / sizes.clamp(min=1)[..., None]
    away = keys - means.gather(1, labels[..., None].expand_as(keys))
    squares = away.square().mean(dim=-1, keepdim=True)
    return means, (cluster_sums(squares, labels, sizes.shape[1])[..., 0] / sizes.clamp(min=1)).sqrt()


def nearest(units: Tensor, directions: Tensor) -> Tensor:
    """Find the number of the direction with the largest cosine: [G, n, D] and [G, C, D] to int64 [G, n]."""
    parts = []
    for start in range(0, units.shape[1], ASSIGN_TOKENS):
        cosines = units[:, start : start + ASSIGN_TOKENS] @ directions.transpose(1, 2)
        parts.append(cosines.argmax(dim=-1))
    return torch.cat(parts, dim=1)


def cluster_sums(vectors: Tensor, labels: Tensor, clusters: int) -> Tensor:
    """Add up the vectors [G, n, D] of each label [G, n]: [G, clusters, D]."""
    sums = vectors.new_zeros(vectors.shape[0], clusters, vectors.shape[2])
    return sums.scatter_add_(1, labels[..., None].expand_as(vectors), vectors)


def cluster_sizes(labels: Tensor, clusters: int) -> Tensor:
    """Count the keys of each label [G, n]: int64 [G, clusters]."""
    return labels.new_zeros(labels.shape[0], clusters).scatter_add_(1, labels, torch.ones_like(labels))


def initial_keys(seed: int, layer: int, tokens: int, clusters: int) -> Tensor:
    """Choose the keys that are the first centroids, at random without repetition.

    The choice depends only on the arguments, not on the slot or the batch, and is the same for all KV heads.

    Parameters
    ----------
    tokens : int
        Number of keys to be clustered.
    clusters : int
        Number of centroids.

    Returns
    -------
    Tensor, int64 [clusters], on the CPU
        Numbers of the keys, ascending, below `tokens`.

    Raises
    ------
    ConfigError
        If there are fewer keys than clusters.
    """
    limit = f"between 1 and {tokens}, the number of keys"
    require(1 <= clusters <= tokens, "clusters", clusters, limit, "ask for fewer clusters")
    generator = torch.Generator().manual_seed(((seed * _STEP + layer) * _STEP + tokens) % _SEEDS)
    return torch.randperm(tokens, generator=generator)[:clusters].sort().values
