"""A request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from kvseek.core.request import Request
from kvseek.core.statistics import RequestStatistics
from kvseek.engine.cache.prefix import Prefix
from kvseek.engine.cache.prefixes.tree import pack_tokens
from kvseek.engine.draws.sampling import Sampler

from .prompt_scores import PromptScores


@dataclass(eq=False)
class Sequence:
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

    def packed_tokens(self) -> bytes:
        """Return the tokens of prompt and output, packed as `packed_prompt`."""
        return self.packed_prompt + pack_tokens(self.generated)

    @property
    def deadline(self) -> float | None:
        """Time at which the request's own time limit passes, in seconds of time.perf_counter; None: it has no limit."""
        limit, waited = self.request.timeout_seconds, self.request.waited_seconds
        return None if limit is None else self.statistics.submitted_at + limit - waited
