"""A decode step: the requests that it has, and what is known of it until it is collected."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, compress

from kvseek.engine.draws.sampling import NO_TOKEN, Drawn, Launched, Sampler
from kvseek.engine.row_recorder import Wanted
from kvseek.engine.schedule.reading import Work
from kvseek.engine.schedule.sequence import RequestSequence


@dataclass(frozen=True)
class StepRequests:
    """The requests of a decode step, which the next step has too as long as none ends or joins.

    Attributes
    ----------
    samplers : list of Sampler or None
        None where the token with the largest logit is enough, and where no token is drawn.
    drawing : list of bool
        Whether the token that is drawn is new; not where a request takes in again what it has generated.
    drawn_for : list of Sampler
        Of the requests that get a new token.
    replaying : list
        The other requests.
    wanted : mapping
        By slot, the requests that ask for the rows which the step selects.
    quiet : bool
        Whether no step needs the host before the next one: nobody watches, and what may be drawn does not vary.
    ends : list of frozenset, or None
        Tokens that need a look; None where every token needs one.
    """

    sequences: list[RequestSequence]
    slots: list[int]
    samplers: list[Sampler | None]
    drawing: list[bool]
    drawn_for: list[Sampler]
    replaying: list[RequestSequence]
    wanted: Wanted
    quiet: bool
    ends: list[frozenset[int] | None]

    @classmethod
    def of(cls, sequences: list[RequestSequence]) -> StepRequests:
        """Collect what the next step has to know of these requests."""
        return cls(
            sequences,
            [s.slot for s in sequences],
            [None if s.replay or s.sampler.greedy else s.sampler for s in sequences],
            [not s.replay for s in sequences],
            [s.sampler for s in sequences if not s.replay],
            [s for s in sequences if s.replay],
            {s.slot: s.row_report for s in sequences if s.row_report is not None and not s.replay},
            all(s.quiet and not s.replay and not s.sampler.varies for s in sequences),
            [frozenset((NO_TOKEN, *s.request.end_ids)) if s.quiet and not s.replay else None for s in sequences],
        )


@dataclass(frozen=True)
class InFlightStep:
    """A decode step that has been launched and not collected, or several that were launched at once.

    Attributes
    ----------
    steps : int
        How many they are. Lists are by request.
    cached : list of int
        Tokens that each request has in the cache, that of the last step included; in each step before, one fewer.
    lengths : list of int
        How many of them are in its retrieval region, outside of its window, in every step.
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
    requests: StepRequests
    steps: int
    cached: list[int]
    lengths: list[int]
    refresh_seconds: float
    begun: float
    work: Work
    leaving: list[tuple[RequestSequence, bool]] = field(default_factory=list)

    def take_unseen(self, drawn: list[list[Drawn | int]], live: list[bool], now: float) -> list[bool]:
        """Take all tokens of requests of which no output has one, and which none ends; returns which requests are left.

        That takes a quarter of the time of `Engine._take_token`.
        """
        if set(map(type, chain.from_iterable(drawn))) != {int}:
            return live
        requests, steps, left = self.requests, self.steps, [False] * len(live)
        cached, attended = self.cached, self.launched.attended
        if steps > 1:  # of all steps together
            fewer = steps * (steps - 1) // 2
            cached, attended = [steps * last - fewer for last in cached], [steps * last - fewer for last in attended]
        lists = range(len(live)), requests.sequences, requests.ends, zip(*drawn, strict=True)
        of_each = zip(*lists, cached, attended, strict=True)
        for number, sequence, ends, tokens, all_cached, all_attended in compress(of_each, live):
            generated = sequence.sampler.generated
            if ends and ends.isdisjoint(tokens) and len(generated) + steps < sequence.request.max_tokens:
                generated += tokens
                sequence.statistics.record_tokens(all_cached, all_attended, now, steps)
            else:
                left[number] = True
        return left
