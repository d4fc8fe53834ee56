"""Decides which prompts a step reads, and how much of them, and reads them.

There are three kinds of prompts, so that nobody waits for one that takes many times as long to read:

- Those that stay inside the cache's window are read in packs.
- Those of up to `most_tokens_beside` tokens are read one at a time.
- Longer ones, one at a time.

Of each kind one job is under way, and the next one begins when that has ended, in the order of admission. A step reads one
kind: the one that was not read for the longest time. So a prompt whose kind has none under way is read in the next step, and no
kind waits for another to end.

If no request decodes, a step reads until `max_num_tokens` tokens have passed all layers, or for IDLE_SECONDS. Beside decoding
requests `Pacing` says in which steps to read, which kinds and how much.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from statistics import linear_regression

from torch import Tensor

from kvseek.core.errors import LogitsError
from kvseek.core.extents import extents_for
from kvseek.core.streams import BoundedLaunches
from kvseek.engine.cache.prefixes.cache import PrefixCache
from kvseek.engine.draws.sampling import check_finite
from kvseek.engine.model.decoder import Decoder
from kvseek.engine.model.prefill import Prefill
from kvseek.engine.model.prompt_windows import most_tokens_beside

from .sequence import RequestSequence

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
# Reading time of a step if no request decodes: between steps the engine looks for requests and cancellations
IDLE_SECONDS = 0.25
UNITS_AHEAD = 4  # that such steps launch before the first of them has ended: who comes next waits for these
LOAD_PATIENCE = 0.01  # seconds that such a step waits for rows from disk, so that the engine's thread does not spin


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
    """Keeps account of reading and says how much may be read, so that the requests that decode beside it hardly notice.

    A unit of reading is one layer over one chunk of tokens. Chunks have the same size whatever else runs: other sizes would round
    differently, and a method's selection can turn a difference in the last bit into another row. So the pace is kept by
    reading in some steps and not in others. Every decode step earns an allowance, a share of an undisturbed step's time.
    Reading spends the time by which it makes a step longer, and goes on while its account is above zero. On average, steps
    take SLOWDOWN times as long as undisturbed steps; a single step takes longer if its unit is larger than the allowance.

    Short and long prompts have an account each. That of short prompts is filled first, up to BURST steps: a short prompt that
    comes now and then is read at once and to its end, whatever a long prompt has spent. Long prompts have what is left over,
    and LONG_SHARE of the allowance in any case, so that they are read on however many short prompts arrive. Where there is no
    long prompt, a pack of short prompts that makes a step no longer than PACK_STEPS waits for no account and is not charged:
    the sooner the prompts that wait are read, the more requests share a step.

    The time of an undisturbed decode step is the shortest of the last few steps that read nothing: disturbances from outside,
    such as another program on the same cores, only make a step longer. How many small units fit into a step is predicted: a unit
    reads a layer's weights once, as a decode step does, and computes in proportion to its tokens, so

        unit = decode step / layers + token_seconds * tokens

    where `token_seconds` is learned from the time by which reading made steps longer, for short and for long prompts: the
    tokens of a long prompt attend to many others, and take several times as long.

    Where launching a layer takes longer than reading its weights, as it does for small models on a GPU, that prediction makes
    tokens too dear, and packs smaller than they should be. So prompts that are charged are packed by what packs have taken: the
    time of a unit is fitted to its tokens, and a pack has as many tokens as take the time that a unit takes without any.

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


class Kind(IntEnum):
    """Of a prompt, by how long it takes to read."""

    PACKED = 0
    MEDIUM = 1
    LONG = 2


