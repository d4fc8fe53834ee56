"""Decides how much of the prompts a step may read, so that the requests that decode beside it hardly notice.

A unit of reading is one layer over one chunk of tokens. Chunks have the same size whatever else runs: other sizes would round
differently, and a method's selection can turn a difference in the last bit into another row. So the pace is kept by
reading in some steps and not in others. Every decode step earns an allowance, a share of an undisturbed step's time.
Reading spends the time by which it makes a step longer, and goes on while its account is above zero. On average, steps
take SLOWDOWN times as long as undisturbed steps; a single step takes longer if its unit is larger than the allowance.

Short and long prompts have an account each. That of short prompts is filled first, up to BURST steps: a short prompt that comes
now and then is read at once and to its end, whatever a long prompt has spent. Long prompts have what is left over, and
LONG_SHARE of the allowance in any case, so that they are read on however many short prompts arrive. Where there is no long
prompt, a pack of short prompts that makes a step no longer than PACK_STEPS waits for no account and is not charged: the sooner
the prompts that wait are read, the more requests share a step.

The time of an undisturbed decode step is the shortest of the last few steps that read nothing: disturbances from outside,
such as another program on the same cores, only make a step longer. How many small units fit into a step is predicted: a unit
reads a layer's weights once, as a decode step does, and computes in proportion to its tokens, so

    unit = decode step / layers + token_seconds * tokens

where `token_seconds` is learned from the time by which reading made steps longer, for short and for long prompts: the tokens of a
long prompt attend to many others, and take several times as long.

Where launching a layer takes longer than reading its weights, as it does for small models on a GPU, that prediction makes
tokens too dear, and packs smaller than they should be. So prompts that are charged are packed by what packs have taken: the time
of a unit is fitted to its tokens, and a pack has as many tokens as take the time that a unit takes without any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression

SLOWDOWN = 1.8  # average time of a step that also reads, in undisturbed decode steps
BURST = 4.0  # most that short prompts may spend at once, in undisturbed decode steps
LONG_SHARE = 0.125  # of the allowance, which short prompts leave to long ones
PACK_STEPS = 2.0  # time of a decode step that also reads a pack of short prompts, in undisturbed decode steps, at most
SMALLEST_PACK = 16  # tokens; packs are limited to multiples of it
REST_INTERVAL = 32  # steps
SAMPLES = 3  # undisturbed steps whose shortest counts
FIRST_RESTS = 4  # steps between two steps that read nothing, until SAMPLES such steps have been measured
LEARNING_RATE = 0.5
FITTED = 8  # numbers of tokens of the last units of short prompts, to which the time of a unit is fitted
GROWTH = 2  # largest pack, over the largest of those
LARGEST_SAMPLE = 4.0  # times the expected time; a hiccup, or an index that is built, says little about the next unit
LARGEST_CHARGE = 100.0  # undisturbed decode steps; reading need not make up for a long pause of the machine


@dataclass
class Work:
    """Amount of reading that a step has done, of short prompts or of a long one."""

    units: int = 0
    token_layers: int = 0  # sum of the units' tokens
    short: bool = False
    free: bool = False  # not charged: a small pack that keeps no long prompt waiting, or beside unwatched requests
    waited: bool = False  # the host has waited for results, and so for the decode step before
    charged: bool = False  # pacing has been told of it

    def add(self, token_layers: int) -> None:
        """Count a unit."""
        self.units += 1
        self.token_layers += token_layers


@dataclass
class Account:
    """Of short or of long prompts: `credit`, the seconds that reading may take, is below zero if it has taken too much."""

    credit: float = 0.0
    token_seconds: float | None = None  # time per token and layer; None: not learned yet


class Pacing:
    """Keeps account of reading and says how much may be read beside decode steps.

    Parameters
    ----------
    num_layers : int
        Units that one token passes through.
    max_pack : int
        Most tokens of a pack of short prompts.
    """

    def __init__(self, num_layers: int, max_pack: int) -> None:
        self._layers, self._max_pack = num_layers, max_pack
        self._undisturbed: deque[float] = deque(maxlen=SAMPLES)
        self._since_rest = 0  # steps that read something
        self._short, self._long = Account(), Account()
        self._fitted: dict[float, float] = {}  # seconds of a unit by its tokens, the latest last
        self._slope = self._intercept = (
            0.0  # of the line through them, as soon as there are two: until then tokens cost nothing
        )

    def rests(self, short: bool) -> bool:
        """Whether the next step should read nothing, to measure an undisturbed decode step; `short`: a short prompt waits.

        A short prompt waits for a measurement only if the last one was long ago.
        """
        interval = REST_INTERVAL if len(self._undisturbed) == SAMPLES else FIRST_RESTS
        return not self._undisturbed or self._since_rest + 1 >= interval * (1 + short)

    def may_read(self, short: bool) -> bool:
        """Whether there is anything left to spend for short or for long prompts."""
        return self._account(short).credit > 0

    def affords(self, short: bool, units: int, token_layers: int) -> bool:
        """Whether a step may read `units` units with `token_layers` tokens in all, by prediction; one unit always."""
        return units == 1 or self._cost(short, units, token_layers) <= self._account(short).credit

    @property
    def pack(self) -> int:
        """Most tokens of a pack of short prompts, of which one step reads all layers."""
        room = PACK_STEPS * self._decode_seconds - self._without_tokens * self._layers
        tokens = int(room / (self._per_token(True) * self._layers)) // SMALLEST_PACK * SMALLEST_PACK
        return min(self._max_pack, max(SMALLEST_PACK, tokens))

    @property
    def charged_pack(self) -> int:
        """Most tokens of a pack of short prompts that is charged: as many as take the time that a unit takes without any."""
        if not self._fitted:
            return self.pack
        most = GROWTH * max(self._fitted)
        if self._slope > 0:
            most = min(most, self._without_tokens / self._slope)
        return max(self.pack, min(self._max_pack, int(most)))

    @property
    def _without_tokens(self) -> float:
        """Seconds of a unit of short prompts without any token, at least those of reading its weights."""
        return max(self._decode_seconds / self._layers, self._intercept)

    def steps_in(self, seconds: float) -> float:
        """Return how many undisturbed steps take so long; 1 where none has been measured."""
        return seconds / self._decode_seconds if self._decode_seconds else 1.0

    def record(self, seconds: float, works: Sequence[Work] = (), steps: int = 1) -> None:
        """Learn from a step with decoding requests, or from several that were launched at once.

        Parameters
        ----------
        seconds : float
            Duration of all of it. The step has waited for its tokens, so device time is included.
        works : sequence of Work
            What was read in this time; none, or without units, if nothing was.
        """
        works = [work for work in works if work.units]
        if works and self._undisturbed:
            self._since_rest += 1
            longer = max(0.0, seconds - steps * self._decode_seconds)
            costs = [self._cost(work.short, work.units, work.token_layers) for work in works]
            for work, cost in zip(works, costs, strict=True):
                own = longer * cost / sum(costs) if len(works) > 1 else longer
                self._learn(work, own)
                if not work.free:
                    self._account(work.short).credit -= min(own, LARGEST_CHARGE * self._decode_seconds)
        elif not works:
            self._undisturbed.append(seconds / steps)
            self._since_rest = 0
        self._earn()

    def _earn(self) -> None:
        """Divide a step's allowance."""
        decode, short, long = self._decode_seconds, self._short, self._long
        allowance = (SLOWDOWN - 1) * decode
        to_long = min(LONG_SHARE * allowance, max(0.0, allowance - long.credit))
        to_short = min(allowance - to_long, max(0.0, BURST * decode - short.credit))
        short.credit = min(short.credit + to_short, BURST * decode)  # decode steps may have become shorter
        long.credit = min(long.credit + allowance - to_short, allowance)

    def _learn(self, work: Work, seconds: float) -> None:
        """Learn the time per token and layer from the time by which reading made a step longer."""
        if not work.token_layers:  # only logits of a prompt's tokens were computed, which says nothing about layers
            return
        if work.short:
            self._fitted.pop(tokens := work.token_layers / work.units, None)
            self._fitted[tokens] = seconds / work.units
            if len(self._fitted) > FITTED:
                del self._fitted[next(iter(self._fitted))]
            if len(self._fitted) > 1:
                self._slope, self._intercept = linear_regression(list(self._fitted), list(self._fitted.values()))
        account, before = self._account(work.short), self._per_token(work.short)
        weights = self._cost(work.short, work.units, 0)
        # Where the weights alone explain the time, tokens are not free: a pack of four times as many takes a step to compute.
        sample = max(weights / 4, seconds - weights) / work.token_layers
        if account.token_seconds is not None:
            sample = min(sample, LARGEST_SAMPLE * before)
        account.token_seconds = sample + (1 - LEARNING_RATE) * (before - sample)

    def _cost(self, short: bool, units: int, token_layers: int) -> float:
        """Predict the seconds that `units` units with `token_layers` tokens in all take."""
        return self._decode_seconds * units / self._layers + self._per_token(short) * token_layers

    def _account(self, short: bool) -> Account:
        return self._short if short else self._long

    @property
    def _decode_seconds(self) -> float:
        return min(self._undisturbed, default=0.0)

    def _per_token(self, short: bool) -> float:
        """Seconds per token and layer.

        Until it has been learned: that of the other prompts, or a layer's share of a decode step divided by SMALLEST_PACK, as if
        computing the smallest pack took as long as reading that layer's weights.
        """
        known = [
            one.token_seconds
            for one in (self._account(short), self._account(not short))
            if one.token_seconds is not None
        ]
        return max(1e-12, known[0] if known else self._decode_seconds / self._layers / SMALLEST_PACK)
