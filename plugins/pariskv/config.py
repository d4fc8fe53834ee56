"""Fields of the ParisKV method, as they stand in `method_config` of an engine directory."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

from kvseek.core.errors import require


@dataclass(frozen=True)
class ScheduleStep:
    """How much of regions is retrieved: those of fewer than `below_tokens` tokens (None: of any length).

    `rho` is the share of the keys that earn a tier in each block, `beta` the share that is reranked.
    """

    below_tokens: int | None
    rho: float
    beta: float

    def __post_init__(self) -> None:
        below = self.below_tokens
        limit = "> 0, or null in the last step"
        require(below is None or below > 0, "schedule_steps.below_tokens", below, limit, "5000 is the first default")
        for name in ("rho", "beta"):
            value = getattr(self, name)
            require(0 < value <= 1, f"schedule_steps.{name}", value, "in (0, 1]", "it is a share of the keys")


GROUP_REDUCTIONS = ("mean", "softmax_mean")
# Fewest candidates per row that is kept. The paper's schedule is for 100 rows: with 704 rows of an 8K context it gives only
# 2.8 candidates per row, which costs 1.4 % of the softmax mass (plugins/pariskv/README.md).
CANDIDATES_OF_A_ROW = 4

DEFAULT_SCHEDULE = (
    ScheduleStep(5_000, 0.5, 0.5),
    ScheduleStep(10_000, 0.3, 0.25),
    ScheduleStep(30_000, 0.25, 0.2),
    ScheduleStep(None, 0.2, 0.1),
)

# What the paper sets. It is silent on heads that share keys: its public release averages their queries. It says "adaptive" of the
# schedule, whose numbers are the release's. The cache is that of table 1 for long inputs (LongBench-V2).
PAPER = {
    "top_k": 100,  # section 5
    "group_reduce": "mean",
    "schedule_steps": [dataclasses.asdict(step) for step in DEFAULT_SCHEDULE],
    "cache.local": 256,
    "cache.update": 512,
    "cache.full_threshold": 2048,
}


@dataclass(frozen=True)
class Config:
    """How keys are encoded and how many rows are retrieved.

    Attributes
    ----------
    top_k : int
        Rows retrieved per KV head.
    group_reduce : str
        How the query heads of a KV head agree: "softmax_mean" (plugins/ranking.py), or "mean", which retrieves for the mean
        of their queries, as the paper's public release does.
    rotation_seed : int
        Seed of the signs of the randomised Hadamard transform.
    schedule_steps : tuple of ScheduleStep
        By region length, ascending; the last step has no bound.
    """

    top_k: int = 100
    group_reduce: str = "softmax_mean"
    rotation_seed: int = 0
    schedule_steps: tuple[ScheduleStep, ...] = DEFAULT_SCHEDULE

    def __post_init__(self) -> None:
        require(self.top_k >= 1, "top_k", self.top_k, ">= 1", "100 is the default")
        known = self.group_reduce in GROUP_REDUCTIONS
        limit = f"one of {GROUP_REDUCTIONS}"
        require(known, "group_reduce", self.group_reduce, limit, "softmax_mean is the default")
        in_range = 0 <= self.rotation_seed < 2**63
        require(in_range, "rotation_seed", self.rotation_seed, "in [0, 2**63)", "any such number will do")
        self._check_schedule()

    def _check_schedule(self) -> None:
        bounds = [step.below_tokens for step in self.schedule_steps]
        ended = bool(bounds) and bounds[-1] is None
        name = "schedule_steps"
        require(ended, name, bounds, "ended by a step with below_tokens null", "add a step for all longer regions")
        inner = [bound for bound in bounds[:-1] if bound is not None]
        only_last = len(inner) == len(bounds) - 1
        require(only_last, name, bounds, "bounded by below_tokens except in the last step", "give each step its bound")
        ascending = all(a < b for a, b in itertools.pairwise(inner))
        require(ascending, name, bounds, "in ascending order of below_tokens", "sort the steps")

    def lanes(self, group_size: int) -> int:
        """Return the number of queries of a KV head that rank on their own: one with group_reduce "mean"."""
        return 1 if self.group_reduce == "mean" else group_size

    def schedule(self, tokens: int) -> tuple[float, float]:
        """Return (rho, beta) for a retrieval region of `tokens` tokens."""
        step = next(s for s in self.schedule_steps if s.below_tokens is None or tokens < s.below_tokens)
        return step.rho, step.beta

    def candidates(self, tokens: int) -> int:
        """Return the number of keys that are reranked in a retrieval region of `tokens` tokens."""
        _, beta = self.schedule(tokens)
        return min(tokens, max(CANDIDATES_OF_A_ROW * self.top_k, math.ceil(beta * tokens)))
