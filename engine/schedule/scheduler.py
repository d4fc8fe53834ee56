"""Decides which requests wait and which run: keeps the queue, gives out slots, admits by free extents, and preempts.

A request is admitted with the extents that it needs now, and gets more while it decodes. When there is none, the last of the
running requests, in the order of the queue, makes room: the youngest of the lowest priority. It leaves its rows as a kept prefix
and waits again, at its old place in the queue, until it goes on where it was.

- The first of the running requests is never preempted, so it ends, and then the next is the first.
- Nobody is preempted more than MOST_PREEMPTIONS times. Each time a request waits for more room than before, at last for all that
  it may ever need: then it needs nobody's room any more, and those before it may have to wait a few steps until it ends.
- Preemptions make room for running requests, never for one that waits.

**The queue.** Each request has a fixed key: the second in which it arrived, less LEVEL_SECONDS for each level of its priority.
The smallest key starts first. Requests of one priority are therefore served in the order of their arrival, and a request
is overtaken only by requests that arrive within LEVEL_SECONDS for each level that their priority is above its own: at
most 255 seconds after it. So nobody starves, whatever arrives later, and no key changes while a request waits.

The head of the queue is never passed by: if it does not fit yet, those behind it wait too, so that a large request is
not kept out for ever by small ones.

A request whose guide has not been compiled waits like the others, but has no place in the order until `release` gives it
its place, so that nobody waits for the guide of another.
"""

from __future__ import annotations

import bisect
import heapq
import threading
import time
from collections.abc import Callable

from kvseek.core.errors import ConfigError, QueueFullError
from kvseek.engine.cache.prefixes.cache import PrefixCache
from kvseek.engine.schedule.sequence import RequestSequence

LEVEL_SECONDS = 1.0  # seconds by which one level of priority puts a request ahead
MOST_PREEMPTIONS = 3  # of a request; after so many it is admitted with all extents that it may ever need, and stays
ROOM_FACTOR = 4  # by which each preemption raises the tokens that a request must have room for at its next admission
SPARE_SHARE = 100  # one extent in so many, at least one, stays free at an admission, for others that may grow

Key = tuple[float, int]


