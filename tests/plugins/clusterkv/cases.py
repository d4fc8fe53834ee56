"""ClusterKV in the tests that every method goes through."""

from __future__ import annotations

from tests.plugins.cases import MethodCases, NeedleCase

RERANKED = {"spread_weight": 3.0, "rerank_bits": 2}

CASES = MethodCases(
    sparse={"top_k": 12, "tokens_per_cluster": 8, "dense_layers": 1},
    index={"top_k": 64, "tokens_per_cluster": 16},
    options=(RERANKED,),
    on_gpu={
        "clusterkv": {"top_k": 64, "tokens_per_cluster": 16, "dense_layers": 1},
        "clusterkv-codes": {"top_k": 40, "tokens_per_cluster": 16, "dense_layers": 1, **RERANKED},
    },
    counted=({"cache_steps": 0, "dense_layers": 3}, {"dense_layers": 9}, RERANKED),
    losses={"top_k": 64, "tokens_per_cluster": 40},
    recall=0.935,
    needle=NeedleCase(margin=17.0),  # half an answer of three
)