@dataclass(frozen=True)
class Reading:
    """Result of a step's reading for a request: `logits` of the prompt's last token, an `error`, or only progress."""

    sequence: RequestSequence
    progress: float = 1.0
    logits: Tensor | None = None
    error: Exception | None = None


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
        self._medium_tokens = most_tokens_beside(decoder.config)
        self._budget = max_num_tokens * self._layers
        self._launches = BoundedLaunches(decoder.cache.window.device, UNITS_AHEAD)
        self.pacing, self.work = Pacing(self._layers, self._pack_tokens), Work()
        self._jobs: dict[Kind, Job] = {}
        self._reads = 0  # steps that have read something
        self._last_read = dict.fromkeys(Kind, 0)  # the last of them that has read this kind
        self._alone: set[int] = set()  # requests whose pack failed; each of them is read alone
        # Seconds that the host may wait for rows from disk: none beside decoding requests
        self._patience = LOAD_PATIENCE

    def read(self, unread: Sequence[RequestSequence], beside: bool, watched: bool = True) -> list[Reading]:
        """Read a part of the prompts of `unread`; `beside` says whether the step decodes too.

        If nobody watches the decoding requests' tokens come (RequestSequence.whole), and no prompt is long, prompts are read
        as if nothing decoded: the sooner they are read, the more requests share a step.
        A request that ends or whose prompt is finished occurs once in the returned list, and need not be given again.
        """
        self._patience = 0.0 if beside else LOAD_PATIENCE
        paced = beside and (watched or any(self._kind(sequence) is Kind.LONG for sequence in unread))
        self.work, beside = Work(free=beside and not paced), paced
        left, started, done = list(unread), time.perf_counter(), list[Reading]()
        kind = self._turn(left, beside)
        if kind is None:
            return []
        self.work.short, self._reads = kind is not Kind.LONG, self._reads + 1
        self._last_read[kind] = self._reads
        while self._has_room(kind, beside, started) and (job := self._job(kind, left, beside)) is not None:
            found = self._advance(job, beside)
            done += found
            left = [sequence for sequence in left if all(one.sequence is not sequence for one in found)]
            if (found and beside) or any(s.scores is not None and s.scores.holds_logits for s in job.sequences):
                break
        if self.work.units and kind in self._jobs:
            job = self._jobs[kind]
            done += [Reading(sequence, job.prefill.progress) for sequence in job.sequences]
        return done

    def note_step(self, work: Work, begun: float, steps: int = 1) -> None:
        """Tell pacing of a decode step, or of several that were launched at once, collected now.

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
        self.pacing.record(time.perf_counter() - begun, done, steps)

    def drop(self, sequence: RequestSequence) -> None:
        """Leave a request, whose slot is about to be closed, out of all further reading."""
        self._alone.discard(sequence.request_id)
        for kind, job in list(self._jobs.items()):
            if sequence in job.sequences:
                job.prefill.drop(sequence.slot)
                job.sequences.remove(sequence)
                if not job.sequences:
                    del self._jobs[kind]

    def _kind(self, sequence: RequestSequence) -> Kind:
        tokens = len(sequence.request.prompt_ids)
        if tokens <= self._pack_tokens and self._decoder.cache.retrieval_tokens(tokens) == 0:
            return Kind.PACKED
        return Kind.MEDIUM if tokens <= self._medium_tokens else Kind.LONG

    def _turn(self, unread: Sequence[RequestSequence], beside: bool) -> Kind | None:
        """Decide which kind this step reads; None: nothing."""
        kinds = {self._kind(sequence) for sequence in unread}
        if beside:
            if self.pacing.rests(short=min(kinds, default=Kind.LONG) is not Kind.LONG):
                return None
            self.work.free = kinds == {Kind.PACKED} and self._small_pack(unread)
            kinds = {kind for kind in kinds if self.work.free or self.pacing.may_read(kind is not Kind.LONG)}
        return min(kinds, key=lambda kind: (self._last_read[kind], kind), default=None)

    def _small_pack(self, unread: Sequence[RequestSequence]) -> bool:
        """Whether the next pack is small enough to be read to its end in one step beside decoding requests."""
        if Kind.PACKED in self._jobs:
            return self._whole(self._jobs[Kind.PACKED])
        first = next(sequence for sequence in unread if self._kind(sequence) is Kind.PACKED)
        return len(first.request.prompt_ids) <= self.pacing.pack

    def _job(self, kind: Kind, unread: Sequence[RequestSequence], beside: bool) -> Job | None:
        """Return the job of a kind, beginning the next if none is under way.

        None: no prompt waits, or rows of the next one are on their way from disk.
        """
        if kind not in self._jobs:
            waiting = [sequence for sequence in unread if self._kind(sequence) is kind]
            chosen = self._pack(waiting, beside) if kind is Kind.PACKED else waiting[:1]
            if not chosen:
                return None
            if kind is not Kind.PACKED:
                if not self._look_up(chosen[0]):
                    return None
                self._prefixes.begin_states(chosen[0].slot, len(chosen[0].request.prompt_ids))
            prompts = [(sequence.slot, sequence.request.prompt_ids) for sequence in chosen]
            on_logits = {sequence.slot: sequence.unscored.take for sequence in chosen if sequence.unscored is not None}
            self._jobs[kind] = Job(self._decoder.prefill(prompts, on_logits), chosen)
        return self._jobs[kind]

    def _look_up(self, sequence: RequestSequence) -> bool:
        """Find out how much of a prompt need not be read. Those of its kind that were admitted before it have been read by now.

        Returns False while rows are loaded from disk.
        """
        if sequence.unscored is not None:  # which are asked of every token
            return True
        request, statistics = sequence.request, sequence.statistics
        prompt = (sequence.slot, sequence.packed_prompt, request.cache_salt)
        if not self._prefixes.loads(sequence.slot):
            self._prefixes.find_more(*prompt, sequence.reserved_tokens, request.session, sequence.reused_before)
        if not self._prefixes.load(*prompt, self._patience, sequence.reused_before):
            return False
        if (prefix := self._prefixes.cache.prefixes.get(sequence.slot)) is not None and not sequence.generated:
            statistics.reused_tokens, statistics.shared_extents = prefix.tokens, prefix.shared
            found = extents_for(max(0, prefix.tokens - self._decoder.cache.config.sink))
            statistics.reused_extents = min(found, statistics.prompt_extents)
        return True

    def _pack(self, waiting: Sequence[RequestSequence], beside: bool) -> list[RequestSequence]:
        """Choose the first of `waiting`, and the requests behind it that fit into a pack with it."""
        limit = self._pack_tokens
        if beside:
            limit = self.pacing.pack if self.work.free else self.pacing.charged_pack
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

    def _has_room(self, kind: Kind, beside: bool, started: float) -> bool:
        """Whether the step may run another unit; the first unit of a step is always allowed."""
        if not self.work.units:
            return True
        if not beside:
            return self.work.token_layers < self._budget and time.perf_counter() - started < IDLE_SECONDS
        job = self._jobs.get(kind)
        if job is not None and self._whole(job):
            return True
        next_unit = self._chunk if job is None else min(self._chunk, job.prefill.tokens)
        return self.pacing.affords(self.work.short, self.work.units + 1, self.work.token_layers + next_unit)

    def _whole(self, job: Job) -> bool:
        """Whether a step beside decoding requests reads the job to its end."""
        return self._kind(job.sequences[0]) is Kind.PACKED and job.prefill.tokens <= self.pacing.pack

    def _advance(self, job: Job, beside: bool) -> list[Reading]:
        """Run one unit of a job; returns the results of the requests that ended with it."""
        try:
            self.work.waited |= any(sequence.unscored is not None for sequence in job.sequences)
            if not beside:
                self._launches.wait()
                self.work.waited = True
            self.work.add(job.prefill.advance(self._chunk))
            if not beside:
                self._launches.add()
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
        self._jobs = {kind: one for kind, one in self._jobs.items() if one is not job}
