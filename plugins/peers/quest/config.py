"""Fields of the method `quest`."""

from __future__ import annotations

from dataclasses import dataclass

from kvseek.plugins.peers.base import Pages

PAPER = {"top_k": 2048, "page": 16, "dense_layers": 2}


@dataclass(frozen=True)
class Config(Pages):
    """How many rows are kept, and how they lie together."""

    top_k: int = 2048
    dense_layers: int = 2
    page: int = 16
