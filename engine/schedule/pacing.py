"""Decides how much of the prompts a step may read, so that the requests that decode beside it hardly notice.

A unit of reading is one layer over one chunk of tokens. Chunks have the same size whatever else runs: other sizes would round
differently, and a method's selection can turn a difference in the last bit into another row. So the pace is kept by
reading in some steps and not in others. Every decode step earns an allowance, a share of an undisturbed step's time.
Reading spends the time by which it makes a step longer, and goes on while the account is above zero. On average, steps
take SLOWDOWN times as long as undisturbed steps; a single step takes longer if its unit is larger than the allowance.

Small packs of short prompts do not wait for the account: else a short prompt would wait because of a long prompt's debts. If
there is a long prompt too, the time of a pack is charged to the account, so that the long prompt waits. A pack is read in
every second step at most, so PACK_CHARGE leaves a part of two steps' allowance to the long prompt, however many short prompts
arrive.

The time of an undisturbed decode step is the shortest of the last few steps that read nothing: disturbances from outside,
such as another program on the same cores, only make a step longer. How many small units fit into a step is predicted: a unit
reads a layer's weights once, as a decode step does, and computes in proportion to its tokens, so

    unit = decode step / layers + token_seconds * tokens

where `token_seconds` is learned from the time by which reading made steps longer.
"""

from __future__ import annotations

from collections import deque

SLOWDOWN = 1.8  # average time of a step that also reads, in undisturbed decode steps
PACK_STEPS = 2.0  # time of a decode step that also reads a pack of short prompts, in undisturbed decode steps, at most
PACK_CHARGE = 1.5  # most time charged for a pack, in undisturbed decode steps; less than two steps' allowance
SMALLEST_PACK = 16  # tokens; packs are limited to multiples of it
REST_INTERVAL = 32  # steps
SAMPLES = 3  # undisturbed steps whose shortest counts
FIRST_RESTS = 4  # steps between two steps that read nothing, until SAMPLES such steps have been measured
LEARNING_RATE = 0.5
LARGEST_SAMPLE = 4.0  # times the expected time; a hiccup, or an index that is built, says little about the next unit
LARGEST_CHARGE = 100.0  # undisturbed decode steps; reading need not make up for a long pause of the machine


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
        self._token_seconds: float | None = None
        self._credit = 0.0  # seconds that reading may take; below zero, the seconds that it has taken too much

    @property
    def rests(self) -> bool:
        """Whether the next step should read nothing, to measure an undisturbed decode step."""
        interval = REST_INTERVAL if len(self._undisturbed) == SAMPLES else FIRST_RESTS
        return not self._undisturbed or self._since_rest + 1 >= interval

    @property
    def in_debt(self) -> bool:
        """Whether earlier steps read more than their allowance.

        Until that is made up for, a step may read at most a small pack of short prompts.
        """
        return self._credit <= 0

    def affords(self, units: int, token_layers: int) -> bool:
        """Whether a step may read `units` units with `token_layers` tokens in all, by prediction; one unit always."""
        return units == 1 or self._cost(units, token_layers) <= self._credit

    @property
    def pack(self) -> int:
        """Most tokens of a pack of short prompts, of which one step reads all layers."""
        room = (PACK_STEPS - 1) * self._decode_seconds  # reading all layers takes a decode step, even without tokens
        tokens = int(room / (self._per_token * self._layers)) // SMALLEST_PACK * SMALLEST_PACK
        return min(self._max_pack, max(SMALLEST_PACK, tokens))

    def record(
        self, seconds: float, units: int, token_layers: int, pack: bool = False, long_waits: bool = False
    ) -> None:
        """Learn from a step with decoding requests.

        Parameters
        ----------
        seconds : float
            Duration of the whole step. The step has waited for its tokens, so device time is included.
        units, token_layers : int
            Units that the step read, and the sum of their tokens; 0 if it read nothing.
        pack : bool
            Whether the step read a small pack.
        long_waits : bool
            Whether there is a long prompt, which waits while packs are read.
        """
        decode = self._decode_seconds
        if units and self._undisturbed:
            self._learn(seconds, units, token_layers)
            limit = LARGEST_CHARGE if not pack else PACK_CHARGE if long_waits else 0.0
            self._credit -= min(max(0.0, seconds - decode), limit * decode)
        elif not units:
            self._undisturbed.append(seconds)
            self._since_rest = 0
        allowance = (SLOWDOWN - 1) * self._decode_seconds
        self._credit = min(self._credit + allowance, allowance)

    def _learn(self, seconds: float, units: int, token_layers: int) -> None:
        """Learn the time per token and layer from a step that read something."""
        self._since_rest += 1
        if not token_layers:  # only logits of a prompt's tokens were computed, which says nothing about layers
            return
        sample = max(0.0, seconds - self._decode_seconds - self._cost(units, 0)) / token_layers
        if self._token_seconds is not None:
            sample = min(sample, LARGEST_SAMPLE * self._per_token)
        self._token_seconds = sample + (1 - LEARNING_RATE) * (self._per_token - sample)

    def _cost(self, units: int, token_layers: int) -> float:
        """Predict the seconds that `units` units with `token_layers` tokens in all take."""
        return self._decode_seconds * units / self._layers + self._per_token * token_layers

    @property
    def _decode_seconds(self) -> float:
        return min(self._undisturbed, default=0.0)

    @property
    def _per_token(self) -> float:
        """Seconds per token and layer.

        Until it has been learned: a layer's share of a decode step divided by SMALLEST_PACK, as if computing the smallest pack
        took as long as reading that layer's weights.
        """
        if self._token_seconds is None:
            return max(1e-12, self._decode_seconds / self._layers / SMALLEST_PACK)
        return max(1e-12, self._token_seconds)
