"""Which keys a clustering starts from: the same for the reference and for the GPU (ClusterKV paper, section 3.B)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.core.config import require

_STEP = 1_000_003  # a prime: neighbouring (seed, layer, tokens) give generators of different states
_SEEDS = 2**63


def initial_keys(seed: int, layer: int, tokens: int, clusters: int) -> Tensor:
    """Numbers of the keys that are the first centroids, chosen at random without repetition.

    They depend on nothing else, above all not on the slot or the batch, and are the same for all KV heads.

    Parameters
    ----------
    tokens : int
        Keys to be clustered.
    clusters : int
        Centroids wanted.

    Returns
    -------
    Tensor, int64 [clusters], on the CPU
        Ascending, below `tokens`.

    Raises
    ------
    ConfigError
        If there are fewer keys than clusters.
    """
    limit = f"between 1 and {tokens}, the number of keys"
    require(1 <= clusters <= tokens, "clusters", clusters, limit, "ask for fewer clusters")
    generator = torch.Generator().manual_seed(((seed * _STEP + layer) * _STEP + tokens) % _SEEDS)
    return torch.randperm(tokens, generator=generator)[:clusters].sort().values
