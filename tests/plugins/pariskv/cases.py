"""ParisKV in the tests that every method goes through."""

from __future__ import annotations

from tests.plugins.cases import MethodCases, NeedleCase


def _step(below_tokens: int | None, rho: float, beta: float) -> dict[str, float | None]:
    return {"below_tokens": below_tokens, "rho": rho, "beta": beta}


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
    recall=0.97,
    needle=NeedleCase(margin=2.0, tasks="all", most_attended=0.2),  # 2 of 100: one wrong answer of multi_turn's 8
    refused=(
        ({"top_k": 0}, "top_k = 0: must be >= 1"),
        ({"group_reduce": "median"}, "group_reduce = 'median': must be one of"),
        ({"rotation_seed": -1}, "rotation_seed = -1: must be in"),
        ({"schedule_steps": ()}, "schedule_steps"),
        ({"schedule_steps": [_step(9, 1.0, 1.0)]}, "below_tokens null"),
        ({"schedule_steps": [_step(None, 0.0, 1.0)]}, "schedule_steps.rho = 0.0"),
        ({"schedule_steps": [_step(None, 0.5, 1.5)]}, "schedule_steps.beta = 1.5"),
        ({"schedule_steps": [_step(0, 0.5, 0.5)]}, "below_tokens = 0: must be > 0"),
        *(
            ({"schedule_steps": [_step(bound, 0.5, 0.5) for bound in bounds]}, "schedule_steps")  # must ascend
            for bounds in ((9, 5, None), (5, 5, None), (None, 5, None))
        ),
    ),
)
