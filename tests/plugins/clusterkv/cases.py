"""ClusterKV in the tests that every method goes through."""

from __future__ import annotations

import math

from tests.plugins.cases import MethodCases, NeedleCase
from tests.plugins.clusterkv.settings import CENTROIDS, OLD_DEFAULTS

CASES = MethodCases(
    paper={
        "top_k": 1024,
        "tokens_per_cluster": 80,
        "clusters_per_update": 4,
        "iterations": 60,
        "dense_layers": 2,
        "cache_steps": 1,
        "spread_weight": 0.0,
        "rerank_bits": 0,
        "cache.sink": 16,
        "cache.update": 320,
    },
    sparse={"top_k": 12, "tokens_per_cluster": 8, "dense_layers": 1},
    index={"top_k": 64, "tokens_per_cluster": 16},
    options=(CENTROIDS,),
    everything={"top_k": 8192, "candidates": 1},
    on_gpu={
        "clusterkv": {"top_k": 40, "candidates": 4, "tokens_per_cluster": 16, "dense_layers": 1},
        "clusterkv-centroids": {"top_k": 64, "tokens_per_cluster": 16, "dense_layers": 1, **CENTROIDS},
    },
    counted=({"cache_steps": 0, "dense_layers": 3}, {"dense_layers": 9}, OLD_DEFAULTS),
    recall=0.935,
    needle=NeedleCase(margin=17.0),  # half an answer of three
    refused=(
        ({"top_k": 0}, "top_k = 0: must be"),
        ({"top_k": 65_536}, "top_k = 65536: must be"),
        ({"tokens_per_cluster": 0}, "tokens_per_cluster = 0: must be"),
        ({"tokens_per_cluster": 1025}, "tokens_per_cluster = 1025: must be"),
        ({"clusters_per_update": 0}, "clusters_per_update = 0: must be"),
        ({"clusters_per_update": 321}, "clusters_per_update = 321: must be"),
        ({"iterations": 0}, "iterations = 0: must be"),
        ({"seed": -1}, "seed = -1: must be"),
        ({"dense_layers": -1}, "dense_layers = -1: must be"),
        ({"cache_steps": -1}, "cache_steps = -1: must be"),
        ({"cache_steps": 9}, "cache_steps = 9: must be"),
        ({"spread_weight": -1.0}, "spread_weight = -1.0: must be finite and >= 0"),
        ({"spread_weight": math.inf}, "spread_weight = inf: must be finite and >= 0"),
        ({"spread_weight": math.nan}, "spread_weight = nan: must be finite and >= 0"),
        ({"rerank_bits": 4}, "rerank_bits = 4: must be 0 or 2; 0 takes clusters whole"),
        ({"candidates": 0}, "candidates = 0: must be >= 1"),
        (
            {"top_k": 10_000},
            "candidates x top_k = 80000: must be at most 65535 with top_k = 10000; lower candidates or top_k",
        ),
    ),
)
