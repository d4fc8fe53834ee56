"""A request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from kvseek.core.errors import ErrorCode, KvseekError, TimeoutExpiredError, code_of
from kvseek.core.request import FinishReason, Request, StepOutput
from kvseek.core.statistics import RequestStatistics
from kvseek.engine.cache.prefix import Prefix
from kvseek.engine.cache.prefixes.tree import pack_tokens
from kvseek.engine.draws.sampling import Sampler

from .prompt_scores import PromptScores


@dataclass(eq=False)
class RequestSequence:
    """A request on its way through the engine. Once its prompt has been read, it has generated at least one token."""

    request_id: int
    request: Request
    sampler: Sampler
    statistics: RequestStatistics
    slot: int = -1
    generated: list[int] = field(default_factory=list)
    scores: PromptScores | None = None  # of a request that asks for log probabilities or logits of its prompt
    ends_session: bool = False  # the client has ended its session, so that what the request leaves goes with it
    prefix: Prefix | None = None  # found at admission, until the slot is open
    over: bool = False  # it has ended, though a step that was launched before may still compute a row for it

    def ended(self, reason: FinishReason) -> StepOutput:
        """Make the last output, without a token, of a request that ends without an error."""
        return StepOutput(self.request_id, finish_reason=reason, statistics=self.statistics)

    def failed(self, error: Exception, code: ErrorCode | None = None) -> StepOutput:
        """Make the last output of a request that an error ends; its code is the error's own if none is given."""
        return StepOutput(
            self.request_id,
            finish_reason=FinishReason.ERROR,
            statistics=self.statistics,
            error=str(error) if isinstance(error, KvseekError) else f"{type(error).__name__}: {error}",
            code=code or code_of(error),
        )

    def expired(self, now: float) -> StepOutput:
        """Make the only output of a request whose time limit passed while it waited; `now` in seconds of time.perf_counter."""
        waited = self.request.waited_seconds + now - self.statistics.submitted_at
        return self.failed(
            TimeoutExpiredError(
                f"timeout = {self.request.timeout_seconds:g} s: passed while the request waited for its turn, for {waited:.1f} "
                "s; send it again later, or with a longer timeout"
            )
        )

    @property
    def ready(self) -> bool:
        """Whether the request may start: its guide has been compiled, if it has one."""
        return self.sampler.guided or self.request.sampling.guide is None

    @property
    def total_tokens(self) -> int:
        """Tokens that the request can grow to, prompt included."""
        return len(self.request.prompt_ids) + self.request.max_tokens

    @cached_property
    def packed_prompt(self) -> bytes:
        """The prompt's tokens as prefixes are looked up."""
        return pack_tokens(self.request.prompt_ids)

    def cached_tokens(self) -> bytes:
        """Return the tokens that the slot has rows of and that the request knows, packed as `packed_prompt`.

        That is all but the last one drawn. The row of a token that a step in flight has drawn is not among them.
        """
        return self.packed_prompt + pack_tokens(self.generated[: max(0, len(self.sampler.generated) - 1)])

    @property
    def deadline(self) -> float | None:
        """Time at which the request's own time limit passes, in seconds of time.perf_counter; None: it has no limit."""
        limit, waited = self.request.timeout_seconds, self.request.waited_seconds
        return None if limit is None else self.statistics.submitted_at + limit - waited
