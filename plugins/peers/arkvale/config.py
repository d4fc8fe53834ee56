"""Fields of the method `arkvale`."""

from __future__ import annotations

from dataclasses import dataclass

from kvseek.plugins.peers.base import Pages

PAPER = {"top_k": 1024, "page": 32, "dense_layers": 2}


@dataclass(frozen=True)
class Config(Pages):
    """How many rows are kept, and how they lie together."""

    top_k: int = 1024
    dense_layers: int = 2
    page: int = 32
