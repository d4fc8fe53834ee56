"""The competing systems in the tests that every method goes through."""

from __future__ import annotations

from tests.plugins.cases import MethodCases

CASES = {
    "streamingllm": MethodCases(
        sparse={"top_k": 12},
        index={"top_k": 64},
        evicts=True,
        paper={"top_k": 764, "cache.sink": 4, "cache.local": 256},
    ),
    "h2o": MethodCases(
        sparse={"top_k": 12, "recent_queries": 8},
        index={"top_k": 64, "recent_queries": 32},
        evicts=True,
        paper={"top_k": 1024, "recent_share": 0.5},
        refused=(
            ({"recent_share": 1.5}, "recent_share = 1.5: must be in [0, 1]"),
            ({"recent_queries": 0}, "recent_queries = 0: must be >= 1"),
        ),
    ),
    "snapkv": MethodCases(
        sparse={"top_k": 12, "window": 8},
        index={"top_k": 64, "window": 16},
        evicts=True,
        paper={"top_k": 1024, "window": 32, "kernel": 7, "cache.local": 32},
        refused=(
            ({"window": 0}, "window = 0: must be from 1 to 2048"),
            ({"kernel": 4}, "kernel = 4: must be odd and >= 1"),
        ),
    ),
    "quest": MethodCases(
        sparse={"top_k": 16, "page": 4, "dense_layers": 0},
        index={"top_k": 64},
        paper={"top_k": 2048, "page": 16, "dense_layers": 2},
        refused=(({"page": 0}, "page = 0: must be >= 1"), ({"dense_layers": -1}, "dense_layers = -1: must be >= 0")),
    ),
    "shadowkv": MethodCases(
        sparse={"top_k": 16, "chunk": 4},
        index={"top_k": 64},
        paper={"top_k": 2432, "chunk": 8, "outlier_share": 0.158, "cache.local": 32},
        refused=(
            ({"chunk": 0}, "chunk = 0: must be >= 1"),
            ({"outlier_share": 1.0}, "outlier_share = 1.0: must be in [0, 1)"),
        ),
    ),
}