class RequestQueue:
    """Waiting sequences in the order in which they start. Every method may be called from any thread.

    Parameters
    ----------
    max_size : int, optional
        Most sequences that may wait; None: no bound.

    Raises
    ------
    ConfigError
        If `max_size` is below 1.
    """

    def __init__(self, max_size: int | None = None) -> None:
        if max_size is not None and max_size < 1:
            raise ConfigError(f"max_queue_size = {max_size}: must be >= 1; leave it out for no bound")
        self.max_size = max_size
        self._lock = threading.Lock()
        self._sequences: dict[int, RequestSequence] = {}
        self._order: list[Key] = []  # of the sequences that are ready, ascending
        self._deadlines: list[tuple[float, int]] = []  # a heap; may name sequences that have left
        self._returned: set[int] = set()  # ids of those that have run before

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: RequestSequence) -> bool:
        return sequence.request_id in self._sequences

    def sequences(self) -> list[RequestSequence]:
        """List the sequences that wait, in no order."""
        with self._lock:
            return list(self._sequences.values())

    @property
    def has_ready(self) -> bool:
        """Whether a sequence waits that may start."""
        return bool(self._order)

    def push(self, sequence: RequestSequence, free_slots: int = 0) -> None:
        """Add a sequence; raises QueueFullError if `max_size` sequences wait.

        Every request is in the queue until the next step; as many requests as there are free slots do not count as waiting.
        Slots that no request can get for want of extents are not free (Scheduler.free_slots).
        """
        with self._lock:
            waiting = len(self._sequences) - len(self._returned) - free_slots
            if self.max_size is not None and waiting >= self.max_size:
                raise QueueFullError(
                    f"{waiting} requests wait for a slot: at most max_queue_size = {self.max_size} may; "
                    "send the request again later, or serve with a larger --max_queue_size"
                )
            self._add(sequence)

    def put_back(self, sequence: RequestSequence) -> None:
        """Add a sequence that has been preempted, at its old place: before all that have come later with its priority.

        It does not count against `max_size`.
        """
        with self._lock:
            self._add(sequence)
            self._returned.add(sequence.request_id)

    def release(self, sequence: RequestSequence) -> None:
        """Let a sequence start that was not ready when it was pushed; does nothing if it has left the queue."""
        with self._lock:
            if sequence.request_id in self._sequences:
                bisect.insort(self._order, order(sequence))

    def remove(self, request_id: int) -> RequestSequence | None:
        """Take a sequence out, wherever it stands in the queue; None if it does not wait."""
        with self._lock:
            return self._remove(request_id)

    def pop(self, fits: Callable[[RequestSequence], bool]) -> RequestSequence | None:
        """Take the head out if it fits; None if it does not fit or none is ready. `fits` must not call the queue."""
        with self._lock:
            if not self._order:
                return None
            head = self._sequences[self._order[0][1]]
            return self._remove(head.request_id) if fits(head) else None

    def expired(self, now: float) -> list[RequestSequence]:
        """Take out the sequences whose deadline has passed; `now` in seconds of time.perf_counter."""
        found = []
        with self._lock:
            while self._deadlines and self._deadlines[0][0] <= now:
                _, request_id = heapq.heappop(self._deadlines)
                sequence = self._remove(request_id)
                if sequence is not None:
                    found.append(sequence)
        return found

    def next_deadline(self) -> float | None:
        """Return when the next waiting sequence expires, in seconds of time.perf_counter; None if none has a time limit."""
        with self._lock:
            while self._deadlines and self._deadlines[0][1] not in self._sequences:
                heapq.heappop(self._deadlines)
            return self._deadlines[0][0] if self._deadlines else None

    def _add(self, sequence: RequestSequence) -> None:
        self._sequences[sequence.request_id] = sequence
        if sequence.ready:
            bisect.insort(self._order, order(sequence))
        if sequence.deadline is not None:
            heapq.heappush(self._deadlines, (sequence.deadline, sequence.request_id))

    def _remove(self, request_id: int) -> RequestSequence | None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._returned.discard(request_id)
            place = bisect.bisect_left(self._order, order(sequence))
            if self._order[place : place + 1] == [order(sequence)]:  # else it was not ready
                del self._order[place]
        return sequence


def order(sequence: RequestSequence) -> Key:
    """Return the key of a sequence: what has the smaller one starts first, and is preempted last."""
    ahead = sequence.request.priority * LEVEL_SECONDS
    return sequence.statistics.submitted_at - ahead, sequence.request_id


