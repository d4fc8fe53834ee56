"""Fields of the method `streamingllm`."""

from __future__ import annotations

from dataclasses import dataclass

from kvseek.plugins.peers.base import TopK

EVICTS = True
PAPER = {"top_k": 764, "cache.sink": 4, "cache.local": 256}  # 4 first and 1,020 latest tokens


@dataclass(frozen=True)
class Config(TopK):
    """How many of the latest rows are kept.

    Attributes
    ----------
    top_k : int
        Rows before the local window.
    """

    top_k: int = 764
