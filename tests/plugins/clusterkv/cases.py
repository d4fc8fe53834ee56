"""ClusterKV in the tests that every method goes through."""

from __future__ import annotations

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
    losses={"top_k": 64, "tokens_per_cluster": 40},
    recall=0.935,
    needle=NeedleCase(margin=17.0),  # half an answer of three
)