class Scheduler:
    """The running sequences.

    Everything but the queue belongs to the engine's thread; other threads may look at `free_slots` and at the length of
    `running`.

    Parameters
    ----------
    leave : callable
        Called with a running sequence before its slot is closed for another one.

    Attributes
    ----------
    preemptions : int
        Since the start.
    """

    def __init__(
        self, prefixes: PrefixCache, slots: int, queue: RequestQueue, leave: Callable[[RequestSequence], None]
    ) -> None:
        self._prefixes, self._cache, self._leave = prefixes, prefixes.cache, leave
        self._free_slots = list(range(slots - 1, -1, -1))
        self.queue = queue
        self._head_waits = False  # whether the queue's head waits for extents
        self.running: list[RequestSequence] = []
        self.preemptions = 0
        self._steps_with_room = 0  # next calls of `short` for which nobody's extents have to be looked at
        self._refused: tuple[int, int, tuple[int, int, int]] | None = (
            None  # the state in which the head did not fit last
        )
        self._spare = max(1, self._cache.extents.capacity // SPARE_SHARE)

    @property
    def free_slots(self) -> int:
        """Slots that the next step can probably give away: none while the queue's head waits for extents."""
        return 0 if self._head_waits else len(self._free_slots)

    def admit(self) -> RequestSequence | None:
        """Take the head of the queue and give it a slot; None if it has to wait. Call `open` next."""
        if not self._free_slots:
            return None
        head_waits = False

        def fits(head: RequestSequence) -> bool:
            nonlocal head_waits
            # A long sequence is not looked up again in each step, while it waits and nothing changes.
            state = head.request_id, len(self.running), self._cache.extents.counts
            head_waits = (bool(self.running) and state == self._refused) or not self._choose_prefix(head)
            self._refused = state if head_waits else None
            return not head_waits

        sequence = self.queue.pop(fits)
        self._head_waits = head_waits
        if sequence is not None:
            sequence.slot = self._free_slots.pop()
            sequence.statistics.started_at = sequence.statistics.started_at or time.perf_counter()
            self.running.append(sequence)
        return sequence

    def open(self, sequence: RequestSequence) -> None:
        """Give a sequence that was admitted its extents; the cache's errors pass through."""
        self._prefixes.open(sequence.slot, sequence.reserved_tokens, sequence.prefix)
        sequence.prefix = None  # its extents are the slot's now
        self._count_extents(sequence)
        sequence.statistics.prompt_extents = self._cache.extents_needed(len(sequence.request.prompt_ids))

    def resumed(self, sequence: RequestSequence) -> None:
        """Let a sequence decode whose slot has begun with the rows that it had left."""
        assert sequence.left is not None, "only what was found of its rows resumes a sequence"
        self._prefixes.resumed(sequence.slot, sequence.left, sequence.request.cache_salt)
        self.begin_steps(sequence)

    def begin_steps(self, sequence: RequestSequence) -> None:
        """Let a sequence decode, as its slot has all rows of its prompt."""
        known = len(sequence.request.prompt_ids) + len(sequence.generated)
        sequence.reading, sequence.replay = False, max(0, known - 1 - self._cache.tokens[sequence.slot])
        self._steps_with_room = 0

    def unread(self) -> list[RequestSequence]:
        """List the sequences whose prompt has not been read to its end, in the order of their admission."""
        return [s for s in self.running if s.reading]

    def decoding(self) -> list[RequestSequence]:
        """List the sequences that take part in the next decode step."""
        return [s for s in self.running if not s.reading and not s.stalled]

    # Growth. Call `short` once before each decode step, and `make_room` and `grow` for what it returns.

    def short(self) -> list[RequestSequence]:
        """List the decoding sequences whose extents have no room for the next step, the first in order first.

        It looks at none of them in most steps: as many as it has found to be without need.
        """
        self._steps_with_room -= 1
        if self._steps_with_room > 0:
            return []
        found, least = list[RequestSequence](), self._cache.config.update
        for sequence in self.running:
            sequence.stalled = False
            room = self._cache.extents.room(sequence.slot)
            if sequence.reading or room >= self._cache.retrieval_tokens(sequence.total_tokens):
                continue
            steps = self._cache.steps_with_room(sequence.slot)
            least = min(least, steps)
            if steps < 1:
                found.append(sequence)
        self._steps_with_room = least
        return sorted(found, key=order)

    def most_steps(self) -> int:
        """Return how many steps, the next one included, need no call of `short`; at least 1."""
        return max(1, self._steps_with_room)

    def note_steps(self, steps: int) -> None:
        """Take note that so many steps have been launched behind one call of `short`."""
        self._steps_with_room -= steps - 1

    def has_room(self, sequence: RequestSequence) -> bool:
        """Whether a decoding sequence can grow without others' making room."""
        return self._prefixes.has_room(sequence.slot, self._tokens_soon(sequence))

    def make_room(self, sequence: RequestSequence) -> bool:
        """Preempt others until a decoding sequence can grow, when no step is in flight; returns whether it can.

        If not, it has been preempted itself, or takes no part in the next step (`stalled`).
        """
        while not sequence.reading and not self.has_room(sequence):
            last = self._last(sequence)
            if last is None:
                sequence.stalled = True
                return False
            self.preempt(last)
        return not sequence.reading

    def grow(self, sequence: RequestSequence) -> None:
        """Give a sequence the extents for which there is room now; the cache's errors pass through."""
        self._prefixes.grow(sequence.slot, self._tokens_soon(sequence))
        self._count_extents(sequence)

    def preempt(self, sequence: RequestSequence) -> None:
        """Take a running sequence out, keep its rows as far as they are not used for others, and let it wait again."""
        self._leave(sequence)
        extents = self._cache.extents.of_slot(sequence.slot)
        self.running.remove(sequence)
        self.close(sequence, keep=True)
        if sequence.generated:
            before = frozenset() if sequence.left is None else sequence.left.nodes  # of which all may still be there
            sequence.left = self._prefixes.left_in(extents, sequence.packed_rows(), sequence.request.cache_salt, before)
        else:  # what it reuses when its prompt is read again is another matter
            statistics = sequence.statistics
            statistics.reused_tokens = statistics.reused_extents = statistics.shared_extents = 0
        sequence.slot, sequence.reading, sequence.replay, sequence.stalled = -1, True, 0, False
        sequence.statistics.num_preemptions += 1
        self.preemptions += 1
        self.queue.put_back(sequence)  # last: from then on other threads may end it

    def _last(self, growing: RequestSequence) -> RequestSequence | None:
        """Choose who makes room for a sequence: the last behind it whose end frees extents, or itself if others are before it.

        None: there are only such as will end without more room.
        """
        mine = order(growing)
        others = [s for s in self.running if s is not growing and not _stays(s)]
        behind = [s for s in others if order(s) > mine and self._cache.extents.sole(s.slot)]
        if behind:
            return max(behind, key=order)
        return growing if any(order(s) < mine for s in others) else None

    def _choose_prefix(self, head: RequestSequence) -> bool:
        """Choose the rows that the head need not compute, and return whether it can be admitted with them.

        Where room is short, it gives up extents that it would only copy from. The shared ones cost no room.
        """
        head.reserved_tokens = self._tokens_now(head)
        prompt, salt = head.packed_prompt, head.request.cache_salt
        found = None if head.left is None else self._prefixes.find_left(head.left, len(prompt), salt)
        head.prefix = self._prefixes.shorten(found, head.reserved_tokens)
        head.resumes = found is not None and head.prefix is found
        if not head.resumes:
            found = None if head.unscored is not None else self._prefixes.find(prompt, salt, head.reused_before)
            head.prefix = self._prefixes.shorten(found, head.reserved_tokens)
        if self._prefixes.fits(head.reserved_tokens, head.prefix, self._spare):
            return True
        growth = sum(max(0, self._prefixes.missing(one.slot, one.total_tokens)) for one in self.running)
        return self._prefixes.fits(head.reserved_tokens, head.prefix, min(self._spare, growth))

    def _tokens_now(self, sequence: RequestSequence) -> int:
        """Return the tokens that a waiting sequence must have room for: those that it has, and some to go on with."""
        if _stays(sequence):
            return sequence.total_tokens
        tokens = len(sequence.request.prompt_ids) + len(sequence.generated)
        more: int = self._cache.config.update * ROOM_FACTOR**sequence.statistics.num_preemptions
        return min(sequence.total_tokens, tokens + more)

    def _tokens_soon(self, sequence: RequestSequence) -> int:
        return min(sequence.total_tokens, self._cache.tokens_soon(sequence.slot))

    def _count_extents(self, sequence: RequestSequence) -> None:
        statistics = sequence.statistics
        statistics.extents = max(statistics.extents, len(self._cache.extents.of_slot(sequence.slot)))

    def remove(self, sequence: RequestSequence) -> None:
        """Take a running sequence out; `close` follows."""
        self.running.remove(sequence)
        sequence.finished = True

    def close(self, sequence: RequestSequence, keep: bool) -> None:
        """Free the slot and extents of a sequence that was taken out; `keep`: as far as its rows are not kept for others."""
        tokens = sequence.cached_tokens() if keep else None
        request = sequence.request
        self._prefixes.close(sequence.slot, tokens, request.cache_salt, request.session)
        if sequence.ends_session and request.session is not None:
            self._prefixes.end_session(request.cache_salt, request.session.id)
        if sequence.finished:  # whoever keeps the sequence must not keep the memory of these
            sequence.sampler.prepared = sequence.drafter = None
        self._free_slots.append(sequence.slot)
        self._head_waits = False  # the next `admit` finds out


def _stays(sequence: RequestSequence) -> bool:
    """Whether a sequence has been preempted so often that it runs with all extents that it may ever need, to its end."""
    return sequence.statistics.num_preemptions >= MOST_PREEMPTIONS
