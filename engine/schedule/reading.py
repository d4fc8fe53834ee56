"""Decides which prompts a step reads, and how much of them, and reads them.

Prompts that stay inside the cache's window are *short*: nothing of them is indexed or leaves the device, so reading one
between two units of a long prompt cannot disturb index work that is under way. Short prompts are read in packs, long prompts
one at a time, both in the order of admission. A step reads either packs or long prompts. If there are both, the steps
take turns, so that neither waits for the other to end.

If no request decodes, a step reads until `max_num_tokens` tokens have passed all layers, or for IDLE_SECONDS. Beside decoding
requests Pacing says in which steps to read and how much: units within its allowance, or one pack that is small enough to be
read to its end in one step, while a long prompt waits.

**Pacing** lets a step read so much of prompts that the requests which decode beside it hardly notice.

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

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvseek.core.errors import LogitsError
from kvseek.core.extents import extents_for
from kvseek.engine.cache.prefixes.cache import PrefixCache
from kvseek.engine.draws.sampling import check_finite
from kvseek.engine.model.decoder import Decoder
from kvseek.engine.model.prefill import Prefill
from kvseek.engine.schedule.sequence import RequestSequence

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

IDLE_SECONDS = (
    0.25  # reading time of a step if no request decodes: between steps the engine looks for requests and cancellations
)
LOAD_PATIENCE = 0.01  # seconds that such a step waits for rows from disk, so that the engine's thread does not spin


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


@dataclass(frozen=True)
class Reading:
    """Result of a step's reading for a request: `logits` of the prompt's last token, an `error`, or only progress."""

    sequence: RequestSequence
    progress: float = 1.0
    logits: Tensor | None = None
    error: Exception | None = None


@dataclass
class Work:
    """Amount of reading that a step has done."""

    units: int = 0
    token_layers: int = 0
    pack: bool = False  # a small pack, read to its end in this step
    long_waits: bool = False  # there is a long prompt too, which waits for another step if this step reads a pack
    waited: bool = False  # the host has waited for results, and so for the decode step before
    charged: bool = False  # pacing has been told of it

    def add(self, token_layers: int) -> None:
        """Count a unit."""
        self.units += 1
        self.token_layers += token_layers


@dataclass(frozen=True)
class Job:
    """A prefill and the requests that it is for; requests that end before the prefill are taken out."""

    prefill: Prefill
    sequences: list[RequestSequence]


class PromptReader:
    """Reads the prompts of admitted requests, `read` once a step.

    Attributes
    ----------
    pacing : Pacing
        The account of reading; the engine tells it how long each step with decoding requests took.
    work : Work
        Amount of reading that the last `read` did.
    """

    def __init__(self, decoder: Decoder, prefixes: PrefixCache, max_num_tokens: int) -> None:
        self._prefixes = prefixes
        self._decoder, self._layers = decoder, decoder.config.model.num_layers
        self._chunk = min(decoder.config.prefill_chunk_tokens, max_num_tokens)
        self._pack_tokens = min(self._chunk, decoder.config.max_input_len)
        self._budget = max_num_tokens * self._layers
        self.pacing, self.work = Pacing(self._layers, self._pack_tokens), Work()
        self._jobs: dict[bool, Job] = {}  # True: the job of short prompts; False: the job of a long prompt
        self._short_went_last = False
        self._alone: set[int] = set()  # requests whose pack failed; each of them is read alone

    def read(self, unread: Sequence[RequestSequence], beside: bool) -> list[Reading]:
        """Read a part of the prompts of `unread`; `beside` says whether the step decodes too.

        A request that ends or whose prompt is finished occurs once in the returned list, and need not be given again.
        """
        self.work = Work(long_waits=not all(self._is_short(sequence) for sequence in unread))
        if not unread or (beside and self.pacing.rests):
            return []
        left, started, done = list(unread), time.perf_counter(), list[Reading]()
        short = self._turn(left, beside)
        if short is None:
            self._short_went_last = False
            return []
        while self._has_room(short, beside, started) and (job := self._job(short, left, beside)) is not None:
            found = self._advance(job)
            done += found
            left = [sequence for sequence in left if all(one.sequence is not sequence for one in found)]
            if (found and beside) or any(s.scores is not None and s.scores.holds_logits for s in job.sequences):
                break
        self._short_went_last = short
        if self.work.units and short in self._jobs:
            job = self._jobs[short]
            done += [Reading(sequence, job.prefill.progress) for sequence in job.sequences]
        return done

    def note_step(self, work: Work, begun: float) -> None:
        """Tell pacing of a decode step that has been collected now.

        Parameters
        ----------
        work : Work
            What was read before it. Reading that has been launched behind the step does not count, unless the host has waited
            for it before it collected the step.
        begun : float
            When it began, or when the step before it was collected, in seconds of time.perf_counter.
        """
        done = [work] if work is self.work or not self.work.waited else [work, self.work]
        done = [one for one in done if not one.charged]
        for one in done:
            one.charged = True
        self.pacing.record(
            time.perf_counter() - begun,
            sum(one.units for one in done),
            sum(one.token_layers for one in done),
            any(one.pack for one in done),
            any(one.long_waits for one in done),
        )

    def drop(self, sequence: RequestSequence) -> None:
        """Leave a request, whose slot is about to be closed, out of all further reading."""
        self._alone.discard(sequence.request_id)
        for short, job in list(self._jobs.items()):
            if sequence in job.sequences:
                job.prefill.drop(sequence.slot)
                job.sequences.remove(sequence)
                if not job.sequences:
                    del self._jobs[short]

    def _is_short(self, sequence: RequestSequence) -> bool:
        tokens = len(sequence.request.prompt_ids)
        return tokens <= self._pack_tokens and self._decoder.cache.retrieval_tokens(tokens) == 0

    def _turn(self, unread: Sequence[RequestSequence], beside: bool) -> bool | None:
        """Decide what this step reads: True for short prompts, False for long prompts, None for nothing.

        It reads nothing while Pacing is in debt, except a small pack if the last step read no short prompts.
        """
        kinds = {self._is_short(sequence) for sequence in unread}
        if beside and self.pacing.in_debt:
            return True if True in kinds and not self._short_went_last and self._small_pack(unread) else None
        return not self._short_went_last if len(kinds) == 2 else kinds.pop()

    def _small_pack(self, unread: Sequence[RequestSequence]) -> bool:
        """Whether the next pack is small enough to be read to its end in one step beside decoding requests."""
        if True in self._jobs:
            return self._whole(self._jobs[True])
        first = next(sequence for sequence in unread if self._is_short(sequence))
        return len(first.request.prompt_ids) <= self.pacing.pack

    def _job(self, short: bool, unread: Sequence[RequestSequence], beside: bool) -> Job | None:
        """Return the job of short or of long prompts, beginning the next if none is under way.

        None: no prompt waits, or rows of the next one are on their way from disk.
        """
        if short not in self._jobs:
            waiting = [sequence for sequence in unread if self._is_short(sequence) == short]
            chosen = self._pack(waiting, beside) if short else waiting[:1]
            if not chosen:
                return None
            if not short and not self._look_up(chosen[0], beside):
                return None
            prompts = [(sequence.slot, sequence.request.prompt_ids) for sequence in chosen]
            on_logits = {sequence.slot: sequence.unscored.take for sequence in chosen if sequence.unscored is not None}
            self._jobs[short] = Job(self._decoder.prefill(prompts, on_logits), chosen)
        return self._jobs[short]

    def _look_up(self, sequence: RequestSequence, beside: bool) -> bool:
        """Find out how much of a long prompt need not be read. Those that were admitted before it have been read by now.

        Returns False while rows are loaded from disk.
        """
        if sequence.unscored is not None:  # which are asked of every token
            return True
        request, statistics = sequence.request, sequence.statistics
        prompt = (sequence.slot, sequence.packed_prompt, request.cache_salt)
        if not self._prefixes.loads(sequence.slot):
            self._prefixes.find_more(*prompt, sequence.reserved_tokens, request.session, sequence.reused_before)
        if not self._prefixes.load(*prompt, 0.0 if beside else LOAD_PATIENCE, sequence.reused_before):
            return False
        if (prefix := self._prefixes.cache.prefixes.get(sequence.slot)) is not None and not sequence.generated:
            statistics.reused_tokens, statistics.shared_extents = prefix.tokens, prefix.shared
            found = extents_for(max(0, prefix.tokens - self._decoder.cache.config.sink))
            statistics.reused_extents = min(found, statistics.prompt_extents)
        return True

    def _pack(self, waiting: Sequence[RequestSequence], beside: bool) -> list[RequestSequence]:
        """Choose the first of `waiting`, and the requests behind it that fit into a pack with it."""
        limit = min(self._pack_tokens, self.pacing.pack) if beside else self._pack_tokens
        chosen, tokens = list[RequestSequence](), 0
        for sequence in waiting:
            tokens += len(sequence.request.prompt_ids)
            alone = sequence.request_id in self._alone or not self._decoder.model.reads_packs
            if chosen and (alone or tokens > limit):
                break
            chosen.append(sequence)
            if alone:
                break
        return chosen

    def _has_room(self, short: bool, beside: bool, started: float) -> bool:
        """Whether the step may run another unit; the first unit of a step is always allowed."""
        if not self.work.units:
            return True
        if not beside:
            return self.work.token_layers < self._budget and time.perf_counter() - started < IDLE_SECONDS
        job = self._jobs.get(short)
        if job is not None and self._whole(job):
            return True
        next_unit = self._chunk if job is None else min(self._chunk, job.prefill.tokens)
        return self.pacing.affords(self.work.units + 1, self.work.token_layers + next_unit)

    def _whole(self, job: Job) -> bool:
        """Whether a step beside decoding requests reads the job to its end."""
        return self._is_short(job.sequences[0]) and job.prefill.tokens <= self.pacing.pack

    def _advance(self, job: Job) -> list[Reading]:
        """Run one unit of a job; returns the results of the requests that ended with it."""
        self.work.pack = self._whole(job)
        try:
            self.work.waited |= any(sequence.unscored is not None for sequence in job.sequences)
            self.work.add(job.prefill.advance(self._chunk))
            if job.prefill.progress < 1:
                return []
            self.work.waited = True
            logits = job.prefill.finish()
        except Exception as error:  # one request's prefill must not take the others down
            self._release(job)
            if len(job.prefill.slots) == 1:
                return [Reading(job.sequences[0], error=error)]
            # Each request of the pack is read alone next, which shows whose prompt fails.
            self._alone.update(sequence.request_id for sequence in job.sequences)
            return []
        self._release(job)
        rows = dict(zip(job.prefill.slots, logits, strict=True))
        return [self._read_to_its_end(sequence, rows[sequence.slot]) for sequence in job.sequences]

    def _read_to_its_end(self, sequence: RequestSequence, logits: Tensor) -> Reading:
        """Let others use the rows of a prompt if its logits do not show that they are wrong."""
        try:
            check_finite(logits)
        except LogitsError as error:
            return Reading(sequence, error=error)
        self._prefixes.share(sequence.slot, sequence.packed_prompt, sequence.request.cache_salt)
        return Reading(sequence, logits=logits)

    def _release(self, job: Job) -> None:
        self._jobs = {short: one for short, one in self._jobs.items() if one is not job}
