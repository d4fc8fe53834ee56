"""The competing systems in the tests that every method goes through."""

from __future__ import annotations

from dataclasses import replace

from tests.plugins.cases import MethodCases

EVICTS = 0.1  # MethodCases.mass: what comes back is not there

CASES = {
    "streamingllm": MethodCases(
        sparse={"top_k": 12},
        index={"top_k": 64},
        mass=EVICTS,
        paper={"top_k": 764, "cache.sink": 4, "cache.local": 256},
    ),
    "h2o": MethodCases(
        sparse={"top_k": 12, "recent_queries": 8},
        index={"top_k": 64, "recent_queries": 32},
        mass=EVICTS,
        paper={"top_k": 1024, "recent_share": 0.5},
        refused=(
            ({"recent_share": 1.5}, "recent_share = 1.5: must be in [0, 1]"),
            ({"recent_queries": 0}, "recent_queries = 0: must be >= 1"),
        ),
    ),
    "snapkv": MethodCases(
        sparse={"top_k": 12, "window": 8},
        index={"top_k": 64, "window": 16},
        mass=EVICTS,
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
    "arkvale": MethodCases(
        sparse={"top_k": 16, "page": 4, "dense_layers": 0},
        index={"top_k": 64},
        paper={"top_k": 1024, "page": 32, "dense_layers": 2},
        refused=(({"page": 0}, "page = 0: must be >= 1"), ({"dense_layers": -1}, "dense_layers = -1: must be >= 0")),
    ),
    "infinigen": MethodCases(
        sparse={"top_k": 12, "dense_layers": 0},
        index={"top_k": 64},
        paper={"top_k": 1024, "partial": 0.2, "dense_layers": 1},
        refused=(
            ({"partial": 0.0}, "partial = 0.0: must be in (0, 1]"),
            ({"dense_layers": -1}, "dense_layers = -1: must be >= 0"),
        ),
    ),
    "magicpig": MethodCases(
        sparse={"top_k": 12, "bits": 4, "tables": 20, "dense_layers": 0},
        index={"top_k": 64, "bits": 5, "tables": 40},
        paper={"top_k": 2048, "bits": 10, "tables": 150, "dense_layers": 1},
        refused=(
            ({"bits": 16}, "bits = 16: must be from 1 to 15"),
            ({"tables": 0}, "tables = 0: must be >= 1"),
            ({"dense_layers": -1}, "dense_layers = -1: must be >= 0"),
        ),
    ),
    "pqcache": MethodCases(
        sparse={"top_k": 12, "bits": 4},
        index={"top_k": 64},
        paper={"top_k": 1024, "parts": 2, "bits": 6},
        refused=(
            ({"parts": 0}, "parts = 0: must be >= 1"),
            ({"bits": 9}, "bits = 9: must be from 1 to 8"),
            ({"iterations": -1}, "iterations = -1: must be >= 0"),
        ),
    ),
    "retrievalattention": MethodCases(
        sparse={"top_k": 12, "links": 4, "beam": 4},
        index={"top_k": 64},
        paper={"top_k": 100, "cache.sink": 128, "cache.local": 512},
        refused=(({"links": 0}, "links = 0: must be >= 1"), ({"rounds": 0}, "rounds = 0: must be >= 1")),
    ),
    "squeezedattention": MethodCases(
        sparse={"top_k": 12},
        index={"top_k": 64},
        mass=0.2,  # it clusters the prompt alone
        paper={"top_k": 1024, "cluster_share": 0.05},
        refused=(
            ({"cluster_share": 0.0}, "cluster_share = 0.0: must be in (0, 1]"),
            ({"iterations": -1}, "iterations = -1: must be >= 0"),
        ),
    ),
}
CASES = {peer: replace(case, on_gpu={peer: case.sparse}) for peer, case in CASES.items()}
