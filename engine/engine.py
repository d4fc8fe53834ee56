"""The engine: requests in, tokens out. One thread owns an engine; engine/service.py gives it a thread of its own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path

import torch
from torch import Tensor

from kvseek.core.batch import LATEST
from kvseek.core.config import EngineConfig, read_config
from kvseek.core.cuda import check_alive
from kvseek.core.errors import ConfigError, ErrorCode, LogitsError, SamplingError
from kvseek.core.manifest import verify
from kvseek.core.request import EndedSession, FinishReason, Request, RequestStatistics, StepOutput, StepReport
from kvseek.core.selected_rows import SelectedRows
from kvseek.engine.cache.prefixes.cache import PrefixCache
from kvseek.engine.cache.prefixes.store import PrefixStore
from kvseek.engine.cache.reuse import reuses_prefixes
from kvseek.engine.cache.usage import CacheUsage, UsageMeter
from kvseek.engine.draws.sampling import (
    Drawn,
    Sampler,
    Verification,
    greedy_token,
    overflow_remedy,
)
from kvseek.engine.leading.leader import load_decoder
from kvseek.engine.loading.prefixes import DiskSettings, check_disk, open_prefixes
from kvseek.engine.model.decoder import Decoder
from kvseek.engine.parallel.nodes import ONE_NODE, Nodes
from kvseek.engine.schedule.guides import Guides
from kvseek.engine.schedule.reading import PromptReader, Reading, Work
from kvseek.engine.schedule.scheduler import RequestQueue, Scheduler
from kvseek.engine.schedule.sequence import PromptScores, RequestSequence
from kvseek.engine.speculation import Drafter, NgramDrafter, Speculation, StepCosts, check_speculation
from kvseek.engine.tokenizer import Tokenizer
from kvseek.plugins.registry import method_traits

from .decode_step import InFlightStep, StepRequests
from .served_requests import check_served

MAX_NUM_TOKENS = 8192
NO_DISK = DiskSettings()
MOST_STEPS = 8  # that are launched at once
# That they take together: whoever comes or ends meanwhile waits for one launch or two.
LAUNCH_SECONDS = 0.004
SOUND_ENDS = (FinishReason.END_ID, FinishReason.STOP_WORD, FinishReason.LENGTH)


class Engine:
    """Continuous batching over one decoder: each `step` reads parts of prompts and runs one decode step.

    One thread calls `step` and `cancel`. Methods that other threads may call say so.

    Parameters
    ----------
    max_queue_size : int, optional
        Most requests that may wait for a slot; None: no bound.
    max_num_tokens : int
        Most prompt tokens that a step reads.
    store : PrefixStore, optional
        Prefixes on disk.
    speculation : Speculation, optional
        How drafts are made; None: a step has one token a request.

    Attributes
    ----------
    make_drafter : callable
        Makes the drafter of a request that begins.
    step_costs : StepCosts
        What steps have taken by their number of rows.
    on_step : callable or None
        Called with the StepReport of each step, by the thread that runs it.
    unsound, unsound_in_a_row : int
        Requests that ended because their logits were not finite: all, and those since one last ended well.

    Raises
    ------
    ConfigError
        If a number is below 1.
    """

    def __init__(
        self,
        config: EngineConfig,
        decoder: Decoder,
        tokenizer: Tokenizer,
        max_queue_size: int | None = None,
        max_num_tokens: int = MAX_NUM_TOKENS,
        store: PrefixStore | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        if max_num_tokens < 1:
            raise ConfigError(f"max_num_tokens = {max_num_tokens}: must be >= 1; {MAX_NUM_TOKENS} is the default")
        self.config, self.tokenizer = config, tokenizer
        self.decoder, self._cache = decoder, decoder.cache
        self._queue = RequestQueue(max_queue_size)
        retrieval, enabled = decoder.retrieval, reuses_prefixes(config)
        self._prefixes = PrefixCache(
            decoder.prefix_rows(),
            method_traits(config),
            enabled=enabled,
            selects=retrieval.selects,
            reach=config.model.short_reach,
            store=store,
        )
        self._reader = PromptReader(decoder, self._prefixes, max_num_tokens)
        self._scheduler = Scheduler(self._prefixes, config.max_batch_size, self._queue, self._reader.drop)
        self._guides = Guides(tokenizer, config)
        self._ids = itertools.count(1)
        self._token_layers = 0  # tokens × layers that all steps have read
        self._report = StepReport()
        self._meter = UsageMeter(self._prefixes, decoder.retrieval.hot_rows, config.tp_size)
        self.unsound, self.unsound_in_a_row = 0, 0
        self.make_drafter: Callable[[Request], Drafter] = lambda request: NgramDrafter(request.prompt_ids)
        self._speculation, self.step_costs = speculation, StepCosts()
        if speculation is not None:
            decoder.prepare_to_verify()
        self._drafted = self._accepted = 0  # tokens of drafts since the last report
        self._in_flight: InFlightStep | None = None  # the decode step that has been launched and not collected
        self._decoded = 0  # tokens of the decode steps that have been collected since the last report
        self._collected_at = 0.0  # when a decode step was last collected
        self._refresh_seconds = 0.0  # upkeep in the last decode step that was collected; 0 if it failed
        self.on_step: Callable[[StepReport], None] | None = None

    @classmethod
    def load(
        cls,
        directory: str | Path,
        threads: int | None = None,
        max_queue_size: int | None = None,
        max_num_tokens: int = MAX_NUM_TOKENS,
        disk: DiskSettings = NO_DISK,
        nodes: Nodes = ONE_NODE,
        speculation: Speculation | None = None,
    ) -> Engine:
        """Load an engine directory that `kvseek build` wrote, after checking its checksums.

        Parameters
        ----------
        threads : int, optional
            CPU threads of the whole process (torch.set_num_threads); None leaves torch's choice.
        max_queue_size, max_num_tokens
            See Engine.
        disk : DiskSettings
            Where prefixes are kept on disk; `close` the engine then.
        nodes : Nodes
            The hosts of an engine's ranks; with several, loading waits for the others.
        speculation : Speculation, optional
            See Engine.

        Raises
        ------
        EngineDirectoryError, ConfigError, KernelError, CapacityError
        """
        if threads is not None:
            torch.set_num_threads(threads)
        directory = Path(directory)
        verify(directory)
        config = read_config(directory)
        check_disk(config, disk)
        check_speculation(config, speculation)
        tokenizer, decoder = Tokenizer(directory), load_decoder(directory, config, nodes)
        store = open_prefixes(directory, config, decoder.cache, disk)
        try:
            return cls(config, decoder, tokenizer, max_queue_size, max_num_tokens, store, speculation)
        except ConfigError:
            if store is not None:
                store.close()
            raise

    def close(self) -> None:
        """Write to disk what ended requests have left, for some seconds, and end the processes of other ranks.

        May be called again; there must be no other call.
        """
        try:
            self.settle()  # requests that have ended leave their rows
        finally:
            if self._prefixes.store is not None:
                self._prefixes.store.close()
            self.decoder.close()

    @property
    def index_bytes_per_token(self) -> float:
        """Bytes that the method's indexes of all layers and KV heads keep per retrieval token."""
        return self.config.tp_size * sum(index.bytes_per_token for index in self.decoder.retrieval.indexes)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do. Safe from any thread, like `waiting`, `running` and `step_report`."""
        return bool(self._queue.has_ready or self.running or self._in_flight)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot, those that have been preempted included."""
        return len(self._queue)

    @property
    def preemptions(self) -> int:
        """How often a running request has made room for another one since the start."""
        return self._scheduler.preemptions

    @property
    def running(self) -> int:
        """Requests with a slot."""
        return len(self._scheduler.running)

    @property
    def step_report(self) -> StepReport:
        """Report of the last step."""
        return self._report

    @property
    def cache_usage(self) -> CacheUsage:
        """The present use of the row pool. Safe from any thread."""
        return self._meter.usage()

    def fitted(self, request: Request) -> Request:
        """Lower a default `max_tokens` to what the row pool has room for, so that no default is refused for want of memory."""
        if not request.max_tokens_by_default:
            return request
        room = self._cache.most_tokens(self._cache.extents.capacity) - len(request.prompt_ids)
        return replace(request, max_tokens=min(request.max_tokens, max(1, room)))

    def check(self, request: Request) -> Request:
        """Raise RequestError or CapacityError if this engine can never serve the request; returns it `fitted`.

        Safe from any thread.
        """
        request = self.fitted(request)
        request.validate(self.config)
        check_served(request, self.config, self.decoder, reuses=self._prefixes.enabled)
        return request

    def prepare(self, request: Request) -> RequestSequence:
        """Make the sequence of a request, for `enqueue`; raises as `check`. Safe from any thread."""
        request = self.check(request)
        sampler, request_id = Sampler(request, self.config.model.vocab_size), next(self._ids)
        statistics = RequestStatistics(len(request.prompt_ids), time.perf_counter())
        scores = PromptScores(request_id, request) if request.sampling.scores_prompt else None
        asked = request.sampling.return_selected_rows
        most = len(request.prompt_ids) + request.max_tokens
        report = None if asked is None else asked.fitted(self.config, most)
        return RequestSequence(request_id, request, sampler, statistics, scores=scores, row_report=report)

    def enqueue(self, sequence: RequestSequence, whole: bool = False) -> None:
        """Put a prepared request into the queue; raises QueueFullError. Safe from any thread.

        One that is not ready starts only after `compile_guide`. `whole`: the last output has all tokens, and no other has one;
        but not if something is returned with each token.
        """
        sequence.whole = whole and sequence.row_report is None and not sequence.request.sampling.scores_tokens
        sequence.statistics.submitted_at = time.perf_counter()
        self._queue.push(sequence, self._scheduler.free_slots)

    def compile_guide(self, sequence: RequestSequence) -> StepOutput | None:
        """Compile the guide of a waiting request, which may take a second, and let the request start. Safe from any thread.

        Returns the request's only output if that fails; None if it does not fail, or the request has ended meanwhile.
        """
        guide = sequence.request.sampling.guide
        if guide is None or sequence not in self._queue:
            return None
        try:
            sequence.sampler.follow(self._guides.matcher(guide))
        except Exception as error:  # what one client sends must not end the thread that compiles the guides of all
            return None if self._queue.remove(sequence.request_id) is None else sequence.failed(error)
        self._queue.release(sequence)
        return None

    def load_vocabulary(self) -> None:
        """Load what guides need, which would hold up other requests later; raises as Guides.load_vocabulary."""
        self._guides.load_vocabulary()

    def submit(self, request: Request) -> int:
        """Queue a request and return its id; raises as `check`, QueueFullError, and RequestError if its guide cannot be compiled.

        Safe from any thread.
        """
        sequence = self.prepare(request)
        if request.sampling.guide is not None:
            sequence.sampler.follow(self._guides.matcher(request.sampling.guide))
        self.enqueue(sequence)
        return sequence.request_id

    def cancel_waiting(self, request_id: int, reason: FinishReason = FinishReason.CANCELLED) -> StepOutput | None:
        """End a request that waits and return its last output; None if it does not wait. Safe from any thread."""
        sequence = self._queue.remove(request_id)
        return None if sequence is None else sequence.ended(reason)

    def cancel(self, request_id: int, reason: FinishReason = FinishReason.CANCELLED) -> StepOutput | None:
        """End a request now and return its last output; None if it has ended already."""
        waiting = self.cancel_waiting(request_id, reason)
        running = next((s for s in self._scheduler.running if s.request_id == request_id), None)
        return waiting if running is None else self._end(running, running.ended(reason))

    def end_session(self, session_id: str, cache_salt: str | None = None) -> EndedSession | None:
        """Forget a session and free what only it has used; None if it is not known.

        Its requests that have not ended go on, and what only they use is freed when they end.
        """
        ended = self._prefixes.end_session(cache_salt, session_id)
        leaving = () if self._in_flight is None else (sequence for sequence, _ in self._in_flight.leaving)
        for sequence in (*self._queue.sequences(), *self._scheduler.running, *leaving):
            request = sequence.request
            if request.session is not None and (request.cache_salt, request.session.id) == (cache_salt, session_id):
                sequence.ends_session, ended = True, ended or EndedSession(0, 0)
        return ended

    def expire(self) -> list[StepOutput]:
        """End the waiting requests whose time limit has passed, and return their last outputs. Safe from any thread."""
        now = time.perf_counter()
        return [sequence.expired(now) for sequence in self._queue.expired(now)]

    def next_deadline(self) -> float | None:
        """Return when the next waiting request expires, in seconds of time.perf_counter, or None. Safe from any thread."""
        return self._queue.next_deadline()

    def step(self) -> list[StepOutput]:
        """Admit the requests that fit, read parts of prompts and run one decode step; returns the outputs in order.

        Where the decoder runs ahead, the step is launched, and the outputs are those of the step before it.
        """
        started = time.perf_counter()
        outputs = [*self.expire(), *self._time_out()]
        if self._in_flight is not None and self._in_flight.leaving and self._queue.has_ready:
            outputs += self.settle()  # whoever is admitted finds the slots and rows that ended requests leave
        # Running requests come before waiting ones, also where both want the last extents.
        outputs += [*self._grow(), *self._admit()]
        decoding, begun = self._scheduler.decoding(), time.perf_counter()
        beside = decoding or ([] if self._in_flight is None else self._in_flight.requests.sequences)
        outputs += self._read(beside)
        outputs += self._decode(decoding, begun)
        self._report_step(started)
        if self._prefixes.store is not None:
            self._prefixes.store.share_cores(bool(self.running), bool(self._scheduler.decoding()))
        return outputs

    def settle(self) -> list[StepOutput]:
        """Wait for the decode step that has been launched ahead, if there is one, and return its outputs.

        The slots of all requests that have ended are free then, and no request has a token that the host does not know.
        """
        step, self._in_flight = self._in_flight, None
        return [] if step is None else self._collect(step)

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        """Run requests to their ends and return the token ids of each; raises RuntimeError if one fails."""
        tokens: dict[int, list[int]] = {self.submit(request): [] for request in requests}
        while self.has_work:
            for output in self.step():
                if output.finish_reason is FinishReason.ERROR:
                    raise RuntimeError(output.error)
                if output.token_id is not None:
                    tokens[output.request_id].append(output.token_id)
        return list(tokens.values())

    def _time_out(self) -> list[StepOutput]:
        """End running requests whose time limit has passed, with the tokens that they have."""
        now = time.perf_counter()
        limited = [s for s in self._scheduler.running if s.request.timeout_seconds is not None]
        late = [s for s in limited if s.deadline is not None and s.deadline <= now]
        return [self._end(sequence, sequence.ended(FinishReason.TIMEOUT)) for sequence in late]

    def _grow(self) -> list[StepOutput]:
        """Give decoding requests the extents that their next step needs.

        Returns the last outputs of those that get none, and the outputs of a step that had to be collected for that.
        """
        ends: list[StepOutput] = []
        for sequence in self._scheduler.short():
            if not sequence.reading and not self._scheduler.has_room(sequence):  # who makes room must know its tokens
                ends += self.settle()
            if not sequence.finished and self._scheduler.make_room(sequence):
                try:
                    self._scheduler.grow(sequence)
                except Exception as error:  # one request's growth must not take the others down
                    ends.append(self._fail(sequence, error, ErrorCode.INTERNAL))
        return ends

    def _admit(self) -> list[StepOutput]:
        """Admit the requests that fit; returns the last outputs of requests whose admission failed."""
        ends: list[StepOutput] = []
        while (sequence := self._scheduler.admit()) is not None:
            try:
                self._scheduler.open(sequence)
                if sequence.drafter is None and self._may_draft(sequence):
                    sequence.drafter = self.make_drafter(sequence.request)
                if sequence.resumes:
                    self.decoder.resume(sequence.slot)
                    self._scheduler.resumed(sequence)
            except Exception as error:  # one request's admission must not take the others down
                ends.append(self._fail(sequence, error, ErrorCode.INTERNAL))
        return ends

    def _read(self, beside: Sequence[RequestSequence]) -> list[StepOutput]:
        """Read parts of prompts beside requests that decode."""
        unread, outputs = self._scheduler.unread(), list[StepOutput]()
        watched = bool(unread) and any(not sequence.whole for sequence in beside)
        readings = self._reader.read(unread, bool(beside), watched)
        firsts = self._draw_first(readings)
        for reading in readings:
            outputs += self._outputs_of(reading, firsts.get(reading.sequence.request_id))
        return outputs

    def _draw_first(self, readings: Sequence[Reading]) -> dict[int, Drawn | int]:
        """Draw the first tokens of the requests whose prompts have been read, by their ids."""
        rows, samplers, drawn = list[Tensor](), dict[int, Sampler](), dict[int, Drawn | int]()
        for one in readings:
            sequence = one.sequence
            if one.logits is None or sequence.generated or sequence.request.max_tokens == 0:
                continue
            if sequence.sampler.greedy:
                drawn[sequence.request_id] = greedy_token(one.logits)
            else:
                rows.append(one.logits)
                samplers[sequence.request_id] = sequence.sampler
        if rows:
            try:
                found = self.decoder.draw(torch.stack(rows), list(samplers.values()))
            except Exception as error:  # such as no memory for what the sampling keeps
                found = [Drawn(error=error) for _ in rows]
            drawn.update(zip(samplers, found, strict=True))
        return drawn

    def _outputs_of(self, reading: Reading, first: Drawn | int | None) -> list[StepOutput]:
        sequence = reading.sequence
        if reading.error is not None:
            return [self._fail(sequence, reading.error)]
        if reading.logits is not None:
            self._scheduler.begin_steps(sequence)
        if sequence.generated:  # read again after a preemption: the client has got all that follows from it
            return []
        sequence.progress = max(sequence.progress, reading.progress)
        scores = [] if sequence.scores is None else sequence.scores.pop(sequence.progress)
        outputs = scores
        if not scores and not sequence.whole:
            outputs = [StepOutput(sequence.request_id, prefill_progress=sequence.progress)]
        if reading.logits is not None and sequence.request.max_tokens == 0:
            outputs.append(self._end(sequence, sequence.ended(FinishReason.LENGTH)))
        elif first is not None:
            outputs += self._take_token(sequence, first, 0, 0.0, time.perf_counter())
        return outputs

    def _decode(self, decoding: list[RequestSequence], begun: float) -> list[StepOutput]:
        """Launch the next decode step, and then collect the one before it.

        A request that the one before ends is in the next one all the same: its row there is computed in vain. What a request
        with a guide or bad words may draw next depends on the token before, so a step with one is launched later.
        """
        outputs, failure = list[StepOutput](), None
        if any([s.sampler.reads_tokens and s.sampler.pending for s in decoding]):  # noqa: C419  half a generator's time
            outputs += self.settle()
        decoding = [s for s in decoding if not s.finished and s.sampler.number < s.request.max_tokens]
        drafts = self._draft(decoding)
        if any(drafts) and self._in_flight is not None:  # what follows the tokens that are under way is another matter
            outputs += self.settle()
            decoding = [s for s in decoding if not s.finished]
            drafts = self._draft(decoding)
        if any(drafts):
            return outputs + self._verify(decoding, drafts, begun)
        before, self._in_flight = self._in_flight, None
        if decoding:
            try:
                self._in_flight = self._launch(decoding, begun, before)
            except Exception as error:  # rows and indexes of its requests are in doubt, so these end; others go on
                failure = error
        if before is not None:
            outputs += self._collect(before)
        if failure is not None:
            self._decoded, self._refresh_seconds = self._decoded + len(decoding), 0.0
            outputs += [self._fail(sequence, failure) for sequence in decoding if not sequence.finished]
        elif not self.decoder.runs_ahead:
            outputs += self.settle()
        return outputs

    def _launch(self, sequences: list[RequestSequence], begun: float, before: InFlightStep | None) -> InFlightStep:
        """Launch a step; `before` is the one that is in flight."""
        if before is not None and before.requests.sequences == sequences and not before.requests.replaying:
            requests, tokens = before.requests, [LATEST] * len(sequences)
        else:
            requests = StepRequests.of(sequences)
            tokens = [LATEST if s.sampler.pending else s.next_input for s in sequences]
        slots, steps = requests.slots, self._steps_at_once(requests)
        launched = self.decoder.launch(tokens, slots, requests.samplers, requests.wanted, steps)
        self._scheduler.note_steps(steps)
        for sequence in requests.replaying:
            sequence.replay -= 1
        for sampler in requests.drawn_for:
            sampler.pending += steps
        cached, lengths = self._cache.tokens, self._cache.lengths
        of_each = [cached[slot] for slot in slots], [lengths[slot] for slot in slots]
        refresh_seconds = self.decoder.retrieval.refresh_seconds
        return InFlightStep(launched, requests, steps, *of_each, refresh_seconds, begun, self._reader.work)

    def _steps_at_once(self, requests: StepRequests) -> int:
        """Decide how many steps are launched at once: more than one where no step needs the host, and no prompt waits."""
        if not (requests.quiet and self.decoder.runs_ahead) or self._reader.work.units or self._scheduler.unread():
            return 1
        most = min(MOST_STEPS, int(self._reader.pacing.steps_in(LAUNCH_SECONDS)), self._scheduler.most_steps())
        if most <= 1:
            return 1
        left = min([s.request.max_tokens - s.sampler.number for s in requests.sequences])
        return min(most, left, min([self._cache.alike_steps(slot) for slot in requests.slots]))

    def _may_draft(self, sequence: RequestSequence) -> bool:
        """Whether steps may verify drafts of a request."""
        request = sequence.request
        wanted = request.speculate and sequence.row_report is None and request.max_tokens > 1
        return self._speculation is not None and wanted

    def _draft(self, sequences: list[RequestSequence]) -> list[list[int]]:
        """Guess the next tokens of requests, as many of each as are worth a step's time; engine/speculation.py says how."""
        if self._speculation is None or self.decoder.most_rows <= len(sequences):
            return []
        chances = list[list[float]]()
        for sequence in sequences:
            left, room = sequence.request.max_tokens - sequence.sampler.number, self._cache.room_in_ring(sequence.slot)
            most = min(self._speculation.num_speculative_tokens, left - 1, room - 1)
            drafter = None if sequence.replay or most < 1 else sequence.drafter
            if drafter is not None:
                drafter.follow(sequence.generated)
            chances.append([] if drafter is None else drafter.chances(most))
        counts = self.step_costs.choose(chances, self.decoder.most_rows)
        each = zip(sequences, counts, strict=True)
        return [s.drafter.draft(count) if s.drafter is not None and count else [] for s, count in each]

    def _verify(self, sequences: list[RequestSequence], drafts: list[list[int]], begun: float) -> list[StepOutput]:
        """Run a step whose rows are each request's next token and its draft, and take tokens as far as the drafts agree."""
        requests, outputs = StepRequests.of(sequences), list[StepOutput]()
        counts, taken = [1 + len(draft) for draft in drafts], [int(not drawing) for drawing in requests.drawing]
        tokens = [token for s, draft in zip(sequences, drafts, strict=True) for token in (s.next_input, *draft)]
        slots = [slot for slot, count in zip(requests.slots, counts, strict=True) for _ in range(count)]
        self._refresh_seconds = 0.0
        try:
            step = self.decoder.verify(tokens, slots, requests.wanted)
            self._scheduler.note_steps(max(counts))
            for sequence in requests.replaying:
                sequence.replay -= 1
            for output in self._take_verified(requests, drafts, step, taken):
                outputs.append(output)
            on = [not sequence.finished for sequence in sequences]
            surplus = [count - own for count, own in zip(counts, taken, strict=True)]
            self.decoder.accept([*compress(requests.slots, on)], [*compress(surplus, on)])
        except Exception as error:  # rows and indexes of its requests are in doubt, so these end; others go on
            self._decoded += len(sequences)
            return outputs + [self._fail(sequence, error) for sequence in sequences if not sequence.finished]
        self._refresh_seconds = self.decoder.retrieval.refresh_seconds
        self._decoded += sum(taken)
        for sequence, draft, own in zip(sequences, drafts, taken, strict=True):
            accepted = min(own, len(draft) + 1) - 1
            sequence.statistics.record_draft(len(draft), accepted)
            self._drafted, self._accepted = self._drafted + len(draft), self._accepted + accepted
        self._note_time(self._reader.work, begun, len(slots))
        return outputs

    def _take_verified(
        self, requests: StepRequests, drafts: list[list[int]], step: Verification, taken: list[int]
    ) -> Iterator[StepOutput]:
        """Draw a token behind each row that follows from what was drawn; `taken` counts the rows by request."""
        firsts = [0, *itertools.accumulate(1 + len(draft) for draft in drafts)]
        slots, lengths = requests.slots, self._cache.lengths
        before = [
            self._cache.tokens[slot] - len(draft) - 1 for slot, draft in zip(slots, drafts, strict=True)
        ]  # that each had in the cache
        rows = zip(slots, before, drafts, strict=True)
        cached = [known + number for _, known, draft in rows for number in range(1, len(draft) + 2)]
        inside = sum(cached) - sum(lengths[slot] * (1 + len(draft)) for slot, draft in zip(slots, drafts, strict=True))
        self._meter.tokens += sum(step.attended) - inside
        going = [number for number, drawing in enumerate(requests.drawing) if drawing]
        selected: Mapping[int, SelectedRows] = {}
        while going:
            of_each = [firsts[number] + taken[number] for number in going]
            drawn = step.draw(of_each, [requests.samplers[number] for number in going])
            if requests.wanted and not selected:
                selected = step.selected_rows()
            follows, now = list[int](), time.perf_counter()
            for number, row, one in zip(going, of_each, drawn, strict=True):
                sequence, draft, place = requests.sequences[number], drafts[number], taken[number]
                taken[number] += 1
                yield from self._take_token(
                    sequence, one, cached[row], step.attended[row], now, selected.get(sequence.slot)
                )
                if not sequence.finished and place < len(draft) and sequence.generated[-1] == draft[place]:
                    follows.append(number)
            going = follows

    def _collect(self, step: InFlightStep) -> list[StepOutput]:
        """Wait for a step's tokens, take them, and close the slots that had to stay until the step had ended."""
        requests, outputs = step.requests, list[StepOutput]()
        for sampler in requests.drawn_for:
            sampler.pending -= step.steps
        live = [not sequence.finished for sequence in requests.sequences]
        self._decoded += step.steps * sum(live)
        self._refresh_seconds = 0.0
        try:
            drawn = step.launched.collect()
        except Exception as error:
            outputs += [self._fail(sequence, error) for sequence in compress(requests.sequences, live)]
        else:
            self._refresh_seconds, now = step.refresh_seconds, time.perf_counter()
            read, selected = step.launched.attended, step.launched.selected_rows()
            outside = sum(compress(read, live)) - sum(compress(step.cached, live)) + sum(compress(step.lengths, live))
            self._meter.tokens += step.steps * outside
            left = live
            if requests.replaying:
                left = [on and draws for on, draws in zip(live, requests.drawing, strict=True)]
            if any(requests.ends):
                left = step.take_unseen(drawn, left, now)
            for number, tokens in enumerate(drawn if any(left) else (), 1 - step.steps):
                of_each = zip(requests.sequences, tokens, step.cached, read, strict=True)
                for sequence, token, cached, attended in compress(of_each, left):
                    if sequence.finished:  # by a step before
                        self._decoded -= 1
                    else:
                        rows = selected.get(sequence.slot) if selected else None
                        outputs += self._take_token(sequence, token, cached + number, attended + number, now, rows)
        for sequence, keep in step.leaving:
            self._scheduler.close(sequence, keep)
        self._note_time(step.work, step.begun, len(requests.slots), step.steps)
        return outputs

    def _note_time(self, work: Work, begun: float, rows: int, steps: int = 1) -> None:
        """Take note that a step of so many rows has been collected, or several that were launched at once."""
        begun = max(begun, self._collected_at)
        self._reader.note_step(work, begun, steps)
        self._collected_at = time.perf_counter()
        if self._speculation is not None and not work.units:
            self.step_costs.record(rows, (self._collected_at - begun) / steps)

    def _take_token(
        self,
        sequence: RequestSequence,
        drawn: Drawn | int,
        cached: int,
        attended: float,
        now: float,
        selected: SelectedRows | None = None,
    ) -> Sequence[StepOutput]:
        """Take the token that was drawn, and end the sequence if it is the last; arguments as RequestStatistics.record_tokens.

        Returns an output, unless nobody wants one before the end.
        """
        try:
            token = sequence.sampler.take(drawn)
        except SamplingError as error:
            return (self._fail(sequence, error, ErrorCode.INVALID),)
        except Exception as error:  # the model's numbers, such as NaN, allow no token
            return (self._fail(sequence, error),)
        output = sequence.taken(token, drawn, cached, attended, now, selected)
        if output is None:
            return ()
        return (output if output.finish_reason is None else self._end(sequence, output),)

    def _report_step(self, started: float) -> None:
        layers, extents = self.config.model.num_layers, self._cache.extents
        before = self._token_layers // layers
        self._token_layers += self._reader.work.token_layers
        decode_batch, self._decoded = self._decoded, 0
        drafted, accepted, self._drafted, self._accepted = self._drafted, self._accepted, 0, 0
        self._report = StepReport(
            number=self._report.number + 1,
            seconds=time.perf_counter() - started,
            decode_batch=decode_batch,
            prefill_tokens=self._token_layers // layers - before,
            waiting=self.waiting,
            running=self.running,
            extents_used=extents.used,
            extents_kept=extents.idle,
            extents_free=extents.free,
            refresh_seconds=self._refresh_seconds if decode_batch else 0.0,
            drafted_tokens=drafted,
            accepted_tokens=accepted,
        )
        if self.on_step is not None:
            self.on_step(self._report)

    def _fail(self, sequence: RequestSequence, error: Exception, code: ErrorCode | None = None) -> StepOutput:
        """End a request by an error of a step. Without `code` no client can have caused it, as `check` let the request in.

        Unless memory was short, what the request has used may be wrong then, and is not kept for others. If the device has failed
        for good, this raises, and the engine cannot go on.
        """
        if isinstance(error, LogitsError):
            error = LogitsError(f"{error}; {overflow_remedy(self.config.dtype)}")
            self.unsound, self.unsound_in_a_row = self.unsound + 1, self.unsound_in_a_row + 1
        elif not isinstance(error, SamplingError):
            check_alive(self._cache.window.device)
        if code is None and isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            code = ErrorCode.UNAVAILABLE
        elif code is None:
            code = ErrorCode.INTERNAL
            self._prefixes.discard(sequence.slot)
        return self._end(sequence, sequence.failed(error, code))

    def _end(self, sequence: RequestSequence, output: StepOutput) -> StepOutput:
        """Free the slot and extents of a running sequence. If that raises, as after a CUDA error, the engine cannot go on.

        They are freed when the step that has been launched with them has ended.
        """
        if output.finish_reason in SOUND_ENDS:
            self.unsound_in_a_row = 0
        self._reader.drop(sequence)
        self._scheduler.remove(sequence)
        keep = output.finish_reason is not FinishReason.ERROR
        if self._in_flight is not None and sequence in self._in_flight.requests.sequences:
            self._in_flight.leaving.append((sequence, keep))
        else:
            self._scheduler.close(sequence, keep)
        return output
