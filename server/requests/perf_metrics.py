"""Performance metrics of one sequence, as TensorRT-LLM's models put them out (`return_perf_metrics`)."""

from __future__ import annotations

from typing import Any

from kvseek.core.request import StepOutput
from kvseek.core.statistics import RequestStatistics

from .translation import Inputs, scalar

NANOSECONDS = 1_000_000_000


class PerfMetrics:
    """The metrics that are known so far; 0 stands for what has not happened yet, and for what kvseek does not do.

    Times are those of the engine process's steady clock, so only their differences mean something. Blocks of the KV cache are
    kvseek's extents, of 1,024 tokens in all layers; no tokens are drafted.
    """

    def __init__(self, inputs: Inputs) -> None:
        self._wanted = bool(scalar(inputs, "return_perf_metrics", False))
        self._known: RequestStatistics | None = None

    def push(self, output: StepOutput) -> None:
        """Take an output of the engine, which has statistics at the first token and at the end."""
        if output.statistics is not None:
            self._known = output.statistics

    def outputs(self) -> dict[str, Any]:
        """Return the outputs of a response; none unless the request asks for them."""
        if not self._wanted:
            return {}
        known = self._known or RequestStatistics(0, 0.0)
        own, missed = known.extents - known.shared_extents, known.prompt_extents - known.reused_extents
        seconds = {
            "arrival_time_ns": known.submitted_at,
            "first_scheduled_time_ns": known.started_at,
            "first_token_time_ns": known.first_token_at,
            "last_token_time_ns": known.last_token_at,
        }
        return {
            "kv_cache_alloc_new_blocks": own,
            "kv_cache_reused_blocks": known.reused_extents,
            "kv_cache_missed_blocks": missed,
            "kv_cache_alloc_total_blocks": own,
            "kv_cache_hit_rate": known.reused_extents / max(1, known.prompt_extents),
            **{name: round(value * NANOSECONDS) for name, value in seconds.items()},
            "acceptance_rate": 0.0,
            "total_accepted_draft_tokens": 0,
            "total_draft_tokens": 0,
        }
