"""Per-request statistics: counts and the three latencies that users compare (queueing, TTFT, TPOT)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RequestStatistics:
    """Filled in while a request runs. Times are seconds of `time.perf_counter`; 0 until they happen."""

    prompt_tokens: int
    submitted_at: float
    started_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    generated_tokens: int = 0
    cached_token_steps: int = 0  # cached tokens, summed over decode steps
    attended_token_steps: float = 0.0  # of those, attended to

    @property
    def queue_seconds(self) -> float:
        """From submission to the start of prefill."""
        return max(0.0, self.started_at - self.submitted_at)

    @property
    def ttft_seconds(self) -> float:
        """Time to first token, queueing included."""
        return max(0.0, self.first_token_at - self.submitted_at)

    @property
    def tpot_seconds(self) -> float:
        """Time per output token after the first; 0 with fewer than two tokens."""
        if self.generated_tokens < 2:
            return 0.0
        return (self.last_token_at - self.first_token_at) / (self.generated_tokens - 1)

    @property
    def attended_share(self) -> float:
        """Share of the cached tokens that decode steps attended to; 1 before the first decode step."""
        return self.attended_token_steps / self.cached_token_steps if self.cached_token_steps else 1.0
