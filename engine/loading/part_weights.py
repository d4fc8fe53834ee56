"""Reads the weights of a rank's part of an engine directory, or of the whole model, and tells the other ranks how far it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kvseek.core.config import EngineConfig
from kvseek.engine.model.random_weights import make_weights, random_seed
from kvseek.engine.model.weights import load_weights
from kvseek.engine.parallel.ranks import Ranks


def read_weights(directory: Path, config: EngineConfig, device: torch.device, ranks: Ranks | None) -> dict[str, Tensor]:
    """Load the weights of one rank, whose configuration this is, or make them if the directory says that they are random.

    Raises
    ------
    EngineDirectoryError
        See load_weights.
    """
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    begin: Callable[[str], None] | None = None
    if ranks is not None:
        reporter = ranks.reporter

        def begin(name: str) -> None:
            reporter.doing(f"reads weights: {name}")

        reporter.doing("reads weights")
    seed = random_seed(directory)
    if seed is not None:
        return make_weights(config, device, seed, rank, size, begin)
    return load_weights(directory, device, rank=rank, begin=begin)
