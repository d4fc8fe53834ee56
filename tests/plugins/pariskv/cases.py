"""ParisKV in the tests that every method goes through."""

from __future__ import annotations

from tests.plugins.cases import MethodCases, NeedleCase

CASES = MethodCases(
    paper={
        "top_k": 100,
        "group_reduce": "mean",
        "schedule_steps": ((5_000, 0.5, 0.5), (10_000, 0.3, 0.25), (30_000, 0.25, 0.2), (None, 0.2, 0.1)),
        "cache.sink": 64,
        "cache.local": 256,
        "cache.update": 512,
        "cache.full_threshold": 2048,
    },
    sparse={"top_k": 12},
    index={"top_k": 64},
    on_gpu={"pariskv": {"top_k": 40}},
    counted=({"group_reduce": "mean", "top_k": 33},),
    losses={"top_k": 4},
    recall=0.97,
    needle=NeedleCase(margin=2.0, tasks="all", most_attended=0.2),  # 2 of 100: one wrong answer of multi_turn's 8
)
