"""A decode step between its launch and the moment when the host takes its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvseek.engine.draws.sampling import Launched

from .pacing import Work
from .sequence import RequestSequence


@dataclass(frozen=True)
class Flight:
    """A decode step that has been launched and not collected. Lists are by request, in the order of `sequences`.

    Attributes
    ----------
    drawing : list of bool
        Whether the token that is drawn is new; not where a request takes in again what it has generated.
    cached : list of int
        Tokens that each request has in the cache, that of the step included.
    host_rows : list of float
        See UsageMeter.rows.
    refresh_seconds : float
        The host's time for the upkeep that was due with the step.
    begun : float
        When the engine's step began in which it was launched, in seconds of time.perf_counter.
    work : Work
        What was read of prompts before it, since the step before it was launched.
    leaving : list
        Requests of the step that have ended since its launch, whose slots are closed when it has ended; and whether what they
        have read is kept for others.
    """

    launched: Launched
    sequences: list[RequestSequence]
    drawing: list[bool]
    cached: list[int]
    host_rows: list[float]
    refresh_seconds: float
    begun: float
    work: Work
    leaving: list[tuple[RequestSequence, bool]] = field(default_factory=list)
