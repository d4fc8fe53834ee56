"""ClusterKV's settings in tests of the paper's way, where the defaults differ."""

from __future__ import annotations

from typing import Any

WHOLE: dict[str, Any] = {
    "spread_weight": 0.0,
    "rerank_bits": 0,
}  # clusters by their centroids, taken whole, as in the paper
