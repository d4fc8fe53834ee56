"""kvseek's figures among Triton's Prometheus metrics."""

from __future__ import annotations

from typing import Any

from kvseek.engine.request import StepOutput


class ServerMetrics:
    """Counters over all requests of a server.

    Parameters
    ----------
    triton : module
        triton_python_backend_utils, which exists only inside the server.
    """

    def __init__(self, triton: Any) -> None:
        def counter(name: str, description: str) -> Any:
            family = triton.MetricFamily(name=name, description=description, kind=triton.MetricFamily.COUNTER)
            self._families.append(family)  # a metric lives as long as its family
            return family.Metric(labels={"model": "tensorrt_llm"})

        self._families: list[Any] = []
        self._requests = counter("kvseek_requests_total", "Requests that have ended, however they ended")
        self._tokens = counter("kvseek_generated_tokens_total", "Tokens generated")
        self._cached = counter("kvseek_cached_tokens_total", "Cached tokens, summed over decode steps")
        self._attended = counter("kvseek_attended_tokens_total", "Of those, attended to: mean over layers and KV heads")

    def record(self, output: StepOutput) -> None:
        """Count one output of the engine."""
        if output.token_id is not None:
            self._tokens.increment(1)
        if output.cached_tokens:
            self._cached.increment(output.cached_tokens)
            self._attended.increment(output.attended_tokens)
        if output.finish_reason is not None:
            self._requests.increment(1)

    def close(self) -> None:
        """Let go of the counters, which cannot be used any more.

        To be called while the model is finalised: Triton's Python backend crashes on counters that outlive the model.
        """
        del self._requests, self._tokens, self._cached, self._attended, self._families
