"""The nested method in the tests that every method goes through."""

from __future__ import annotations

from tests.plugins.cases import MethodCases, NeedleCase

CASES = MethodCases(
    sparse={"top_k": 12},
    index={"top_k": 64},
    on_gpu={"nested": {"top_k": 40, "candidates": 8}},  # of fewer, an estimate that rounds otherwise may decide
    counted=({"top_k": 33},),
    recall=0.99,
    needle=NeedleCase(margin=2.0, tasks="all", most_attended=0.2),  # 2 of 100: one wrong answer of multi_turn's 8
    refused=(
        ({"top_k": 0}, "top_k = 0: must be >= 1"),
        ({"candidates": 0}, "candidates = 0: must be >= 1"),
        ({"rotation_seed": -1}, "rotation_seed = -1: must be in"),
    ),
)
