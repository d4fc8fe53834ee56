"""Statistics of requests (counts, and the latencies queueing, TTFT and TPOT, which users compare) and of engine steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RequestStatistics:
    """Counts and times of one request, filled in while it runs.

    Times are in seconds of `time.perf_counter`; a time is 0 until its event has happened.
    """

    prompt_tokens: int
    submitted_at: float
    started_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    generated_tokens: int = 0
    cached_token_steps: int = 0  # cached tokens, summed over decode steps
    attended_token_steps: float = 0.0  # cached tokens that were attended to, summed over decode steps
    extents: int = 0  # of the row pool, the most that the request has had; shared ones count too
    prompt_extents: int = 0  # of `extents`, those that hold the prompt
    reused_tokens: int = 0  # first tokens of the prompt that were not read, as an earlier request had left their rows
    reused_extents: int = 0  # of `prompt_extents`, those of which an earlier request had left at least the first rows
    shared_extents: int = 0  # of `reused_extents`, those that were not copied
    num_preemptions: int = 0  # how often it had to make room for others, and went on later

    def record_tokens(self, cached_tokens: int, attended_tokens: float, now: float, count: int = 1) -> None:
        """Count tokens that came now, drawn by as many steps, which attended to `attended_tokens` of `cached_tokens`.

        These are sums over the steps; 0 of 0: prefill.
        """
        self.last_token_at = now
        if not self.generated_tokens:
            self.first_token_at = self.last_token_at
        self.generated_tokens += count
        self.cached_token_steps += cached_tokens
        self.attended_token_steps += attended_tokens

    @property
    def queue_seconds(self) -> float:
        """Time from submission to the start of prefill."""
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
    """Work of one engine step, and how full the engine was after it.

    `prefill_tokens` counts the tokens that the step read of all prompts: tokens × layers read, divided by the number of layers.
    So a prompt that is read layer by layer counts from its first layer on, not when its tokens have passed the last. Remainders
    of the division go to later steps, so the counts of all steps add up to all that was read, prompts that ended half-way
    included.
    """

    number: int = 0  # number of the step, from 1; 0: there was no step
    seconds: float = 0.0
    decode_batch: int = 0  # tokens that requests got by decoding
    prefill_tokens: int = 0
    waiting: int = 0
    running: int = 0
    extents_used: int = 0  # by requests
    extents_kept: int = 0  # for later requests, by none that runs
    extents_free: int = 0
    refresh_seconds: float = 0.0  # time that the host spent on the indexes' upkeep after decoding
