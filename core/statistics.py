"""Statistics: of a request, counts and the three latencies that users compare (queueing, TTFT, TPOT); of a step, its work."""

from __future__ import annotations

import time
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

    def record_token(self, cached_tokens: int, attended_tokens: float) -> None:
        """Count a token drawn now, by a step that attended to `attended_tokens` of `cached_tokens` (0 of 0: prefill)."""
        self.last_token_at = time.perf_counter()
        if not self.generated_tokens:
            self.first_token_at = self.last_token_at
        self.generated_tokens += 1
        self.cached_token_steps += cached_tokens
        self.attended_token_steps += attended_tokens

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


@dataclass(frozen=True)
class StepReport:
    """What one step of an engine did, and how full the engine was after it.

    `prefill_tokens` is what the step read of all prompts, in tokens × layers, divided by the layers: a prompt that is read layer
    by layer counts from its first layer on, not when its tokens have passed the last. Remainders go to later steps, so the
    counts of all steps add up to what was read, that of prompts which end half-way included.
    """

    number: int = 0  # of the step, from 1; 0: there was none
    seconds: float = 0.0
    decode_batch: int = 0  # requests that got a token by decoding
    prefill_tokens: int = 0
    waiting: int = 0
    running: int = 0
    extents_used: int = 0
    extents_free: int = 0
    refresh_seconds: float = 0.0  # of the host, for the indexes' upkeep after decoding
