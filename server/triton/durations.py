"""Takes out of Triton's metrics and statistics what Triton cannot know of these models: how long requests take, and how they end.

Triton's Python backend reports a request of a decoupled model as done when the model's `execute` returns
(github.com/triton-inference-server/server/issues/8463). That is when the model has taken the request, a millisecond after it
came, and long before its answer; a request that is answered with an error counts as a success. The engine's own metrics have
both (docs/metrics.md).
"""

from __future__ import annotations

import re
from typing import Any

MISLEADING = re.compile(
    r"^(?:# (?:HELP|TYPE) )?nv_inference_(?:request_success|request_failure|\w+_duration_us|\w+_summary_us\w*)\b.*\n?",
    re.MULTILINE,
)


def metrics_without_durations(text: str) -> str:
    """Return Triton's metrics, in Prometheus' text format, without those of durations, successes and failures."""
    return MISLEADING.sub("", text)


def clear_durations(response: Any) -> None:
    """Set the durations of a ModelStatisticsResponse to 0; counts stay, as perf_analyzer asks for them."""
    for model in response.model_stats:
        for part in (model.inference_stats, *model.batch_stats, *model.response_stats.values()):
            for _, statistic in part.ListFields():
                if hasattr(statistic, "ns"):
                    statistic.ns = 0
