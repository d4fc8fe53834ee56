"""ClusterKV's settings in tests of other ways than its defaults'."""

from __future__ import annotations

from typing import Any

CENTROIDS: dict[str, Any] = {"spread_weight": 0.0, "rerank_bits": 0}  # clusters by their centroids, and taken whole
OLD_DEFAULTS: dict[str, Any] = {**CENTROIDS, "top_k": 1024}  # those of 0.2.0
PAPER: dict[str, Any] = {**OLD_DEFAULTS, "tokens_per_cluster": 80}
