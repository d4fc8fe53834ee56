"""The competing systems in the tests that every method goes through."""

from __future__ import annotations

from tests.plugins.cases import MethodCases

CASES = {
    "streamingllm": MethodCases(
        sparse={"top_k": 12},
        index={"top_k": 64},
        mass=0.1,
        paper={"top_k": 764, "cache.sink": 4, "cache.local": 256},
    ),
}
