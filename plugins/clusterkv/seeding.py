"""Chooses the keys that a clustering starts from, for the reference and the GPU alike (ClusterKV paper, section III-B)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.core.config import require

_STEP = 1_000_003  # a prime: neighbouring (seed, layer, tokens) give generators of different states
_SEEDS = 2**63


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
